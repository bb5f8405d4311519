# SPDX-License-Identifier: Apache-2.0
"""TE's public function, stock against routed, bit for bit, over every rank and path."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from packed import DTYPES, PAIRINGS, boundaries, randn, random_table

import transformer_engine_overlay as overlay
from transformer_engine_overlay import _native
from transformer_engine_overlay.packing import padded_cu_seqlens
from transformer_engine_overlay.thd import path_counts, rotate_thd
from transformer_engine_overlay.verify import same_bits

Compare = Callable[..., tuple[Any, Any]]
CUDA = torch.device("cuda")
EVERY_RANK = [(size, rank) for size in (1, 2, 4, 8) for rank in range(size)]
# sequences and table rows: below and above the gate of 2.19, s*b > 2*cp*t and s*b - t >= 65536
SIDES = {"below the gate": (6, 512), "above the gate": (40, 4096)}
# heads, d, d2
SHAPES = [(8, 64, 64), (3, 80, 20), (1, 64, 64), (2, 192, 128)]


def cu_seqlens_for(side: str, cp_size: int) -> torch.Tensor:
    """Boundaries of a batch on one side of the gate, an empty sequence among them."""
    rng = random.Random(side)
    sequences, _ = SIDES[side]
    lengths = [rng.randrange(1, 96) for _ in range(sequences - 1)]
    return padded_cu_seqlens([*lengths[:2], 0, *lengths[2:]], cp_size, CUDA)


def is_above_gate(table_rows: int, sequences: int, tokens: int, cp_size: int) -> bool:
    blocks = table_rows * sequences
    return blocks > 2 * cp_size * tokens and blocks - tokens >= 65536


def inputs(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The same values in the layouts that callers have, and an expanded one."""
    t = randn(tokens, heads, dim, dtype=dtype, device=CUDA)
    yield t
    fused = randn(tokens, heads, 3 * dim, dtype=dtype, device=CUDA, seed=1)
    yield fused[..., dim : 2 * dim]
    yield t.transpose(1, 2).contiguous().transpose(1, 2)
    yield t[:, :1].expand(-1, heads, -1)


@pytest.mark.parametrize("value", ["1", None], ids=["token_linear", "automatic"])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("interleaved", PAIRINGS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("cp_size", "cp_rank"), EVERY_RANK)
def test_k31_public_function(
    compare: Compare,
    cp_size: int,
    cp_rank: int,
    dtype: torch.dtype,
    interleaved: bool,
    side: str,
    value: str | None,
) -> None:
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    cu = cu_seqlens_for(side, cp_size)
    tokens = int(cu[-1]) // cp_size
    sequences, table_rows = SIDES[side]
    table_rows = max(table_rows, int(cu.diff().max()) + 64)
    if cp_size == 1:
        assert is_above_gate(table_rows, sequences, tokens, cp_size) == (side == "above the gate")
    starts = torch.arange(sequences, dtype=torch.int32, device=CUDA)
    for heads, dim, rotary_dim in SHAPES:
        freqs = random_table(table_rows, rotary_dim, CUDA)
        grad = randn(tokens, heads, dim, dtype=dtype, device=CUDA, seed=2)
        for t, start_positions in zip(
            inputs(tokens, heads, dim, dtype), (None, starts, None, starts), strict=True
        ):

            def call(
                t: torch.Tensor = t,
                freqs: torch.Tensor = freqs,
                start_positions: torch.Tensor | None = start_positions,
                grad: torch.Tensor = grad,
            ) -> tuple[torch.Tensor, torch.Tensor]:
                x = t.detach().requires_grad_()
                y = apply_rotary_pos_emb(
                    x,
                    freqs,
                    tensor_format="thd",
                    start_positions=start_positions,
                    interleaved=interleaved,
                    fused=True,
                    cu_seqlens=cu,
                    cp_size=cp_size,
                    cp_rank=cp_rank,
                )
                (gradient,) = torch.autograd.grad(y, x, grad)
                return y.detach(), gradient

            path = "token_linear" if value == "1" else None
            expected, routed = compare(call, value=value, calls=2, path=path)
            assert all(same_bits(a, b) for a, b in zip(expected, routed, strict=True))


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("cp_size", "cp_rank"), EVERY_RANK)
def test_our_legacy_grid(
    stock: dict[str, Any],
    tex: Any,
    cp_size: int,
    cp_rank: int,
    dtype: torch.dtype,
    transpose: bool,
    on_path: Callable[..., Any],
) -> None:
    """The second path of an install without TransformerEngine has its bits too."""
    cu = cu_seqlens_for("above the gate", cp_size)
    t = randn(int(cu[-1]) // cp_size, 4, 64, dtype=dtype, device=CUDA)
    freqs = random_table(4096, 64, CUDA)
    function = stock["fused_rope_backward" if transpose else "fused_rope_forward"]
    for interleaved in PAIRINGS:
        arguments = (interleaved, cu, cp_size, cp_rank)
        expected = function(t, freqs, None, tex.NVTE_QKV_Format.NVTE_THD, *arguments)
        ours = on_path(
            "0",
            lambda i=interleaved: rotate_thd(t, freqs, cu, None, i, cp_size, cp_rank, transpose),
        )
        assert same_bits(ours, expected)


@pytest.mark.parametrize("side", SIDES)
def test_zero_is_the_dispatch_of_te(
    stock: dict[str, Any], tex: Any, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cu = cu_seqlens_for(side, 1)
    t, freqs = randn(int(cu[-1]), 4, 64, device=CUDA), random_table(SIDES[side][1], 64, CUDA)
    arguments = (t, freqs, None, tex.NVTE_QKV_Format.NVTE_THD, False, cu, 1, 0)
    monkeypatch.setenv("NVTE_FUSED_ROPE_THD_TOKEN_LINEAR", "0")
    with overlay.patched():
        before = _native.passed_through(), path_counts()
        y = tex.fused_rope_forward(*arguments)
        assert (_native.passed_through(), path_counts()) == (before[0] + 1, before[1])
    assert same_bits(y, stock["fused_rope_forward"](*arguments))


@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd"])
def test_other_layouts_are_untouched(tensor_format: str) -> None:
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    t = randn(64, 2, 4, 64, device=CUDA).requires_grad_()
    freqs = random_table(64, 64, CUDA)

    def call() -> list[torch.Tensor]:
        y = apply_rotary_pos_emb(t, freqs, tensor_format=tensor_format, fused=True)
        return [y.detach(), *torch.autograd.grad(y.sum(), t)]

    expected = call()
    before = path_counts(), _native.passed_through()
    with overlay.patched():
        routed = call()
    assert path_counts() == before[0]
    assert _native.passed_through() == before[1] + 2
    assert all(same_bits(a, b) for a, b in zip(expected, routed, strict=True))


def test_k19_one_sequence_equals_sbhd(tex: Any, stock: dict[str, Any]) -> None:
    t, freqs = randn(64, 4, 64, device=CUDA), random_table(64, 64, CUDA)
    layouts = tex.NVTE_QKV_Format
    for interleaved in PAIRINGS:
        with overlay.patched():
            packed = tex.fused_rope_forward(
                *(t, freqs, None, layouts.NVTE_THD, interleaved, boundaries([0, 64], CUDA), 1, 0)
            )
        plain = stock["fused_rope_forward"](
            *(t[:, None], freqs, None, layouts.NVTE_SBHD, interleaved, None, 1, 0)
        )
        assert same_bits(packed, plain[:, 0])


def test_errors_of_stock_are_the_errors_seen(tex: Any, stock: dict[str, Any]) -> None:
    t, freqs, cu = randn(8, 2, 8, device=CUDA), random_table(16, 8, CUDA), boundaries([0, 8], CUDA)
    thd = tex.NVTE_QKV_Format.NVTE_THD
    good = (t, freqs, None, thd, False, cu, 1, 0)
    bad = [
        (t[0], *good[1:]),
        (t, freqs[:, 0, 0], *good[2:]),
        (t, freqs.bfloat16(), *good[2:]),
        (t, random_table(16, 10, CUDA), *good[2:]),
        (t, freqs.expand(-1, 2, -1, -1), *good[2:]),
        (*good[:5], None, 1, 0),
        (*good[:2], boundaries([0], CUDA)[0], *good[3:]),
        good[:7],
        (*good[:6], 1.5, 0),
    ]
    for arguments in bad:
        with pytest.raises(Exception) as original:  # noqa: PT011 (which one is the point)
            stock["fused_rope_forward"](*arguments)
        with overlay.patched(), pytest.raises(type(original.value)) as routed:
            tex.fused_rope_forward(*arguments)
        assert first_line(routed.value) == first_line(original.value)


def first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]


def test_rows_that_stock_leaves_or_loses_are_zeros(tex: Any) -> None:
    t = torch.full((100, 2, 8), float("nan"), device=CUDA)
    t[:90] = 1.0
    arguments = (None, tex.NVTE_QKV_Format.NVTE_THD, False, boundaries([0, 40, 90], CUDA), 1, 0)
    with overlay.patched():
        y = tex.fused_rope_forward(t, random_table(45, 8, CUDA), *arguments)
    assert (y[90:] == 0).all()
    assert (y[85:90] == 0).all()  # positions 45 to 49, past the table
    assert (y[:85] != 0).any(dim=(1, 2)).all()
