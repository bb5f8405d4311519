# SPDX-License-Identifier: Apache-2.0
"""A wrong build must not pass the comparison with TransformerEngine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mutation import Mutation, check_caught

PUBLIC_FUNCTION = "te/test_parity.py::test_k31_public_function"
# ids: cp_size, cp_rank, dtype, interleaved, side of the gate, path
FLOAT32_HALF_SPLIT = "dtype0-False-above the gate-token_linear"

MUTATIONS = {
    "swapped contraction": Mutation(
        "thd_rotation.h",
        "return __fmaf_rn(x, cos, __fmul_rn(partner, sin));",
        "return __fmaf_rn(partner, sin, __fmul_rn(x, cos));",
        (f"{PUBLIC_FUNCTION}[1-0-{FLOAT32_HALF_SPLIT}]",),
    ),
    "ignored cp_rank": Mutation(
        "thd_token_map.h",
        "if (row < half) return row + batch.cp_rank * length / 2;",
        "if (row < half) return row;",
        (f"{PUBLIC_FUNCTION}[4-3-{FLOAT32_HALF_SPLIT}]",),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(name: str, tmp_path: Path) -> None:
    major, minor = torch.cuda.get_device_capability()
    chip = f"{major}{minor}-real"
    check_caught(MUTATIONS[name], tmp_path, TE_OVERLAY_CUDA="1", TE_OVERLAY_CUDA_ARCHS=chip)
