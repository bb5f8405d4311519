# SPDX-License-Identifier: Apache-2.0
"""Drawn calls on metadata that fit, ours against stock TransformerEngine, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from fuzz.corpus import CALLS, with_corpus
from fuzz.harness import PATHS, rotate
from fuzz.profiles import profile
from fuzz.strategies import Call, calls, make_tensors
from hypothesis import assume, given

from transformer_engine_overlay.verify import same_bits


@profile()
@given(call=calls())
@with_corpus("call", CALLS)
def test_k31_rows_of_sequences_are_those_of_stock(
    tex: Any, stock: dict[str, Any], tally: Callable[[str], None], call: Call
) -> None:
    tensors = make_tensors(call, torch.device("cuda"))
    # Stock launches a grid of nothing where there is nothing to do.
    assume(call.rows > 0 and tensors.t.numel() > 0 and call.rotary_dim > 0)
    name = "fused_rope_backward" if call.transpose else "fused_rope_forward"
    starts = tensors.starts
    expected = stock[name](
        tensors.t,
        tensors.freqs.float().contiguous(),
        None if starts is None else starts[: len(call.lengths)],
        tex.NVTE_QKV_Format.NVTE_THD,
        call.interleaved,
        tensors.cu_seqlens,
        call.cp_size,
        call.cp_rank,
    )
    for path in PATHS:
        y = rotate(call, tensors, path)
        assert same_bits(y[: call.rows], expected[: call.rows])
    tally("against stock")
