# SPDX-License-Identifier: Apache-2.0
"""What the fused kernels are given, seen without a GPU: a stand-in for them takes each call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fused_cases import FusedCase, outputs_and_grads
from test_fused import CASES, case

from transformer_engine_overlay import _native, fused
from transformer_engine_overlay.thd import rotate_thd
from transformer_engine_overlay.verify import same_bits

SPLITS = [[24, 8, 8], [8, 8, 5], [16, 8, 0]]


class StandIn:
    """Does with the views what the kernels do, part by part, and counts the calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *arguments: Any) -> bool:
        q, new_q, k, new_k, v, new_v, q_freqs, k_freqs, *rest = arguments
        starts, interleaved, cu_seqlens, cp_size, cp_rank, transpose = rest
        assert type(interleaved) is bool
        for part, output, freqs in ((q, new_q, q_freqs), (k, new_k, k_freqs)):
            assert part.shape == output.shape
            t, groups, heads, d = part.shape
            batch = (freqs, cu_seqlens, starts, interleaved, cp_size, cp_rank, transpose)
            rotated = rotate_thd(part.reshape(t, groups * heads, d), *batch)
            output.copy_(rotated.view(output.shape))
        assert (v is None) == (new_v is None)
        if v is not None:
            assert v.shape == new_v.shape
            new_v.copy_(v)
        self.calls += 1
        return True


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in = StandIn()
    monkeypatch.setattr(_native, "rotate_fused", stand_in)
    monkeypatch.setattr(fused, "_may_fuse", lambda t: True)
    return stand_in


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
class TestParity:
    def test_qk(self, changes: dict[str, Any], kernels: StandIn) -> None:
        batch = case(**changes)
        inputs = batch.random(301, 6, 8), batch.random(301, 2, 8)
        together = outputs_and_grads(batch.qk, inputs)
        assert kernels.calls == 2
        assert all(map(same_bits, together, outputs_and_grads(batch.qk_apart, inputs)))
        assert all(x.is_contiguous() for x in together)

    @pytest.mark.parametrize("split", SPLITS, ids=str)
    def test_qkv(self, changes: dict[str, Any], split: list[int], kernels: StandIn) -> None:
        batch = case(**changes)
        inputs = (batch.random(301, 2, sum(split)),)
        together = outputs_and_grads(batch.qkv, inputs, split)
        assert kernels.calls == 2
        assert all(map(same_bits, together, outputs_and_grads(batch.qkv_apart, inputs, split)))
        assert all(x.is_contiguous() for x in together)


def test_interleaved_as_an_int_is_left_to_plain_calls(kernels: StandIn) -> None:
    batch: FusedCase = case(interleaved=True)
    q = batch.random(301, 2, 8)
    expected = batch.qk_apart(q, q)
    batch.keywords["interleaved"] = 1
    assert all(map(same_bits, batch.qk(q, q), expected))
    assert kernels.calls == 0


def test_checked_calls_are_left_to_plain_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu: Any = SimpleNamespace(is_cuda=True)
    assert fused._may_fuse(on_a_gpu)
    monkeypatch.setenv("TE_OVERLAY_CHECK", "1")
    assert not fused._may_fuse(on_a_gpu)
    monkeypatch.delenv("TE_OVERLAY_CHECK")
    assert not fused._may_fuse(torch.zeros(1))
