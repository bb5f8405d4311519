# SPDX-License-Identifier: Apache-2.0
"""Packed batches under context parallelism: padded boundaries, a rank's rows, their reassembly.

The dual-chunk order: each sequence is cut into ``2 * cp_size`` chunks of equal length, and rank
``r`` holds chunks ``r`` and ``2 * cp_size - 1 - r``. With ``cp_size = 2`` and one sequence of 8::

    chunks     [0 1] [2 3] [4 5] [6 7]
    rank 0      0 1               6 7
    rank 1            2 3   4 5
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch


def padded_cu_seqlens(
    lengths: Sequence[int], cp_size: int = 1, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return the boundaries of a batch whose sequences are padded to what `cp_size` needs.

    Parameters
    ----------
    lengths : sequence of int
        Length of each sequence in tokens; 0 is allowed.
    cp_size : int
        Context-parallel size. With more than 1, lengths are rounded up to ``2 * cp_size``.
    device : torch.device or str
        Where the result lives.

    Returns
    -------
    torch.Tensor
        ``[len(lengths) + 1]`` int32.
    """
    multiple = 2 * cp_size if cp_size > 1 else 1
    boundaries = [0]
    for length in lengths:
        if length < 0:
            raise ValueError(f"lengths holds {length}; each length must be 0 or more")
        boundaries.append(boundaries[-1] + -(-length // multiple) * multiple)
    if boundaries[-1] >= 1 << 31:
        raise ValueError(f"lengths add up to {boundaries[-1]} tokens; int32 holds below 2**31")
    return torch.tensor(boundaries, dtype=torch.int32, device=device)


def local_token_indices(cu_seqlens: torch.Tensor, cp_size: int, cp_rank: int) -> torch.Tensor:
    """Return which rows of the global packed tensor a rank holds, in the order it holds them.

    Parameters
    ----------
    cu_seqlens : torch.Tensor
        ``[b + 1]``, boundaries of the global batch; each length divisible by ``2 * cp_size`` if
        ``cp_size > 1``.
    cp_size, cp_rank : int
        Context-parallel size and rank.

    Returns
    -------
    torch.Tensor
        ``[cu_seqlens[-1] / cp_size]`` int64, on the CPU.

    Raises
    ------
    ValueError
        If a length is not divisible; the message names the sequence.
    """
    boundaries = cu_seqlens.tolist()
    chunks = 2 * cp_size
    held = [torch.empty(0, dtype=torch.int64)]
    for i, (begin, end) in enumerate(itertools.pairwise(boundaries)):
        tokens = torch.arange(begin, end)
        if cp_size > 1:
            if (end - begin) % chunks:
                raise ValueError(
                    f"sequence {i} has length {end - begin}; with cp_size {cp_size} it must be "
                    f"divisible by {chunks}: pad it (padded_cu_seqlens)"
                )
            parts = tokens.reshape(chunks, -1)
            tokens = torch.cat([parts[cp_rank], parts[chunks - 1 - cp_rank]])
        held.append(tokens)
    return torch.cat(held)


def split_for_rank(
    packed: torch.Tensor, cu_seqlens: torch.Tensor, cp_size: int, cp_rank: int
) -> torch.Tensor:
    """Return a rank's rows of a packed tensor ``[t, ...]``, in dual-chunk order."""
    indices = local_token_indices(cu_seqlens, cp_size, cp_rank)
    return packed.index_select(0, indices.to(packed.device))


def merge_ranks(shards: Sequence[torch.Tensor], cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Put the rows of all ranks back into global order; the inverse of `split_for_rank`.

    Parameters
    ----------
    shards : sequence of torch.Tensor
        One local tensor a rank, ``[>= cu_seqlens[-1] / cp_size, ...]``; tail rows are dropped.
    cu_seqlens : torch.Tensor
        ``[b + 1]``, boundaries of the global batch.

    Returns
    -------
    torch.Tensor
        ``[cu_seqlens[-1], ...]``.
    """
    cp_size = len(shards)
    merged = shards[0].new_empty((int(cu_seqlens[-1]), *shards[0].shape[1:]))
    for rank, shard in enumerate(shards):
        indices = local_token_indices(cu_seqlens, cp_size, rank).to(shard.device)
        merged[indices] = shard[: indices.shape[0]]
    return merged
