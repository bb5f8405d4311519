# SPDX-License-Identifier: Apache-2.0
"""A small attention over gathered k and v: loss and gradients are those of a single process.

Each rank holds its share of the padded batch and the same weights. It rotates its own q and k with
its own cp_rank, gathers k and v of all ranks, and attends from its rows to those before them.
"""

from __future__ import annotations

import math

import torch
from packed import randn
from world import World, joined_world

from transformer_engine_overlay import apply_rotary_pos_emb_thd
from transformer_engine_overlay.packing import (
    local_token_indices,
    merge_ranks,
    pad_packed,
    padded_cu_seqlens,
    split_for_rank,
    unpad_packed,
)

LENGTHS = [37, 0, 5, 64, 1, 90]
HIDDEN, HEADS, KV_HEADS, DIM = 24, 4, 2, 16
NAMES = ("x", "q weight", "k weight", "v weight")


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rows: torch.Tensor, cu: torch.Tensor
) -> torch.Tensor:
    """Attend from local `q`, which stands at global `rows`, to global `k` and `v`."""
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
    tokens = torch.arange(k.shape[0], device=q.device)
    sequence = torch.searchsorted(cu.long(), tokens, right=True)
    visible = (sequence[rows, None] == sequence) & (tokens <= rows[:, None])
    scores = torch.einsum("thd,shd->hts", q, k) / math.sqrt(DIM)
    weights = scores.masked_fill(~visible, -math.inf).softmax(dim=-1)
    return torch.einsum("hts,shd->thd", weights, v)


def step(
    world: World | None,
    x: torch.Tensor,
    weights: list[torch.Tensor],
    target: torch.Tensor,
    rope_rank: int | None = None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Loss of the global batch, gradient of the rows of `x` that are ours, and of the weights.

    Parameters
    ----------
    world : World or None
        None computes all in this process.
    x, target : torch.Tensor
        The global batch, not padded.
    rope_rank : int, optional
        The cp_rank to rotate with, if not the true one.
    """
    cp_size, cp_rank = (world.size, world.rank) if world else (1, 0)
    rope_rank = cp_rank if rope_rank is None else rope_rank
    cu = padded_cu_seqlens(LENGTHS, cp_size, x.device)
    local, wanted, is_token = (
        split_for_rank(pad_packed(t, LENGTHS, cp_size), cu, cp_size, cp_rank)
        for t in (x, target, torch.ones_like(x[:, 0]))
    )
    leaves = [t.detach().requires_grad_() for t in (local, *weights)]
    q, k, v = ((leaves[0] @ w).unflatten(1, (-1, DIM)) for w in leaves[1:])
    inv_freq = 10000.0 ** (-torch.arange(0, DIM, 2, device=x.device) / DIM)
    angles = torch.outer(torch.arange(128.0, device=x.device), inv_freq)
    freqs = torch.cat([angles, angles], dim=-1)[:, None, None, :]
    q, k = (
        apply_rotary_pos_emb_thd(t, freqs, cu, cp_size=cp_size, cp_rank=rope_rank) for t in (q, k)
    )
    if world:
        k, v = (merge_ranks(world.all_gather_differentiably(t), cu) for t in (k, v))
    rows = local_token_indices(cu, cp_size, cp_rank).to(x.device)
    y = causal_attention(q, k, v, rows, cu).flatten(1)
    loss = ((y - wanted).square().mean(dim=1) * is_token).sum() / len(x)
    gradients = list(torch.autograd.grad(loss, leaves))
    loss = loss.detach()
    if world:
        loss = world.all_reduce(loss)
        gradients[1:] = [world.all_reduce(g) for g in gradients[1:]]
        shares = merge_ranks(world.all_gather(gradients[0]), cu)
        gradients[0] = unpad_packed(shares, LENGTHS, cp_size)
    return loss, gradients


def main() -> None:
    with joined_world() as world:
        tokens = sum(LENGTHS)
        x = randn(tokens, HIDDEN, device=world.device)
        target = randn(tokens, HEADS * DIM, device=world.device, seed=1)
        widths = [heads * DIM for heads in (HEADS, KV_HEADS, KV_HEADS)]
        weights = [randn(HIDDEN, w, device=world.device, seed=w + 2) / 4 for w in widths]
        weights[2] = weights[2].flip(0)  # so that v is not k
        expected = step(None, x, weights, target)
        loss, gradients = step(world, x, weights, target)
        torch.testing.assert_close(loss, expected[0])
        for name, ours, whole in zip(NAMES, gradients, expected[1], strict=True):
            torch.testing.assert_close(
                *(ours, whole), rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )
            assert whole.abs().max() > 1e-4, name
        # As if every rank believed to be the first: a comparison that misses it is no proof.
        wrong, _ = step(world, x, weights, target, rope_rank=0)
        assert not torch.allclose(wrong, expected[0])


if __name__ == "__main__":
    main()
