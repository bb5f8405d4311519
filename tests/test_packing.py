# SPDX-License-Identifier: Apache-2.0
"""Padding, a rank's rows and their reassembly, against lists written out and against each other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed import boundaries, randn

from transformer_engine_overlay.packing import (
    local_token_indices,
    merge_ranks,
    pad_packed,
    padded_cu_seqlens,
    split_for_rank,
    unpad_packed,
)

LENGTHS = st.lists(st.integers(0, 30), max_size=12)
CP_SIZES = st.sampled_from([1, 2, 3, 4, 8])


class TestPadding:
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
    def test_boundaries(self, lengths: list[int], cp_size: int, expected: list[int]) -> None:
        cu = padded_cu_seqlens(lengths, cp_size)
        assert cu.dtype == torch.int32
        assert cu.tolist() == expected

    def test_refuses_negative_and_huge_lengths(self) -> None:
        with pytest.raises(ValueError, match="lengths holds -3"):
            padded_cu_seqlens([4, -3])
        with pytest.raises(ValueError, match="add up to 2147483648 tokens"):
            padded_cu_seqlens([2**30, 2**30])
        with pytest.raises(ValueError, match="cp_size is 0; it must be at least 1"):
            padded_cu_seqlens([4], 0)

    def test_padding_lies_behind_each_sequence(self) -> None:
        padded = pad_packed(torch.arange(1, 8), [3, 0, 4], 2, value=-1)
        assert padded.tolist() == [1, 2, 3, -1, 4, 5, 6, 7]
        assert pad_packed(torch.arange(1, 8), [3, 0, 4], 1).tolist() == [1, 2, 3, 4, 5, 6, 7]
        assert pad_packed(torch.empty(0, 5), [], 4).shape == (0, 5)

    @settings(deadline=None)  # the first call of a torch function can take long
    @given(LENGTHS, CP_SIZES)
    def test_unpad_undoes_pad(self, lengths: list[int], cp_size: int) -> None:
        packed = randn(sum(lengths), 2)
        padded = pad_packed(packed, lengths, cp_size, value=9.0)
        assert padded.shape[0] == int(padded_cu_seqlens(lengths, cp_size)[-1])
        assert torch.equal(unpad_packed(padded, lengths, cp_size), packed)
        assert (padded == 9.0).all(dim=1).sum() == padded.shape[0] - sum(lengths)

    def test_refuses_another_number_of_rows(self) -> None:
        with pytest.raises(ValueError, match=r"packed has shape \[8, 2\].* sum\(lengths\) = 7"):
            pad_packed(torch.empty(8, 2), [3, 4], 2)
        with pytest.raises(ValueError, match=r"padded has shape \[7\].* = 8"):
            unpad_packed(torch.empty(7), [3, 4], 2)
        with pytest.raises(ValueError, match=r"packed has shape \[\]"):
            pad_packed(torch.tensor(1.0), [1], 1)


class TestShares:
    def test_figure_of_the_documentation(self) -> None:
        names = [f"a{i}" for i in range(3)] + [".."] + [f"b{i}" for i in range(8)]
        cu = padded_cu_seqlens([3, 8], 2)
        assert cu.tolist() == [0, 4, 12]
        shares = [[names[i] for i in local_token_indices(cu, 2, rank)] for rank in range(2)]
        assert [" ".join(share) for share in shares] == ["a0 .. b0 b1 b6 b7", "a1 a2 b2 b3 b4 b5"]
        assert (cu // 2).tolist() == [0, 2, 6]

    def test_dual_chunk_order(self) -> None:
        cu = boundaries([0, 8, 12])
        assert local_token_indices(cu, 2, 0).tolist() == [0, 1, 6, 7, 8, 11]
        assert local_token_indices(cu, 2, 1).tolist() == [2, 3, 4, 5, 9, 10]
        assert local_token_indices(cu, 1, 0).tolist() == list(range(12))
        assert local_token_indices(boundaries([0, 0, 16, 16]), 4, 2).tolist() == [4, 5, 10, 11]
        assert local_token_indices(boundaries([4, 8]), 2, 1).tolist() == [5, 6]
        assert local_token_indices(boundaries([0]), 2, 1).tolist() == []

    @pytest.mark.parametrize(
        ("cu", "size", "rank", "message"),
        [
            ([0, 8, 14], 2, 0, r"sequence 1 has length 6; with cp_size 2 .* by 4: pad it"),
            ([0, 8, 4], 2, 0, "sequence 1 has length -4: boundaries in cu_seqlens must not"),
            ([0, 8, 4], 1, 0, "sequence 1 has length -4"),
            ([0, 8], 2, 2, r"cp_rank is 2; it must be in \[0, cp_size\) = \[0, 2\)"),
            ([0, 8], 2, -1, "cp_rank is -1"),
            ([0, 8], 0, 0, "cp_size is 0"),
            ([], 2, 0, r"cu_seqlens has shape \[0\]; it must be \[b \+ 1\]"),
            ([[0, 8]], 2, 0, r"cu_seqlens has shape \[1, 2\]"),
        ],
    )
    def test_refused(self, cu: list[int], size: int, rank: int, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            local_token_indices(boundaries(cu), size, rank)

    @settings(deadline=None)  # the first call of a torch function can take long
    @given(LENGTHS, CP_SIZES)
    def test_merge_undoes_split(self, lengths: list[int], cp_size: int) -> None:
        cu = padded_cu_seqlens(lengths, cp_size)
        packed = torch.arange(int(cu[-1]))
        shards = [split_for_rank(packed, cu, cp_size, rank) for rank in range(cp_size)]
        assert {len(shard) for shard in shards} == {int(cu[-1]) // cp_size}
        tail = torch.tensor([-1, -1])
        assert torch.equal(merge_ranks([torch.cat([s, tail]) for s in shards], cu), packed)

    def test_rows_of_no_sequence(self) -> None:
        cu, packed = boundaries([4, 8]), torch.arange(1, 11)
        shards = [split_for_rank(packed, cu, 2, rank) for rank in range(2)]
        assert merge_ranks(shards, cu).tolist() == [0, 0, 0, 0, 5, 6, 7, 8]

    def test_refuses_too_few_rows(self) -> None:
        cu = boundaries([0, 8])
        with pytest.raises(ValueError, match=r"packed has shape \[7, 3\].*cu_seqlens\[-1\] = 8"):
            split_for_rank(torch.empty(7, 3), cu, 2, 0)
        # one row would otherwise be spread over the whole share
        with pytest.raises(ValueError, match=r"shards\[1\] has shape \[1, 3\].* = 4"):
            merge_ranks([torch.empty(4, 3), torch.empty(1, 3)], cu)
        with pytest.raises(ValueError, match="shards is empty"):
            merge_ranks([], cu)

    def test_gradients_flow_through_all_of_it(self) -> None:
        lengths, cp_size = [3, 0, 8], 2
        cu = padded_cu_seqlens(lengths, cp_size)
        packed = randn(11, 2).requires_grad_()
        weight = randn(11, 2, seed=1)
        padded = pad_packed(packed, lengths, cp_size)
        shards = [split_for_rank(padded, cu, cp_size, r) * (r + 1) for r in range(cp_size)]
        whole = unpad_packed(merge_ranks(shards, cu), lengths, cp_size)
        (whole * weight).sum().backward()
        rank_of_token = torch.tensor([0, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0])
        assert packed.grad is not None
        assert torch.equal(packed.grad, weight * (rank_of_token + 1)[:, None])
