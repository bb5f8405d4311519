# SPDX-License-Identifier: Apache-2.0
"""Which cell of the context-parallel matrix (ci/matrix.toml) a test case belongs to."""

from __future__ import annotations

from pathlib import Path

import pytest

TE_TESTS = Path(__file__).parent / "te"


def coordinates(item: pytest.Item) -> dict[str, str]:
    """Values of a case on the axes that it is parametrised by.

    One without a dtype is float32, as the makers of inputs in `packed` have it. One without a
    device runs on the CPU, unless it is of those that need a GPU.
    """
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    needs_gpu = TE_TESTS in item.path.parents or item.get_closest_marker("gpu") is not None
    found = {
        "device": "cuda" if needs_gpu else "cpu",
        "dtype": str(parameters.get("dtype", "float32")).removeprefix("torch."),
    }
    for axis in ("cp_size", "cp_rank"):
        if axis in parameters:
            found[axis] = str(parameters[axis])
    return found
