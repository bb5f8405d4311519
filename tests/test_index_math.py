# SPDX-License-Identifier: Apache-2.0
"""Owner and table row of local tokens, against the oracle and against TE's formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import boundaries

from transformer_engine_overlay import _native
from transformer_engine_overlay.packing import padded_cu_seqlens
from transformer_engine_overlay.reference import local_positions

CP = st.sampled_from([1, 2, 3, 4, 8]).flatmap(
    lambda size: st.tuples(st.just(size), st.integers(0, size - 1))
)


def locate(
    cu: torch.Tensor,
    starts: torch.Tensor | None,
    table_rows: int,
    cp_size: int,
    cp_rank: int,
    num_tokens: int,
) -> tuple[list[int], list[int]]:
    """Sequence and table row of each local token, from the header that the kernels use.

    The search of a warp and the binary one must agree where boundaries do not decrease.
    """
    arguments = (cu, starts, table_rows, cp_size, cp_rank, num_tokens)
    narrow, wide = (_locate(*arguments, warp_wide) for warp_wide in (False, True))
    agree = narrow == wide
    assert agree or (cu.diff() < 0).any()
    return wide


def _locate(
    cu: torch.Tensor,
    starts: torch.Tensor | None,
    table_rows: int,
    cp_size: int,
    cp_rank: int,
    num_tokens: int,
    warp_wide: bool,
) -> tuple[list[int], list[int]]:
    sequences = torch.full((num_tokens,), -7, dtype=torch.int64)
    rows = torch.full((num_tokens,), -7, dtype=torch.int64)
    _native.locate_tokens(
        cu.data_ptr(),
        0 if starts is None else starts.data_ptr(),
        cu.shape[0] - 1,
        table_rows,
        cp_size,
        cp_rank,
        num_tokens,
        warp_wide,
        sequences.data_ptr(),
        rows.data_ptr(),
    )
    return sequences.tolist(), rows.tolist()


def rows_by_te_formula(
    cu: list[int], starts: list[int], cp_size: int, cp_rank: int, num_tokens: int
) -> list[int]:
    """Position by TE's rule for any boundaries, written as loops over sequences and rows."""
    rows = [-1] * num_tokens
    for i, start in enumerate(starts):
        begin, end = cu[i] // cp_size, cu[i + 1] // cp_size
        length = end - begin
        for r in range(length):
            if cp_size == 1:
                position = r
            elif r < length // 2:
                position = r + cp_rank * length // 2
            else:
                position = r + length * cp_size - (cp_rank + 1) * length // 2 - length // 2
            if begin + r < num_tokens:
                rows[begin + r] = position + start
    return rows


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=40),
    cp=CP,
    tail=st.integers(0, 5),
    data=st.data(),
)
def test_padded_batches_match_the_oracle(
    lengths: list[int], cp: tuple[int, int], tail: int, data: st.DataObject
) -> None:
    cp_size, cp_rank = cp
    cu = padded_cu_seqlens(lengths, cp_size)
    starts = None
    if data.draw(st.booleans()):
        starts = boundaries(data.draw(st.lists(st.integers(0, 99), min_size=len(lengths),
                                               max_size=len(lengths))))  # fmt: skip
    num_tokens = int(cu[-1]) // cp_size + tail
    sequences, rows = locate(cu, starts, 10_000, cp_size, cp_rank, num_tokens)
    assert rows == local_positions(cu, starts, cp_size, cp_rank, num_tokens).tolist()
    local = (cu // cp_size).tolist()
    for token in range(num_tokens - tail):
        assert local[sequences[token]] <= token < local[sequences[token] + 1]


@given(
    lengths=st.lists(st.integers(0, 23), min_size=1, max_size=20),
    first=st.integers(0, 9),
    cp=CP,
    table_rows=st.integers(0, 60),
    data=st.data(),
)
def test_any_boundaries_match_the_formula_of_te(
    lengths: list[int], first: int, cp: tuple[int, int], table_rows: int, data: st.DataObject
) -> None:
    cp_size, cp_rank = cp
    cu = [first]
    for length in lengths:
        cu.append(cu[-1] + length)
    starts = data.draw(st.lists(st.integers(-30, 30), min_size=len(lengths), max_size=len(lengths)))
    num_tokens = cu[-1] // cp_size + data.draw(st.integers(-3, 3))
    num_tokens = max(num_tokens, 0)
    _, rows = locate(boundaries(cu), boundaries(starts), table_rows, cp_size, cp_rank, num_tokens)
    expected = rows_by_te_formula(cu, starts, cp_size, cp_rank, num_tokens)
    assert rows == [p if 0 <= p < table_rows else -1 for p in expected]


@given(
    cu=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=12),
    cp=CP,
    starts=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=11, max_size=11),
)
def test_garbage_boundaries_stay_inside_of_the_table(
    cu: list[int], cp: tuple[int, int], starts: list[int]
) -> None:
    for warp_wide in (False, True):
        arguments = (boundaries(cu), boundaries(starts), 50, *cp, 64)
        sequences, rows = _locate(*arguments, warp_wide)
        assert all(0 <= s < len(cu) - 1 for s in sequences)
        assert all(-1 <= r < 50 for r in rows)


@settings(max_examples=20)
@given(st.integers(1, 5000), st.integers(0, 3))
def test_owner_among_many_sequences(num_sequences: int, length: int) -> None:
    cu = torch.arange(num_sequences + 1, dtype=torch.int32) * length
    num_tokens = num_sequences * length
    sequences, rows = locate(cu, None, max(length, 1), 1, 0, num_tokens)
    # Not by comparing lists: pytest would work out the difference of thousands of lines.
    wrong = [t for t in range(num_tokens) if (sequences[t], rows[t]) != divmod(t, length)]
    assert not wrong[:3]


@pytest.mark.parametrize(
    ("cu", "starts", "cp_size", "cp_rank", "expected"),
    [
        # fragments that restart at 0, and start positions
        ([0, 2, 4], [2, 6], 1, 0, [2, 3, 6, 7]),
        # lengths 4, 8, 6, 10 padded for cp_size 2
        ([0, 4, 12, 20, 32], None, 2, 1, [1, 2, 2, 3, 4, 5, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8]),
        # odd shares: TE's numbers, with position 2 lost
        ([0, 7], None, 2, 0, [0, 5, 6]),
        ([0, 7], None, 2, 1, [1, 3, 4]),
        # empty sequences do not own anything, nor lend their start position
        ([0, 0, 3, 5, 5], [9, 0, 3, 9], 1, 0, [0, 1, 2, 3, 4]),
    ],
)
def test_k21_k22_known_positions(
    cu: list[int], starts: list[int] | None, cp_size: int, cp_rank: int, expected: list[int]
) -> None:
    _, rows = locate(
        boundaries(cu),
        None if starts is None else boundaries(starts),
        1000,
        cp_size,
        cp_rank,
        len(expected),
    )
    assert rows == expected
