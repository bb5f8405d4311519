# SPDX-License-Identifier: Apache-2.0
"""Packed batches as training jobs have them, drawn from a seed: what `te-overlay verify` runs."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from transformer_engine_overlay.packing import padded_cu_seqlens, split_for_rank


@dataclass(frozen=True)
class Case:
    """One packed batch and how it is rotated; a pure function of seed, index, size and cp_size.

    Attributes
    ----------
    seed, index : int
        What the case was drawn from.
    dtype : torch.dtype
        Of input and output.
    cp_size : int
        Context-parallel size; every rank of it is run.
    lengths : tuple of int
        Sequence lengths in tokens, before padding; some are 0.
    heads, head_dim, rotary_dim : int
        Shape of a row; ``rotary_dim < head_dim`` is partial rotary.
    interleaved : bool
        Pairing of the elements.
    starts : tuple of int or None
        Start position of each sequence.
    strided : bool
        Whether the input is a slice of a fused QKV tensor.
    tail_rows : int
        Rows behind the last boundary of each rank's tensor, NaN in the input.
    table_rows : int
        Rows of the angle table; more than any position.
    symmetric : bool
        Whether the two elements of a pair have the same angle, as in nearly all models.
    """

    seed: int
    index: int
    dtype: torch.dtype
    cp_size: int
    lengths: tuple[int, ...]
    heads: int
    head_dim: int
    rotary_dim: int
    interleaved: bool
    starts: tuple[int, ...] | None
    strided: bool
    tail_rows: int
    table_rows: int
    symmetric: bool

    @property
    def elements(self) -> int:
        """Elements of the global batch; what "smallest" means among failing cases."""
        return sum(self.lengths) * self.heads * self.head_dim

    def traits(self) -> str:
        """Describe the case in a line."""
        return ", ".join(
            [
                f"{sum(self.lengths)} tokens in {len(self.lengths)} sequences",
                f"h={self.heads} d={self.head_dim} d2={self.rotary_dim}",
                f"table of {self.table_rows} rows",
                "interleaved" if self.interleaved else "half-split",
                *(["start positions"] if self.starts else []),
                *([] if self.symmetric else ["asymmetric table"]),
                *(["strided input"] if self.strided else []),
                *([f"{self.tail_rows} tail rows"] if self.tail_rows else []),
            ]
        )


# heads, head_dim, rotary_dim: full rotary, partial rotary, MLA's single head, GQA kv heads, a row
# that is no whole number of vectors, and rows large enough for the wide kernels
_SHAPES = (
    (4, 128, 128),
    (8, 64, 32),
    (1, 64, 64),
    (2, 192, 128),
    (3, 80, 20),
    (2, 256, 64),
    (8, 128, 128),
    (16, 128, 128),
)


def draw_case(seed: int, index: int, dtype: torch.dtype, cp_size: int, tokens: int) -> Case:
    """Draw case `index` of `seed`, with about `tokens` tokens in the global batch.

    Lengths and start positions are random; traits follow the index, so that a few cases have them
    all. Nothing depends on dtype, and on cp_size only the padding does, so that the columns of a
    report compare like with like.
    """
    rng = random.Random(f"{seed}/{index}")
    heads, head_dim, rotary_dim = _SHAPES[index % len(_SHAPES)]
    lengths = _draw_lengths(rng, tokens)
    starts = tuple(rng.randrange(64) for _ in lengths) if index % 3 == 0 else None
    boundaries = padded_cu_seqlens(lengths, cp_size)
    longest = int(boundaries.diff().max())
    # Half of the jobs size the table for the longest context, the others for this batch.
    table_rows = 2 * tokens if index % 2 == 0 else longest + 64
    return Case(
        seed=seed,
        index=index,
        dtype=dtype,
        cp_size=cp_size,
        lengths=lengths,
        heads=heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        # Each shape has both pairings within twice as many cases as there are shapes, and both
        # kinds of table, so that they run every kernel.
        interleaved=(index + index // len(_SHAPES)) % 2 == 1,
        starts=starts,
        strided=index % 4 in (0, 3),
        tail_rows=(17, 0, 3)[index % 3],
        table_rows=table_rows,
        symmetric=(index + index // 2 + index // len(_SHAPES)) % 2 == 0,
    )


def _draw_lengths(rng: random.Random, tokens: int) -> tuple[int, ...]:
    """Heavy-tailed (log-normal) lengths that sum to `tokens`, with empty sequences among them."""
    typical = rng.choice([16, 64, 256])
    lengths: list[int] = []
    left = tokens
    while left > 0:
        length = min(left, 1 + int(rng.lognormvariate(0.0, 1.5) * typical))
        left -= length
        lengths.append(length)
        if rng.random() < 0.1:
            lengths.append(0)
    lengths.insert(rng.randrange(len(lengths)), 0)
    return tuple(lengths)


@dataclass(frozen=True)
class Batch:
    """The tensors of a case, global batch first, a rank's share on request.

    Attributes
    ----------
    t, grad_output : torch.Tensor
        ``[tokens, h, d]``, the padded global batch and the gradient of its output.
    freqs : torch.Tensor
        ``[table_rows, 1, 1, d2]`` float32.
    cu_seqlens : torch.Tensor
        ``[b + 1]`` int32.
    start_positions : torch.Tensor or None
        ``[b]`` int32.
    """

    case: Case
    t: torch.Tensor
    grad_output: torch.Tensor
    freqs: torch.Tensor
    cu_seqlens: torch.Tensor
    start_positions: torch.Tensor | None

    def local(self, packed: torch.Tensor, cp_rank: int) -> torch.Tensor:
        """Return a rank's rows of `packed`, followed by the case's tail rows of NaN."""
        case = self.case
        rows = split_for_rank(packed, self.cu_seqlens, case.cp_size, cp_rank)
        tail = rows.new_full((case.tail_rows, *rows.shape[1:]), float("nan"))
        rows = torch.cat([rows, tail])
        if not case.strided:
            return rows
        fused = rows.new_full((rows.shape[0], rows.shape[1], 3 * rows.shape[2]), float("nan"))
        fused[..., rows.shape[2] : 2 * rows.shape[2]] = rows
        return fused[..., rows.shape[2] : 2 * rows.shape[2]]


def make_batch(case: Case, device: torch.device) -> Batch:
    """Make the tensors of `case` on `device`; the values depend on the case alone."""
    generator = torch.Generator().manual_seed(case.seed * 1_000_003 + case.index)
    cu_seqlens = padded_cu_seqlens(case.lengths, case.cp_size)
    shape = (int(cu_seqlens[-1]), case.heads, case.head_dim)
    t = torch.randn(shape, generator=generator).to(device, case.dtype)
    grad_output = torch.randn(shape, generator=generator).to(device, case.dtype)
    inv_freq = 10000.0 ** -torch.rand(case.rotary_dim, generator=generator)
    if case.symmetric:
        first = inv_freq.view(-1, 2).T if case.interleaved else inv_freq.view(2, -1)
        first[1] = first[0]
    positions = torch.arange(case.table_rows, dtype=torch.float32)
    freqs = torch.outer(positions, inv_freq)[:, None, None, :].to(device)
    starts = None
    if case.starts is not None:
        starts = torch.tensor(case.starts, dtype=torch.int32, device=device)
    return Batch(case, t, grad_output, freqs, cu_seqlens.to(device), starts)
