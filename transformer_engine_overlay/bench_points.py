# SPDX-License-Identifier: Apache-2.0
"""The named shapes of `te-overlay bench kernel`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TABLE_ROWS = 65536
# sequences of the benchmark in the proposal that became TransformerEngine's PR 3057
HEADLINE_SEQUENCES = (1, 8, 32, 128, 512, 1024, 2401)


@dataclass(frozen=True)
class Point:
    """One shape of a packed batch.

    Attributes
    ----------
    group : str
        What the point is there to show.
    tokens : int
        Local rows of the tensor on one rank.
    heads, head_dim, rotary_dim : int
        Shape of a row.
    sequences : int
        Sequences in the batch.
    spread : str
        ``equal`` lengths, or ``heavy``: a heavy tail, as documents have.
    table_rows : int
        Rows of the angle table; 0 for as many as the longest sequence has.
    cp_size : int
        Context-parallel size; the last rank is timed.
    dtype : str
        ``bf16``, ``fp16`` or ``fp32``.
    interleaved : bool
        Pairing of the elements.
    used : float
        Part of the rows that a sequence owns; the others are tail rows.
    key_heads : int
        Heads of a key that is rotated with the query of `heads` heads; 0 where one tensor is
        rotated by itself.
    """

    group: str
    tokens: int
    heads: int
    head_dim: int = 128
    rotary_dim: int = 128
    sequences: int = 1
    spread: str = "equal"
    table_rows: int = TABLE_ROWS
    cp_size: int = 1
    dtype: str = "bf16"
    interleaved: bool = False
    used: float = 1.0
    key_heads: int = 0

    @property
    def name(self) -> str:
        """The name to filter by."""
        parts = [
            self.group,
            self.dtype,
            "interleaved" if self.interleaved else "half",
            f"t{self.tokens}",
            f"h{self.heads}",
            f"d{self.head_dim}",
            f"r{self.rotary_dim}",
            f"n{self.sequences}",
            self.spread,
            f"s{self.table_rows or 'max'}",
            f"cp{self.cp_size}",
            *([f"k{self.key_heads}"] if self.key_heads else []),
        ]
        return "/".join(parts)

    @property
    def all_heads(self) -> int:
        """Heads of a row: of the one tensor, of query and key, or of a fused QKV projection."""
        return self.heads + self.key_heads * (2 if self.group == "qkv" else 1)

    @property
    def elements(self) -> int:
        """Elements of the input."""
        return self.tokens * self.all_heads * self.head_dim

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of input and output."""
        return DTYPES[self.dtype]

    def lengths(self) -> list[int]:
        """Lengths of the global sequences, multiples of ``2 * cp_size``, in tokens.

        They fill ``used`` of the local rows on each rank.
        """
        unit = 2 * self.cp_size if self.cp_size > 1 else 1
        units = int(self.tokens * self.used) * self.cp_size // unit
        if self.spread == "equal":
            weights = [1.0] * self.sequences
        else:
            rng = random.Random(self.sequences)
            weights = [rng.paretovariate(1.2) for _ in range(self.sequences)]
        total = sum(weights)
        ends = [round(units * part / total) for part in itertools.accumulate(weights)]
        return [(b - a) * unit for a, b in itertools.pairwise([0, *ends])]


def all_points() -> list[Point]:
    """Return every named point, about 200."""
    return [
        *_headline(),
        *_small_batches(),
        *_shapes(),
        *_dtypes(),
        *_many_sequences(),
        *_behind_the_gate(),
        *_tails(),
        *_fused(),
    ]


def quick_points() -> list[Point]:
    """Return a selection for a run of less than a minute."""
    headline = [p for p in _headline() if p.sequences in (1, 32, 2401) and p.dtype == "bf16"]
    small = [p for p in _small_batches() if p.sequences == 16 and p.tokens in (512, 8192)]
    return headline + small + [p for p in _dtypes() if p.heads == 8]


def _headline() -> Iterator[Point]:
    shapes = ((32, 128, "bf16"), (8, 128, "bf16"), (1, 64, "bf16"), (32, 128, "fp32"))
    for (heads, dim, dtype), sequences in itertools.product(shapes, HEADLINE_SEQUENCES):
        yield Point("headline", 65536, heads, dim, dim, sequences, dtype=dtype)


def _small_batches() -> Iterator[Point]:
    """Batches from tiny to 262,144 tokens, the table as long as the longest sequence."""
    for tokens in (512, 1024, 2048, 4096, 8192, 16384, 262144):
        for heads, sequences in itertools.product((1, 8, 32), (1, 16, 256)):
            dim = 64 if heads == 1 else 128
            yield Point("size", tokens, heads, dim, dim, sequences, table_rows=0)


def _shapes() -> Iterator[Point]:
    for heads, dim in itertools.product((1, 8, 32, 64), (64, 128, 192, 256)):
        for rotary_dim in (dim, dim // 2):
            yield Point("shape", 16384, heads, dim, rotary_dim, 64, "heavy")


def _dtypes() -> Iterator[Point]:
    for dtype, interleaved in itertools.product(DTYPES, (False, True)):
        for heads in (1, 8, 32):
            yield Point("dtype", 16384, heads, sequences=64, dtype=dtype, interleaved=interleaved)


def _many_sequences() -> Iterator[Point]:
    for sequences, heads in itertools.product((32, 512, 2401, 4096, 8192), (1, 8, 32)):
        dim = 64 if heads == 1 else 128
        yield Point("sequences", 65536, heads, dim, dim, sequences, "heavy", table_rows=0)


def _behind_the_gate() -> Iterator[Point]:
    """Shapes that TransformerEngine from 2.19 on leaves on the legacy grid."""
    for heads in (1, 8, 32):
        dim = 64 if heads == 1 else 128
        base = Point("gate", 8192, heads, dim, dim)
        for cp_size in (1, 2, 8):
            yield replace(base, sequences=2, cp_size=cp_size)
            yield replace(base, sequences=8, table_rows=8192, cp_size=cp_size)
            yield replace(base, sequences=1, table_rows=0, cp_size=cp_size)
            yield replace(base, sequences=64, table_rows=0, spread="heavy", cp_size=cp_size)


def _tails() -> Iterator[Point]:
    """Mostly tail rows, which stock TransformerEngine leaves unwritten and we zero."""
    for heads, sequences in itertools.product((8, 32), (1, 64)):
        yield Point("tail", 65536, heads, sequences=sequences, used=1 / 16)


def _fused() -> Iterator[Point]:
    """Query and key in one launch, and with the value out of a fused projection."""
    for heads, key_heads in ((32, 8), (8, 2), (4, 1), (1, 1), (16, 16)):
        dim = 64 if heads == 1 else 128
        for tokens, sequences in itertools.product((4096, 65536), (1, 256)):
            for group in ("qk", "qkv"):
                base = Point(group, tokens, heads, dim, dim, sequences, table_rows=0)
                yield replace(base, key_heads=key_heads)
