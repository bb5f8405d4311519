# SPDX-License-Identifier: Apache-2.0
"""Packed batches under context parallelism: padding, a rank's rows, their reassembly.

The dual-chunk order: each sequence is cut into ``2 * cp_size`` chunks of equal length, and rank
``r`` holds chunks ``r`` and ``2 * cp_size - 1 - r``: a cheap and a dear one where attention is
causal. Sequences are padded first, so that they can be cut. Lengths 3 and 8 with ``cp_size = 2``::

    packed          a0 a1 a2    | b0 b1 b2 b3 b4 b5 b6 b7
    pad_packed      a0 a1 a2 .. | b0 b1 b2 b3 b4 b5 b6 b7    cu_seqlens [0, 4, 12]
    chunk            0  1  2  3 |  0  0  1  1  2  2  3  3
    rank             0  1  1  0 |  0  0  1  1  1  1  0  0

    split_for_rank  a0 .. | b0 b1 b6 b7    rank 0    boundaries of the local rows: [0, 2, 6],
                    a1 a2 | b2 b3 b4 b5    rank 1    which is cu_seqlens // cp_size

    merge_ranks     a0 a1 a2 .. | b0 b1 b2 b3 b4 b5 b6 b7
    unpad_packed    a0 a1 a2    | b0 b1 b2 b3 b4 b5 b6 b7

``apply_rotary_pos_emb_thd``, like TransformerEngine, takes the rows of one rank together with the
``cu_seqlens`` of the padded global batch. Padding counts as tokens of its sequence, at the
positions behind it; a loss leaves it out by a mask that was padded and split like the tokens::

    cu_seqlens = padded_cu_seqlens(lengths, cp_size)
    is_token = pad_packed(torch.ones(sum(lengths), dtype=torch.bool), lengths, cp_size)
    local_mask = split_for_rank(is_token, cu_seqlens, cp_size, cp_rank)

All of it is differentiable in the packed tensors. Boundaries are read on the host: on a GPU that is
a synchronisation, so make the boundaries and the indices of a batch where it is loaded.
"""

from __future__ import annotations

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

    Raises
    ------
    ValueError
        If a length is negative, the sum does not fit int32, or `cp_size` is less than 1.
    """
    _check_rank(cp_size, 0)
    multiple = 2 * cp_size if cp_size > 1 else 1
    boundaries = [0]
    for length in lengths:
        if length < 0:
            raise ValueError(f"lengths holds {length}; each length must be 0 or more")
        boundaries.append(boundaries[-1] + -(-length // multiple) * multiple)
    if boundaries[-1] >= 1 << 31:
        raise ValueError(f"lengths add up to {boundaries[-1]} tokens; int32 holds below 2**31")
    return torch.tensor(boundaries, dtype=torch.int32, device=device)


def pad_packed(
    packed: torch.Tensor, lengths: Sequence[int], cp_size: int, value: float = 0
) -> torch.Tensor:
    """Put padding behind each sequence of a packed tensor, as `padded_cu_seqlens` has it.

    Parameters
    ----------
    packed : torch.Tensor
        ``[sum(lengths), ...]``, any dtype.
    lengths : sequence of int
        Length of each sequence in tokens.
    cp_size : int
        Context-parallel size.
    value : float
        What the added rows hold.

    Returns
    -------
    torch.Tensor
        ``[padded_cu_seqlens(lengths, cp_size)[-1], ...]``, on the device of `packed`.

    Raises
    ------
    ValueError
        If `packed` has another number of rows.
    """
    rows, total = _token_rows(lengths, cp_size)
    _check_rows("packed", packed, rows.shape[0], "sum(lengths)", exactly=True)
    padded = packed.new_full((total, *packed.shape[1:]), value)
    return padded.index_copy(0, rows.to(packed.device), packed)


def unpad_packed(padded: torch.Tensor, lengths: Sequence[int], cp_size: int) -> torch.Tensor:
    """Take the padding out of a packed tensor; the inverse of `pad_packed`.

    Parameters
    ----------
    padded : torch.Tensor
        ``[padded_cu_seqlens(lengths, cp_size)[-1], ...]``.
    lengths : sequence of int
        Length of each sequence in tokens, before padding.
    cp_size : int
        Context-parallel size.

    Returns
    -------
    torch.Tensor
        ``[sum(lengths), ...]``.

    Raises
    ------
    ValueError
        If `padded` has another number of rows.
    """
    rows, total = _token_rows(lengths, cp_size)
    _check_rows("padded", padded, total, "the sum of the padded lengths", exactly=True)
    return padded.index_select(0, rows.to(padded.device))


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
        ``[(cu_seqlens[-1] - cu_seqlens[0]) / cp_size]`` int64, ascending, on the CPU.

    Raises
    ------
    ValueError
        If a length is negative or not divisible, in which case the message names the sequence, or
        if `cp_rank` is not a rank of `cp_size`.
    """
    _check_rank(cp_size, cp_rank)
    if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
        raise ValueError(f"cu_seqlens has shape {list(cu_seqlens.shape)}; it must be [b + 1]")
    boundaries = cu_seqlens.cpu().long()
    chunks = 2 * cp_size if cp_size > 1 else 1
    lengths = boundaries.diff()
    for i in ((lengths < 0) | (lengths % chunks != 0)).nonzero().flatten().tolist():
        found = f"sequence {i} has length {int(lengths[i])}"
        if lengths[i] < 0:
            raise ValueError(f"{found}: boundaries in cu_seqlens must not decrease")
        raise ValueError(
            f"{found}; with cp_size {cp_size} it must be divisible by {chunks}: pad it "
            "(padded_cu_seqlens, pad_packed)"
        )
    tokens = torch.arange(int(boundaries[0]), int(boundaries[-1]))
    if cp_size == 1:
        return tokens
    ranks = torch.arange(cp_size)
    rank_of_chunk = torch.cat([ranks, ranks.flip(0)]).repeat(lengths.shape[0])
    rank_of_token = rank_of_chunk.repeat_interleave((lengths // chunks).repeat_interleave(chunks))
    return tokens[rank_of_token == cp_rank]


def split_for_rank(
    packed: torch.Tensor, cu_seqlens: torch.Tensor, cp_size: int, cp_rank: int
) -> torch.Tensor:
    """Return a rank's rows of a packed tensor, in dual-chunk order.

    Parameters
    ----------
    packed : torch.Tensor
        ``[>= cu_seqlens[-1], ...]``, the padded global batch; rows past the last boundary are left
        out.
    cu_seqlens : torch.Tensor
        ``[b + 1]``, boundaries of the padded global batch.
    cp_size, cp_rank : int
        Context-parallel size and rank.

    Returns
    -------
    torch.Tensor
        ``[cu_seqlens[-1] / cp_size, ...]``, a copy.

    Raises
    ------
    ValueError
        As `local_token_indices`, or if `packed` has too few rows.
    """
    indices = local_token_indices(cu_seqlens, cp_size, cp_rank)
    _check_rows("packed", packed, int(cu_seqlens[-1]), "cu_seqlens[-1]")
    return packed.index_select(0, indices.to(packed.device))


def merge_ranks(shards: Sequence[torch.Tensor], cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Put the rows of all ranks back into global order; the inverse of `split_for_rank`.

    Parameters
    ----------
    shards : sequence of torch.Tensor
        One local tensor a rank, ``[>= cu_seqlens[-1] / cp_size, ...]``; tail rows are dropped.
    cu_seqlens : torch.Tensor
        ``[b + 1]``, boundaries of the padded global batch.

    Returns
    -------
    torch.Tensor
        ``[cu_seqlens[-1], ...]``; rows before ``cu_seqlens[0]``, which no rank holds, are zeros.

    Raises
    ------
    ValueError
        As `local_token_indices`, or if there is no shard or one has too few rows.
    """
    if not shards:
        raise ValueError("shards is empty; it must hold the local tensor of each rank")
    cp_size = len(shards)
    indices = [local_token_indices(cu_seqlens, cp_size, rank) for rank in range(cp_size)]
    for rank, shard in enumerate(shards):
        _check_rows(f"shards[{rank}]", shard, indices[rank].shape[0], "the share of a rank")
    rows = [shard[: own.shape[0]] for shard, own in zip(shards, indices, strict=True)]
    merged = shards[0].new_zeros((int(cu_seqlens[-1]), *shards[0].shape[1:]))
    return merged.index_copy(0, torch.cat(indices).to(merged.device), torch.cat(rows))


def _token_rows(lengths: Sequence[int], cp_size: int) -> tuple[torch.Tensor, int]:
    """Return the rows of the padded batch that hold tokens, and how many rows it has."""
    padded = padded_cu_seqlens(lengths, cp_size).long()
    counts = torch.tensor(lengths, dtype=torch.int64)
    before = padded[:-1] - torch.cat([counts.new_zeros(1), counts]).cumsum(0)[:-1]
    return torch.arange(int(counts.sum())) + before.repeat_interleave(counts), int(padded[-1])


def _check_rank(cp_size: int, cp_rank: int) -> None:
    if cp_size < 1:
        raise ValueError(f"cp_size is {cp_size}; it must be at least 1")
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank is {cp_rank}; it must be in [0, cp_size) = [0, {cp_size})")


def _check_rows(
    name: str, tensor: torch.Tensor, rows: int, what: str, *, exactly: bool = False
) -> None:
    found = tensor.shape[0] if tensor.dim() else None
    if found is None or found < rows or (exactly and found != rows):
        raise ValueError(
            f"{name} has shape {list(tensor.shape)}; its first dimension must be "
            f"{'' if exactly else 'at least '}{what} = {rows}"
        )
