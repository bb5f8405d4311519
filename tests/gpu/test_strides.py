# SPDX-License-Identifier: Apache-2.0
"""Strides of more than 2^31 elements, of each dimension, forward and as a gradient."""

from __future__ import annotations

import pytest
import torch

from transformer_engine_overlay import apply_rotary_pos_emb_thd
from transformer_engine_overlay.environment import forced_path
from transformer_engine_overlay.verify import same_bits

pytestmark = pytest.mark.gpu

# Of the last dimension, 33 strides of 2^26 elements; the others alone are past 2^31.
STRIDES = {
    "rows": ((3, 2, 64), (2**31 + 64, 64, 1)),
    "rows, not whole vectors": ((3, 2, 64), (2**31 + 1, 64, 1)),
    "heads": ((2, 3, 64), (64, 2**31 + 256, 1)),
    "columns": ((2, 2, 34), (1, 2, 2**26)),
}


@pytest.mark.parametrize("name", STRIDES)
@pytest.mark.parametrize("path", ["0", "1"], ids=["legacy_grid", "token_linear"])
@pytest.mark.parametrize("interleaved", [False, True])
def test_k08_past_two_to_the_31(name: str, path: str, interleaved: bool) -> None:
    shape, strides = STRIDES[name]
    extent = 1 + sum(s * (n - 1) for s, n in zip(strides, shape, strict=True))
    free, _ = torch.cuda.mem_get_info()
    if free < 2 * extent + 2**28:
        pytest.skip(f"needs {2 * extent / 1e9:.0f} GB of GPU memory, {free / 1e9:.0f} GB are free")
    memory = torch.empty(extent, dtype=torch.bfloat16, device="cuda")
    wide = memory.as_strided(shape, strides)
    compact = torch.randn(shape, device="cuda").bfloat16()
    wide.copy_(compact)
    freqs = torch.randn(8, 1, 1, shape[2], device="cuda") * 30
    cu = torch.tensor([0, shape[0]], dtype=torch.int32, device="cuda")

    results = []
    with forced_path(path):
        for x in (wide, compact):
            t = x.detach().requires_grad_()
            y = apply_rotary_pos_emb_thd(t, freqs, cu, interleaved=interleaved)
            # The same values as the gradient: forward and transpose are not alike here.
            (grad,) = torch.autograd.grad(y, t, x)
            results.append((y.detach(), grad))
    (y, grad), (y_compact, grad_compact) = results
    assert same_bits(y, y_compact)
    assert same_bits(grad, grad_compact)
    assert not same_bits(y, grad)
