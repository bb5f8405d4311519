# SPDX-License-Identifier: Apache-2.0
"""The fused kernels against the plain ones, bit for bit, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_cases import FusedCase, Tensors, outputs_and_grads

from transformer_engine_overlay import _native
from transformer_engine_overlay.verify import same_bits

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# query heads and key heads, head_dim, rotary_dim, width of the value
SHAPES = [
    (1, 1, 64, 64, 64),  # narrow
    (4, 1, 128, 128, 128),
    (3, 1, 64, 32, 24),
    (2, 2, 96, 96, 0),
    (8, 2, 128, 64, 64),
    (12, 4, 64, 64, 128),  # wide
    (32, 8, 128, 128, 128),
    (32, 32, 64, 32, 64),
    (16, 1, 192, 96, 40),
    (1, 1, 1024, 1024, 16),
]

BATCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "two tables": {"two_tables": True},
    "asymmetric": {"symmetric": False, "two_tables": True},
    "start positions past the table": {"starts": True, "table_rows": 200},
    "uneven cp": {"cp_size": 4, "cp_rank": 1, "boundaries": (0, 7, 40, 45, 260)},
}


def check(function: Any, expected: Any, inputs: Tensors, *arguments: Any, calls: int = 2) -> None:
    """Compare; `calls` fused calls must have been made, or none."""
    before = _native.fused_calls()
    together = outputs_and_grads(function, inputs, *arguments)
    assert _native.fused_calls() - before == calls
    apart = outputs_and_grads(expected, inputs, *arguments)
    for one, other in zip(together, apart, strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits(shape: tuple[int, ...], dtype: torch.dtype, interleaved: bool) -> None:
    q_heads, k_heads, d, rotary_dim, d_v = shape
    for changes in BATCHES.values():
        case = FusedCase("cuda", dtype, d, rotary_dim, interleaved, **changes)
        split = [q_heads // k_heads * d, d, d_v]
        check(case.qkv, case.qkv_apart, (case.random(301, k_heads, sum(split)),), split)
        inputs = case.random(301, q_heads, d), case.random(301, k_heads, d)
        check(case.qk, case.qk_apart, inputs)


def test_strided_parts() -> None:
    case = FusedCase("cuda", torch.bfloat16, 64, 64)
    fused = case.random(301, 4, 3, 64)
    check(case.qk, case.qk_apart, (fused[:, :, 0], fused[:, :, 2]))
    transposed = case.random(4, 301, 64).transpose(0, 1)
    check(case.qk, case.qk_apart, (transposed, fused[:, :, 1]))


@pytest.mark.parametrize(
    "make",
    [
        lambda case: (case.random(301, 2, 65)[..., 1:], case.random(301, 2, 64)),  # off a vector
        lambda case: (case.random(301, 64, 2).transpose(1, 2), case.random(301, 2, 64)),
    ],
    ids=["alignment", "stride_d"],
)
def test_what_the_fused_kernels_do_not_take(make: Any) -> None:
    case = FusedCase("cuda", torch.bfloat16, 64, 64)
    before = _native.fused_calls()
    inputs = make(case)
    assert all(map(same_bits, case.qk(*inputs), case.qk_apart(*inputs)))
    assert _native.fused_calls() == before


def test_legacy_grid_is_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_FUSED_ROPE_THD_TOKEN_LINEAR", "0")
    case = FusedCase("cuda", torch.bfloat16, 64, 64)
    check(case.qk, case.qk_apart, (case.random(301, 2, 64), case.random(301, 1, 64)), calls=0)


def test_tables_of_two_lengths() -> None:
    case = FusedCase("cuda", torch.bfloat16, 64, 64, two_tables=True)
    case.k_freqs = case.k_freqs[:280].contiguous()
    check(case.qk, case.qk_apart, (case.random(301, 2, 64), case.random(301, 1, 64)), calls=0)


def test_a_fault_is_recorded() -> None:
    case = FusedCase("cuda", torch.bfloat16, 64, 64, table_rows=16)
    q = case.random(301, 2, 64)
    _native.reset_faults(torch.cuda.current_device())
    case.qk(q, q)
    torch.cuda.synchronize()
    with pytest.warns(RuntimeWarning, match="freqs has 16 rows"):
        case.qk(q, q)
    _native.reset_faults(torch.cuda.current_device())


def test_captured_in_a_graph() -> None:
    case = FusedCase("cuda", torch.bfloat16, 128, 128)
    qkv = case.random(301, 2, 4 * 128)
    split = [256, 128, 128]
    case.qkv(qkv, split)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = case.qkv(qkv, split)
    qkv.copy_(case.random(*qkv.shape))
    graph.replay()
    assert all(map(same_bits, outputs, case.qkv_apart(qkv, split)))
