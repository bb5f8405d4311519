# SPDX-License-Identifier: Apache-2.0
"""Whole layers: the same output and gradients with the overlay as without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from packed import boundaries, randn, random_table

import transformer_engine_overlay as overlay

Compare = Callable[..., tuple[Any, Any]]
CUDA = torch.device("cuda")
TOKENS, HIDDEN, HEADS = 512, 512, 8


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without this the gradients of attention differ from run to run, overlay or not."""
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    cu = boundaries([0, 100, 101, 300, 512], CUDA)
    freqs = random_table(4096, HIDDEN // HEADS, CUDA)
    arguments = {
        "cu_seqlens_q": cu,
        "cu_seqlens_kv": cu,
        "max_seqlen_q": 212,
        "max_seqlen_kv": 212,
        "rotary_pos_emb": freqs,
    }
    x = randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device=CUDA)
    return x, randn(TOKENS, HIDDEN, dtype=torch.bfloat16, device=CUDA, seed=1), arguments


def make_layer(name: str) -> torch.nn.Module:
    import transformer_engine.pytorch as te

    torch.manual_seed(0)
    if name == "TransformerLayer":
        return te.TransformerLayer(
            HIDDEN,
            1024,
            HEADS,
            num_gqa_groups=2,
            attn_input_format="thd",
            self_attn_mask_type="padding_causal",
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype=torch.bfloat16,
        )
    return te.MultiheadAttention(
        HIDDEN,
        HEADS,
        num_gqa_groups=2,
        qkv_format="thd",
        attn_mask_type="padding_causal",
        attention_dropout=0.0,
        params_dtype=torch.bfloat16,
        fuse_qkv_params=True,
    )


def step(
    layer: torch.nn.Module, x: torch.Tensor, grad: torch.Tensor, forward: Callable[..., Any]
) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    layer.zero_grad(set_to_none=True)
    y = forward(x)
    y.backward(grad)
    gradients = [p.grad for p in layer.parameters() if p.grad is not None]
    assert len(gradients) > 3
    return [y.detach(), x.grad, *gradients]


@pytest.mark.parametrize("name", ["TransformerLayer", "MultiheadAttention"])
@pytest.mark.parametrize("recompute", [False, True])
def test_identical(
    compare: Compare,
    batch: tuple[torch.Tensor, torch.Tensor, dict[str, Any]],
    name: str,
    recompute: bool,
) -> None:
    x, grad, arguments = batch
    layer = make_layer(name)

    def forward(x: torch.Tensor) -> torch.Tensor:
        if not recompute:
            return layer(x, **arguments)
        return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False, **arguments)

    calls = 6 if recompute else 4  # q and k: forward, again if recomputed, backward
    expected, routed = compare(lambda: step(layer, x, grad, forward), value=None, calls=calls)
    again = step(layer, x, grad, forward)
    # Stock must agree with itself, or a difference would say nothing.
    assert all(torch.equal(a, b) for a, b in zip(expected, again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(expected, routed, strict=True))
    assert all(t.isfinite().all() for t in routed)


def test_rope_matters(batch: tuple[torch.Tensor, torch.Tensor, dict[str, Any]]) -> None:
    """Guards the test above: without RoPE the layer gives something else."""
    x, _, arguments = batch
    layer = make_layer("MultiheadAttention")
    with torch.no_grad():
        with_rope = layer(x, **arguments)
        without = layer(x, **{**arguments, "rotary_pos_emb": None})
    assert not torch.equal(with_rope, without)


def test_k38_compiling_breaks_the_graph_no_more_often() -> None:
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    t, freqs = randn(64, 4, 64, device=CUDA), random_table(64, 64, CUDA)
    cu = boundaries([0, 20, 64], CUDA)

    def function(t: torch.Tensor) -> torch.Tensor:
        y = apply_rotary_pos_emb(t * 2, freqs, tensor_format="thd", fused=True, cu_seqlens=cu)
        return y + 1

    def breaks() -> tuple[int, torch.Tensor]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        result = torch.compile(function, backend="eager")(t)
        return sum(torch._dynamo.utils.counters["graph_break"].values()), result

    stock_breaks, expected = breaks()
    with overlay.patched():
        routed_breaks, result = breaks()
    torch._dynamo.reset()
    assert routed_breaks <= stock_breaks
    assert torch.equal(result, expected)
