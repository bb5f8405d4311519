# SPDX-License-Identifier: Apache-2.0
"""The operator that torch.compile keeps in its graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from packed import DTYPES, boundaries, randn, random_table

from transformer_engine_overlay import apply_rotary_pos_emb_thd, path_counts
from transformer_engine_overlay.verify import same_bits

OPS = torch.ops.transformer_engine_overlay


def inputs(device: torch.device, tokens: int = 16) -> tuple[torch.Tensor, ...]:
    t = randn(tokens, 2, 8, device=device)
    return t, random_table(64, 8, device), boundaries([0, 4, tokens], device)


@pytest.fixture(autouse=True)
def _no_old_graphs() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


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
        counts.append(graphs())
    assert counts[0] == counts[-1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("needs_grad", [False, True])
def test_marked_token_counts_and_ranks_compile_once(
    device: torch.device, dtype: torch.dtype, needs_grad: bool
) -> None:
    _, freqs, _ = inputs(device)

    def rotate(t: torch.Tensor, cu: torch.Tensor, cp_rank: int) -> torch.Tensor:
        return apply_rotary_pos_emb_thd(t * 2, freqs, cu, cp_size=4, cp_rank=cp_rank)

    function = torch.compile(rotate, backend="aot_eager", fullgraph=True)
    counts = []
    for tokens in (8, 12, 16):
        cu = boundaries([0, 8, 4 * tokens], device)
        t = randn(tokens, 2, 8, dtype=dtype, device=device).requires_grad_(needs_grad)
        torch._dynamo.mark_dynamic(t, 0)
        for cp_rank in range(4):
            y, expected = function(t, cu, cp_rank), rotate(t, cu, cp_rank)
            assert same_bits(y, expected)
            if needs_grad:
                g = randn(*y.shape, dtype=dtype, device=device, seed=1)
                (a,), (b,) = (torch.autograd.grad(z, t, g) for z in (y, expected))
                assert same_bits(a, b)
        counts.append(graphs())
    assert counts[0] <= 2  # the first rank, and any other
    assert counts[-1] == counts[0]


def test_path_is_read_when_the_graph_runs(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, arguments = compiled(), inputs(device)
    expected = function(*arguments)
    for value, path in {"0": "legacy_grid", "1": "token_linear"}.items():
        monkeypatch.setenv("NVTE_FUSED_ROPE_THD_TOKEN_LINEAR", value)
        before = path_counts()[path]["calls"]
        assert same_bits(function(*arguments), expected)
        assert path_counts()[path]["calls"] == before + 1
    monkeypatch.setenv("NVTE_FUSED_ROPE_THD_TOKEN_LINEAR", "on")
    with pytest.raises(ValueError, match="NVTE_FUSED_ROPE_THD_TOKEN_LINEAR is 'on'"):
        function(*arguments)
    assert graphs() == 1


def test_checks_are_asked_for_when_the_graph_runs(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TE_OVERLAY_ON_FAULT", "ignore")
    function, (t, freqs, cu) = compiled(), inputs(device)
    function(t, freqs[:8], cu)
    monkeypatch.setenv("TE_OVERLAY_CHECK", "1")
    with pytest.raises(ValueError, match=r"position 11 .* but freqs has 8 rows"):
        function(t, freqs[:8], cu)
    monkeypatch.delenv("TE_OVERLAY_CHECK")
    function(t, freqs[:8], cu)
    assert graphs() == 1


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
    torch.library.opcheck(OPS.rotate_thd.default, arguments)


def test_gradient_of_the_operator_is_the_transpose(device: torch.device) -> None:
    t, freqs, cu = inputs(device)
    t.requires_grad_()
    y = OPS.rotate_thd(t, freqs, cu, None, False, 1, 0, False)
    (grad,) = torch.autograd.grad(y, t, torch.ones_like(y))
    assert same_bits(grad, OPS.rotate_thd(torch.ones_like(y), freqs, cu, None, False, 1, 0, True))


def test_bad_arguments_are_named_by_the_operator(device: torch.device) -> None:
    t, freqs, cu = inputs(device)
    with pytest.raises(TypeError, match=r"cu_seqlens has dtype torch\.int64"):
        OPS.rotate_thd(t, freqs, cu.long(), None, False, 1, 0, False)
