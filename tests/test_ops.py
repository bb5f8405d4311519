# SPDX-License-Identifier: Apache-2.0
"""The operator that torch.compile keeps in its graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packed import boundaries, randn, random_table

from transformer_engine_overlay import apply_rotary_pos_emb_thd, ops
from transformer_engine_overlay.verify import same_bits


def inputs(device: torch.device, tokens: int = 16) -> tuple[torch.Tensor, ...]:
    t = randn(tokens, 2, 8, device=device)
    return t, random_table(64, 8, device), boundaries([0, 4, tokens], device)


@pytest.fixture(autouse=True)
def _no_old_graphs() -> None:
    torch._dynamo.reset()


def compiled(**options: Any) -> Any:
    # aot_eager: the whole compiled path but code generation, which needs a compiler of its own
    return torch.compile(
        lambda t, freqs, cu: apply_rotary_pos_emb_thd(t, freqs, cu, cp_size=1) * 2,
        backend="aot_eager",
        fullgraph=True,
        **options,
    )


def test_whole_graph_forward_and_backward(device: torch.device) -> None:
    t, freqs, cu = inputs(device)
    results = []
    for function in (lambda *a: apply_rotary_pos_emb_thd(*a) * 2, compiled()):
        x = t.clone().requires_grad_()
        y = function(x, freqs, cu)
        y.square().sum().backward()
        results.append((y.detach(), x.grad))
    for eager, graph in zip(*results, strict=True):
        assert eager is not None
        assert graph is not None
        assert same_bits(eager, graph)


def test_dynamic_token_counts_compile_once(device: torch.device) -> None:
    function = compiled(dynamic=True)
    counts = []
    for tokens in (16, 24, 40):
        t, freqs, cu = inputs(device, tokens)
        assert same_bits(function(t, freqs, cu), apply_rotary_pos_emb_thd(t, freqs, cu) * 2)
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts[0] == counts[-1]


def test_strided_input_has_contiguous_output_in_the_graph_too(device: torch.device) -> None:
    t, freqs, cu = inputs(device)
    fused = torch.cat([t, t, t], -1)[..., 8:16]
    assert (
        compiled()(fused, freqs, cu).stride() == apply_rotary_pos_emb_thd(fused, freqs, cu).stride()
    )


@pytest.mark.parametrize("with_starts", [False, True])
def test_opcheck(device: torch.device, with_starts: bool) -> None:
    t, freqs, cu = inputs(device)
    starts = torch.tensor([1, 2], dtype=torch.int32, device=device) if with_starts else None
    arguments = (t.requires_grad_(), freqs, cu, starts, True, 1, 0, False)
    torch.library.opcheck(torch.ops.transformer_engine_overlay.rotate_thd.default, arguments)


def test_gradient_of_the_operator_is_the_transpose(device: torch.device) -> None:
    t, freqs, cu = inputs(device)
    t.requires_grad_()
    y = ops.operator(t, freqs, cu, None, False, 1, 0, False)
    (grad,) = torch.autograd.grad(y, t, torch.ones_like(y))
    assert same_bits(grad, ops.operator(torch.ones_like(y), freqs, cu, None, False, 1, 0, True))


def test_bad_arguments_are_named_by_the_operator(device: torch.device) -> None:
    t, freqs, cu = inputs(device)
    with pytest.raises(TypeError, match=r"cu_seqlens has dtype torch\.int64"):
        ops.operator(t, freqs, cu.long(), None, False, 1, 0, False)
