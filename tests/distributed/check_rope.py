# SPDX-License-Identifier: Apache-2.0
"""Each rank rotates its share of a packed batch; all shares together are cp_size 1, bit for bit.

With the argument ``te``, TransformerEngine's own function is called, under the overlay.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from world import World, joined_world

import transformer_engine_overlay as overlay
from transformer_engine_overlay import apply_rotary_pos_emb_thd, path_counts
from transformer_engine_overlay.cases import Batch, draw_case, make_batch
from transformer_engine_overlay.packing import merge_ranks
from transformer_engine_overlay.verify import DTYPES, same_bits

Rope = Callable[[Batch, torch.Tensor, int, int], torch.Tensor]
CASES = range(4)  # both pairings, start positions, strided inputs, tail rows, partial rotary


def own_rope(batch: Batch, x: torch.Tensor, cp_size: int, cp_rank: int) -> torch.Tensor:
    return apply_rotary_pos_emb_thd(
        *(x, batch.freqs, batch.cu_seqlens),
        start_positions=batch.start_positions,
        interleaved=batch.case.interleaved,
        cp_size=cp_size,
        cp_rank=cp_rank,
    )


def te_rope(batch: Batch, x: torch.Tensor, cp_size: int, cp_rank: int) -> torch.Tensor:
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    result: torch.Tensor = apply_rotary_pos_emb(
        *(x, batch.freqs),
        tensor_format="thd",
        start_positions=batch.start_positions,
        interleaved=batch.case.interleaved,
        fused=True,
        cu_seqlens=batch.cu_seqlens,
        cp_size=cp_size,
        cp_rank=cp_rank,
    )
    return result


def both_directions(
    rope: Rope, batch: Batch, x: torch.Tensor, grad: torch.Tensor, cp_size: int, cp_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.detach().requires_grad_()
    y = rope(batch, x, cp_size, cp_rank)
    (gradient,) = torch.autograd.grad(y, x, grad)
    return y.detach(), gradient


def gathered(world: World, batch: Batch, rope: Rope, cp_rank: int) -> list[torch.Tensor]:
    """Output and gradient of the global batch, each share made by the rank that holds it."""
    x, grad = (batch.local(packed, world.rank) for packed in (batch.t, batch.grad_output))
    results = both_directions(rope, batch, x, grad, world.size, cp_rank)
    return [merge_ranks(world.all_gather(local), batch.cu_seqlens) for local in results]


def check(world: World, rope: Rope) -> int:
    """Compare with cp_size 1, on every rank; returns the calls of a rank."""
    calls = 0
    for dtype in DTYPES.values():
        for index in CASES:
            case = draw_case(world.size, index, dtype, world.size, tokens=512)
            batch = make_batch(case, world.device)
            whole = both_directions(rope, batch, batch.t, batch.grad_output, 1, 0)
            ranks = gathered(world, batch, rope, world.rank)
            assert all(map(same_bits, ranks, whole)), (world.rank, case)
            # As if every rank believed to be the first: a comparison that misses it is no proof.
            wrong = gathered(world, batch, rope, 0)
            assert not any(map(same_bits, wrong, whole)), (world.rank, case)
            calls += 6
    return calls


def main() -> None:
    with joined_world() as world:
        if sys.argv[1:] == ["te"]:
            overlay.enable(strict=True)
            assert overlay.status_across_ranks().problem == ""
            before = sum(overlay.status().routed.values())
            calls = check(world, te_rope)
            assert sum(overlay.status().routed.values()) - before == calls
        else:
            before = sum(path["calls"] for path in path_counts().values())
            calls = check(world, own_rope)
            assert sum(path["calls"] for path in path_counts().values()) - before == calls


if __name__ == "__main__":
    main()
