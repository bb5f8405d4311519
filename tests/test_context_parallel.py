# SPDX-License-Identifier: Apache-2.0
"""Every cp_rank of every cp_size: the ranks put together equal cp_size 1, bit for bit.

``pytest --cp-size 4 --cp-rank 3`` runs the cases of one rank, here and in the other files.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from packed import DTYPES, PAIRINGS, boundaries, randn, random_table

from transformer_engine_overlay.cases import draw_case, make_batch
from transformer_engine_overlay.packing import merge_ranks, padded_cu_seqlens, split_for_rank
from transformer_engine_overlay.reference import rope_thd_reference
from transformer_engine_overlay.thd import apply_rotary_pos_emb_thd, rotate_thd
from transformer_engine_overlay.verify import TOLERANCES, same_bits

BothPaths = Callable[..., torch.Tensor]
EVERY_RANK = [(size, rank) for size in (1, 2, 4, 8) for rank in range(size)]
LENGTHS = [48, 0, 16, 96, 32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", range(4))
@pytest.mark.parametrize(("cp_size", "cp_rank"), EVERY_RANK)
def test_rank_matches_the_oracle(
    device: torch.device,
    dtype: torch.dtype,
    index: int,
    cp_size: int,
    cp_rank: int,
    both_paths: BothPaths,
) -> None:
    """Batches as `te-overlay verify` draws them, with other seeds, through the public function."""
    case = draw_case(cp_size * 8 + cp_rank + 1, index, dtype, cp_size, tokens=256)
    batch = make_batch(case, device)
    grad_output = batch.local(batch.grad_output, cp_rank)
    arguments = {
        "start_positions": batch.start_positions,
        "interleaved": case.interleaved,
        "cp_size": cp_size,
        "cp_rank": cp_rank,
    }

    def both_directions() -> torch.Tensor:
        x = batch.local(batch.t, cp_rank).requires_grad_()
        y = apply_rotary_pos_emb_thd(x, batch.freqs, batch.cu_seqlens, **arguments)
        return torch.cat([y.detach(), *torch.autograd.grad(y, x, grad_output)])

    actual = both_paths(both_directions, calls=2)
    x = batch.local(batch.t, cp_rank).double().requires_grad_()
    y = rope_thd_reference(x, batch.freqs, batch.cu_seqlens, **arguments)
    # Tail rows are constants in the oracle, and NaN times zero is NaN.
    (grad,) = torch.autograd.grad(y, x, grad_output.double().nan_to_num())
    rtol, atol = TOLERANCES[dtype]
    torch.testing.assert_close(actual.double(), torch.cat([y.detach(), grad]), rtol=rtol, atol=atol)


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
