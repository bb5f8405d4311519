# SPDX-License-Identifier: Apache-2.0
"""Every cp_rank of every cp_size: the ranks put together equal cp_size 1, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from packed import DTYPES, PAIRINGS, boundaries, randn, random_table

from transformer_engine_overlay.packing import (
    local_token_indices,
    merge_ranks,
    padded_cu_seqlens,
    split_for_rank,
)
from transformer_engine_overlay.thd import rotate_thd
from transformer_engine_overlay.verify import same_bits

BothPaths = Callable[..., torch.Tensor]
EVERY_RANK = [(size, rank) for size in (2, 4, 8) for rank in range(size)]
LENGTHS = [48, 0, 16, 96, 32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", PAIRINGS)
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize(("cp_size", "cp_rank"), EVERY_RANK)
def test_rank_holds_its_share_of_the_whole_result(
    device: torch.device,
    dtype: torch.dtype,
    interleaved: bool,
    transpose: bool,
    cp_size: int,
    cp_rank: int,
    both_paths: BothPaths,
) -> None:
    cu = padded_cu_seqlens(LENGTHS, cp_size, device)
    t = randn(192, 2, 12, dtype=dtype, device=device)
    freqs, starts = random_table(128, 10, device), boundaries([0, 5, 3, 0, 30], device)
    whole = rotate_thd(t, freqs, cu, starts, interleaved, 1, 0, transpose)
    local = split_for_rank(t, cu, cp_size, cp_rank)
    y = both_paths(
        lambda: rotate_thd(local, freqs, cu, starts, interleaved, cp_size, cp_rank, transpose)
    )
    assert same_bits(y, split_for_rank(whole, cu, cp_size, cp_rank))


@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
def test_ranks_reassemble(device: torch.device, cp_size: int) -> None:
    cu = padded_cu_seqlens(LENGTHS, cp_size, device)
    t, freqs = randn(192, 2, 12, device=device), random_table(128, 12, device)
    shards = [
        rotate_thd(
            split_for_rank(t, cu, cp_size, rank), freqs, cu, None, False, cp_size, rank, False
        )
        for rank in range(cp_size)
    ]
    assert same_bits(merge_ranks(shards, cu), rotate_thd(t, freqs, cu, None, False, 1, 0, False))


class TestPacking:
    @pytest.mark.parametrize(
        ("lengths", "cp_size", "expected"),
        [
            ([4, 8, 6, 10], 1, [0, 4, 12, 18, 28]),
            ([4, 8, 6, 10], 2, [0, 4, 12, 20, 32]),
            ([698], 4, [0, 704]),
            ([0, 1, 0], 8, [0, 0, 16, 16]),
            ([], 2, [0]),
        ],
    )
    def test_padded_cu_seqlens(self, lengths: list[int], cp_size: int, expected: list[int]) -> None:
        cu = padded_cu_seqlens(lengths, cp_size)
        assert cu.dtype == torch.int32
        assert cu.tolist() == expected

    def test_refuses_negative_and_huge_lengths(self) -> None:
        with pytest.raises(ValueError, match="lengths holds -3"):
            padded_cu_seqlens([4, -3])
        with pytest.raises(ValueError, match="add up to 2147483648 tokens"):
            padded_cu_seqlens([2**30, 2**30])

    def test_dual_chunk_order(self) -> None:
        cu = boundaries([0, 8, 12])
        assert local_token_indices(cu, 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
        assert local_token_indices(cu, 2, 1).tolist() == [2, 3, 4, 5, 9, 10]
        assert local_token_indices(cu, 1, 0).tolist() == list(range(12))

    def test_refuses_what_does_not_divide(self) -> None:
        with pytest.raises(ValueError, match=r"sequence 1 has length 6; with cp_size 2 .* by 4"):
            local_token_indices(boundaries([0, 8, 14]), 2, 0)

    @given(st.lists(st.integers(0, 30), max_size=12), st.sampled_from([1, 2, 4, 8]))
    def test_merge_undoes_split(self, lengths: list[int], cp_size: int) -> None:
        cu = padded_cu_seqlens(lengths, cp_size)
        packed = torch.arange(int(cu[-1]))
        shards = [split_for_rank(packed, cu, cp_size, rank) for rank in range(cp_size)]
        tail = torch.tensor([-1, -1])
        assert torch.equal(merge_ranks([torch.cat([s, tail]) for s in shards], cu), packed)
