# SPDX-License-Identifier: Apache-2.0
"""torch.compile around TransformerEngine's own function: no break, and the bits of stock."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from packed import DTYPES, boundaries, randn, random_table

import transformer_engine_overlay as overlay
from transformer_engine_overlay import path_counts
from transformer_engine_overlay.verify import same_bits

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    overlay.disable()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    overlay.disable()
    torch._dynamo.reset()


def routed() -> int:
    return sum(count["routed"] for count in path_counts().values())


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def call(t: torch.Tensor, freqs: torch.Tensor, **options: Any) -> torch.Tensor:
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    y: torch.Tensor = apply_rotary_pos_emb(t * 2, freqs, fused=True, **options)
    return y + 1


def thd(**options: Any) -> dict[str, Any]:
    return {"tensor_format": "thd", "cu_seqlens": boundaries([0, 20, 64], CUDA), **options}


def compiled(**options: Any) -> Callable[..., torch.Tensor]:
    made: Callable[..., torch.Tensor] = torch.compile(call, backend="aot_eager", **options)
    return made


def step(
    function: Callable[..., torch.Tensor], t: torch.Tensor, freqs: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    x = t.clone().requires_grad_()
    y = function(x, freqs, **options)
    y.backward(randn(*y.shape, dtype=y.dtype, device=CUDA, seed=1))
    assert x.grad is not None
    return y.detach(), x.grad


def assert_same(results: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    assert all(same_bits(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.parametrize("needs_grad", [False, True])
def test_k38_no_break_with_the_overlay(needs_grad: bool) -> None:
    t = randn(64, 4, 64, device=CUDA).requires_grad_(needs_grad)
    freqs = random_table(64, 64, CUDA)
    stock = torch._dynamo.explain(call)(t, freqs, **thd())
    torch._dynamo.reset()
    with overlay.patched():
        ours = torch._dynamo.explain(call)(t, freqs, **thd())
    assert ours.graph_break_count == 0, ours.break_reasons
    assert ours.graph_count == 1
    assert stock.graph_break_count >= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("cp_size", "cp_rank"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("with_starts", [False, True])
def test_bits_of_stock(
    dtype: torch.dtype, interleaved: bool, cp_size: int, cp_rank: int, with_starts: bool
) -> None:
    t, freqs = randn(64, 4, 64, dtype=dtype, device=CUDA), random_table(256, 64, CUDA)
    options = thd(
        cu_seqlens=boundaries([0, 20 * cp_size, 64 * cp_size], CUDA),
        start_positions=boundaries([3, 70], CUDA) if with_starts else None,
        interleaved=interleaved,
        cp_size=cp_size,
        cp_rank=cp_rank,
    )
    expected = step(call, t, freqs, **options)
    with overlay.patched():
        before = routed()
        results = step(compiled(fullgraph=True), t, freqs, **options)
        assert routed() == before + 2
    assert_same(results, expected)


@pytest.mark.parametrize(("layout", "shape"), [("sbhd", (64, 2, 4, 64)), ("bshd", (2, 64, 4, 64))])
def test_other_layouts_are_those_of_stock(layout: str, shape: tuple[int, ...]) -> None:
    t, freqs = randn(*shape, device=CUDA), random_table(64, 64, CUDA)
    expected = step(call, t, freqs, tensor_format=layout)
    with overlay.patched():
        before = routed()
        assert_same(step(compiled(), t, freqs, tensor_format=layout), expected)
        assert routed() == before


def test_enabled_and_disabled_after_compiling(tex: types.ModuleType) -> None:
    t, freqs, options = randn(64, 4, 64, device=CUDA), random_table(64, 64, CUDA), thd()
    function = compiled()
    expected = step(function, t, freqs, **options)
    stock = tex.fused_rope_forward, tex.fused_rope_backward
    for _ in range(2):
        with overlay.patched():
            before = routed()
            assert_same(step(function, t, freqs, **options), expected)
            assert routed() == before + 2
        assert (tex.fused_rope_forward, tex.fused_rope_backward) == stock
        before = routed()
        assert_same(step(function, t, freqs, **options), expected)
        assert routed() == before


def test_enabled_again_has_its_graphs_already() -> None:
    t, freqs, options = randn(64, 4, 64, device=CUDA), random_table(64, 64, CUDA), thd()
    function = compiled(fullgraph=True)
    with overlay.patched():
        expected = step(function, t, freqs, **options)
    made = graphs()
    for _ in range(12):  # more than torch.compile is willing to compile a function
        with overlay.patched():
            assert_same(step(function, t, freqs, **options), expected)
    assert graphs() == made


def test_path_is_read_when_the_graph_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    t, freqs, options = randn(64, 4, 64, device=CUDA), random_table(64, 64, CUDA), thd()
    with overlay.patched():
        function = compiled(fullgraph=True)
        expected = step(function, t, freqs, **options)
        before = routed()
        monkeypatch.setenv("NVTE_FUSED_ROPE_THD_TOKEN_LINEAR", "0")
        assert_same(step(function, t, freqs, **options), expected)
        assert routed() == before
        assert graphs() == 1


def test_token_counts_and_ranks_compile_once() -> None:
    freqs = random_table(256, 64, CUDA)
    with overlay.patched():
        function = compiled(fullgraph=True)
        counts = []
        for tokens in (24, 32, 40):
            t = randn(tokens, 4, 64, device=CUDA).requires_grad_()
            torch._dynamo.mark_dynamic(t, 0)
            cu = boundaries([0, 16, 4 * tokens], CUDA)
            for cp_rank in range(4):
                options = thd(cu_seqlens=cu, cp_size=4, cp_rank=cp_rank)
                assert same_bits(function(t, freqs, **options), call(t, freqs, **options))
            counts.append(graphs())
    assert counts[-1] == counts[0] <= 2
