# SPDX-License-Identifier: Apache-2.0
"""Calls that are run each time, before hypothesis draws its own.

What a run has found wrong is added here, as it was printed, with a word on what it showed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fuzz.strategies import Call, Layout, Spoiled
from hypothesis import example

CALLS = [
    # nothing to do: no sequence, no token, no table row, no head, no dimension, no rotary one
    Call(lengths=()),
    Call(lengths=(), tail_rows=3, spare_rows=2),
    Call(lengths=(0, 0)),
    Call(lengths=(0, 0), tail_rows=4),
    Call(heads=0),
    Call(head_dim=0, rotary_dim=0),
    Call(heads=0, interleaved=True),  # the oracle could not reshape it
    Call(lengths=(), heads=0, head_dim=0, rotary_dim=0, interleaved=True),
    Call(head_dim=5, rotary_dim=0, tail_rows=1),
    # empty sequences around and between, each with a start of its own
    Call(lengths=(0, 0, 7, 0, 0, 0, 9, 0), starts=(99, 98, 3, 97, 96, 95, 1, 94), tail_rows=2),
    # more sequences than a warp has lanes, or twice as many
    Call(lengths=(1,) * 31),
    Call(lengths=(1,) * 32),
    Call(lengths=(1, 0) * 33, tail_rows=1),
    Call(lengths=(0,) * 40 + (5,) + (0,) * 40 + (3,)),
    # every rank of a size that is no power of two, and the smallest share
    Call(lengths=(1, 12, 7), cp_size=3, cp_rank=0, starts=(4, 0, 2)),
    Call(lengths=(1, 12, 7), cp_size=3, cp_rank=1, starts=(4, 0, 2), transpose=True),
    Call(lengths=(1, 12, 7), cp_size=3, cp_rank=2, starts=(4, 0, 2), tail_rows=2),
    Call(lengths=(16,), cp_size=8, cp_rank=7),
    # d2 that is no whole vector, and a part that is copied
    Call(heads=3, head_dim=80, rotary_dim=20, dtype="bfloat16"),
    Call(heads=3, head_dim=66, rotary_dim=66, dtype="float16", interleaved=True),
    Call(heads=2, head_dim=7, rotary_dim=2, dtype="bfloat16", transpose=True),
    # the rows of each vector body, and the same one element off
    Call(heads=4, head_dim=128, rotary_dim=128, dtype="bfloat16", symmetric=True),
    Call(heads=5, head_dim=64, rotary_dim=64, dtype="float16", symmetric=True, interleaved=True),
    Call(heads=8, head_dim=128, rotary_dim=64, dtype="bfloat16", layout=Layout(gaps=(8, 8, 0))),
    Call(heads=16, head_dim=128, rotary_dim=128, dtype="bfloat16", lengths=(40, 41)),
    Call(heads=8, head_dim=128, rotary_dim=128, dtype="bfloat16", layout=Layout(offset=1)),
    Call(heads=8, head_dim=128, rotary_dim=128, dtype="float32", table_offset=1),
    Call(heads=1, head_dim=64, rotary_dim=64, dtype="bfloat16", lengths=(1,) * 70, tail_rows=3),
    # layouts: the gradient of a sum, a transposed input, odd rows, heads outermost
    Call(heads=4, head_dim=32, layout=Layout(expanded=frozenset({0, 1, 2})), transpose=True),
    Call(heads=4, head_dim=32, layout=Layout(order=(0, 2, 1)), transpose=True, dtype="float16"),
    Call(heads=4, head_dim=32, layout=Layout(order=(1, 0, 2), gaps=(1, 3, 1), offset=5)),
    # tables: strided, of another dtype, with rows that nobody uses
    Call(table_gap=3, table_dtype="bfloat16", starts=(9, 0)),
    Call(table_dtype="float64", spare_rows=300, interleaved=True),
]

_FITS = Call(lengths=(4, 8), tail_rows=2, spare_rows=4)
_RANK = Call(lengths=(8, 16), cp_size=2, cp_rank=1, tail_rows=2)

SPOILED = [
    Spoiled(_FITS, (0, 4, 12), None, 12),  # this one fits
    Spoiled(_FITS, (0, 4, 12), None, 7),  # a row short
    Spoiled(_FITS, (0, 4, 12), None, 0),
    Spoiled(_FITS, (0, 4, 12), (0, 5), 12),
    Spoiled(_FITS, (0, 4, 12), (-2, -(2**31)), 12),
    Spoiled(_FITS, (0, 4, 12), (2**31 - 1, 2**31 - 1), 12),
    Spoiled(_FITS, (3, 4, 12), None, 12),
    Spoiled(_FITS, (-3, 4, 12), None, 12),
    Spoiled(_FITS, (0, 4, 15), None, 12),  # a row past the tensor
    Spoiled(_FITS, (0, 4, 2**31 - 1), None, 12),
    Spoiled(_FITS, (-(2**31), -(2**31), 2**31 - 1), None, 12),
    Spoiled(_FITS, (0, 9, 4, 12), None, 12),
    Spoiled(_FITS, (12, 0), None, 12),
    Spoiled(_FITS, (0, 12, 0, 0), None, 12),
    Spoiled(_FITS, (7,), None, 12),
    Spoiled(_RANK, (0, 8, 24), None, 12),  # fits rank 1, whose positions are below 12
    Spoiled(_RANK, (0, 8, 24), None, 11),
    Spoiled(_RANK, (0, 7, 24), None, 16),
    Spoiled(_RANK, (0, 2, 24), None, 24),
    Spoiled(_RANK, (0, 1, 2), None, 24),
    Spoiled(_RANK, (0, 9, 4, 12), (3, -1, 2), 24),
    Spoiled(_RANK, (-1, 7, 23), None, 24),
]


def with_corpus(name: str, values: list[Any], **others: Any) -> Callable[[Any], Any]:
    """Add each value as an explicit example of the argument `name`, beside `others`."""

    def decorate(function: Any) -> Any:
        for value in reversed(values):
            function = example(**{name: value}, **others)(function)
        return function

    return decorate
