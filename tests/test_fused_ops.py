# SPDX-License-Identifier: Apache-2.0
"""The fused calls under torch.compile: whole graphs, the bits of eager calls."""

from __future__ import annotations

import pytest
import torch
from fused_cases import FusedCase, outputs_and_grads

from transformer_engine_overlay.verify import same_bits

OPS = torch.ops.transformer_engine_overlay
SPLIT = [64, 32, 16]


@pytest.fixture(autouse=True)
def _no_old_graphs() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture(params=[False, True], ids=["one table", "two tables"])
def case(request: pytest.FixtureRequest, device: torch.device) -> FusedCase:
    return FusedCase(str(device), torch.bfloat16, 32, 32, two_tables=request.param)


def test_qk_in_a_whole_graph(case: FusedCase) -> None:
    graph = torch.compile(case.qk, backend="aot_eager", fullgraph=True)
    inputs = case.random(301, 4, 32), case.random(301, 2, 32)
    for one, other in zip(
        outputs_and_grads(graph, inputs), outputs_and_grads(case.qk, inputs), strict=True
    ):
        assert same_bits(one, other)
        assert one.stride() == other.stride()


def test_qkv_in_a_whole_graph(case: FusedCase) -> None:
    graph = torch.compile(case.qkv, backend="aot_eager", fullgraph=True)
    inputs = (case.random(301, 2, sum(SPLIT)),)
    for one, other in zip(
        outputs_and_grads(graph, inputs, SPLIT),
        outputs_and_grads(case.qkv, inputs, SPLIT),
        strict=True,
    ):
        assert same_bits(one, other)
        assert one.stride() == other.stride()


def test_dynamic_token_counts_compile_once(case: FusedCase) -> None:
    graph = torch.compile(case.qkv, backend="aot_eager", fullgraph=True, dynamic=True)
    counts = []
    for tokens in (301, 320, 404):
        qkv = case.random(tokens, 2, sum(SPLIT))
        assert all(map(same_bits, graph(qkv, SPLIT), case.qkv(qkv, SPLIT)))
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts[0] == counts[-1]


@pytest.mark.parametrize("with_starts", [False, True])
def test_opcheck(case: FusedCase, with_starts: bool) -> None:
    starts = None
    if with_starts:
        starts = torch.arange(5, dtype=torch.int32, device=case.device)
    batch = (case.freqs, case.k_freqs, case.cu_seqlens, starts, False, 1, 0, False)
    q, k = case.random(301, 4, 32), case.random(301, 2, 32)
    q, k = q.requires_grad_(), k.requires_grad_()
    v = case.random(301, 2, 16).requires_grad_()
    qkv = case.random(301, 2, sum(SPLIT)).requires_grad_()
    torch.library.opcheck(OPS.rotate_qk.default, (q, k, *batch))
    torch.library.opcheck(OPS.split_qkv.default, (qkv, *SPLIT, *batch))
    torch.library.opcheck(OPS.join_qkv.default, (q, k, v, *SPLIT, *batch))


@pytest.mark.parametrize("strict", [False, True])
def test_exported(case: FusedCase, strict: bool) -> None:
    class Module(torch.nn.Module):
        def forward(self, qkv: torch.Tensor) -> tuple[torch.Tensor, ...]:
            q, k, v = case.qkv(qkv, SPLIT)
            return (*case.qk(q, k), v)

    qkv = case.random(301, 2, sum(SPLIT))
    exported = torch.export.export(Module(), (qkv,), strict=strict).module()
    assert all(map(same_bits, exported(qkv), Module()(qkv)))
