# SPDX-License-Identifier: Apache-2.0
"""Run a drawn call on a path, watch the memory around it, and say what it should have given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from fuzz.strategies import GUARD, Call, Tensors

from transformer_engine_overlay import path_counts
from transformer_engine_overlay.environment import forced_path
from transformer_engine_overlay.reference import rope_thd_reference
from transformer_engine_overlay.thd import rotate_thd
from transformer_engine_overlay.verify import same_bits

PATHS = {"0": "legacy_grid", "1": "token_linear"}
CANARY = 7.0


@contextmanager
def guarded_output() -> Iterator[None]:
    """Outputs lie in NaN between canaries, so that what is left out or written beside is seen."""
    memories: list[torch.Tensor] = []

    def empty_like(t: torch.Tensor, **_: Any) -> torch.Tensor:
        memory = torch.full((t.numel() + 2 * GUARD,), CANARY, dtype=t.dtype, device=t.device)
        memories.append(memory)
        return memory[GUARD:-GUARD].fill_(float("nan")).view(t.shape)

    with mock.patch.object(torch, "empty_like", empty_like):
        yield
    assert memories, "no output was made"
    for memory in memories:
        assert (memory[:GUARD] == CANARY).all(), "written before the output"
        assert (memory[-GUARD:] == CANARY).all(), "written behind the output"


def rotate(call: Call, tensors: Tensors, path: str) -> torch.Tensor:
    """Run a call on a path, which must be the only one that runs, and change no input."""
    before = [memory.clone() for memory in tensors.memory]
    counts = path_counts()
    with forced_path(path), guarded_output():
        y = rotate_thd(
            tensors.t,
            tensors.freqs,
            tensors.cu_seqlens,
            tensors.starts,
            call.interleaved,
            call.cp_size,
            call.cp_rank,
            call.transpose,
        )
    other = PATHS["1" if path == "0" else "0"]
    assert path_counts()[other] == counts[other]
    for memory, copy in zip(tensors.memory, before, strict=True):
        assert torch.equal(_words(memory), _words(copy)), "an input was changed"
    assert y.shape == tensors.t.shape
    assert y.is_contiguous()
    return y


def _words(x: torch.Tensor) -> torch.Tensor:
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def rotate_both(call: Call, tensors: Tensors) -> torch.Tensor:
    """Run a call on both paths, which must agree bit for bit."""
    legacy, linear = (rotate(call, tensors, path) for path in PATHS)
    assert same_bits(legacy, linear), "the paths differ"
    return linear


@contextmanager
def checked_mode() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TE_OVERLAY_CHECK", "1")
        yield


def oracle(call: Call, tensors: Tensors) -> torch.Tensor:
    """What the float64 reference gives; its gradient for the transposed rotation."""
    x = tensors.t.double()
    if call.transpose:
        # It is linear: the gradient does not depend on where it is taken.
        x = torch.zeros_like(x).requires_grad_()
    y = rope_thd_reference(
        x,
        tensors.freqs,
        tensors.cu_seqlens,
        start_positions=tensors.starts,
        interleaved=call.interleaved,
        cp_size=call.cp_size,
        cp_rank=call.cp_rank,
    )
    if not call.transpose:
        return y
    return torch.autograd.grad(y, x, tensors.t.double())[0]
