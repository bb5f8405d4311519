# SPDX-License-Identifier: Apache-2.0
"""Whole calls, drawn by hypothesis, and the tensors that they stand for.

A call is a small value that prints as what it takes to make it again: an explicit example is a copy
of what hypothesis printed.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from packed import boundaries, randn

from transformer_engine_overlay.packing import padded_cu_seqlens

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
TABLE_DTYPES = {**DTYPES, "float64": torch.float64}
GUARD = 64  # elements around each tensor
LIMIT = 2**31 - 1


@dataclass(frozen=True)
class Layout:
    """How a tensor ``[t, h, d]`` lies in memory.

    Attributes
    ----------
    order : tuple of int
        Dimensions from the outermost to the innermost; (0, 1, 2) is contiguous but for the gaps.
    gaps : tuple of int
        Elements left free behind each extent of a dimension.
    expanded : frozenset of int
        Dimensions of stride 0: all their entries are one.
    offset : int
        Elements by which the first one lies off an aligned address.
    """

    order: tuple[int, ...] = (0, 1, 2)
    gaps: tuple[int, int, int] = (0, 0, 0)
    expanded: frozenset[int] = frozenset()
    offset: int = 0

    def strides(self, shape: tuple[int, int, int]) -> list[int]:
        strides, step = [0, 0, 0], 1
        for dim in reversed(self.order):
            step += self.gaps[dim]
            if dim not in self.expanded:
                strides[dim] = step
                step *= max(shape[dim], 1)
        return strides


@dataclass(frozen=True)
class Call:
    """A call on metadata that fit.

    Attributes
    ----------
    lengths : tuple of int
        Tokens of each sequence before padding.
    starts : tuple of int or None
        Start position of each sequence, and perhaps more.
    cp_size, cp_rank, heads, head_dim, rotary_dim, interleaved, transpose
        As the call has them; `transpose` is the gradient.
    dtype, table_dtype : str
        Of the tensor and of the table.
    layout : Layout
        Of the tensor.
    table_gap : int
        Elements between the rows of the table; with 0 it is contiguous.
    table_offset : int
        Elements by which the table lies off an aligned address.
    spare_rows : int
        Rows of the table beyond the longest position.
    tail_rows : int
        Rows of the tensor behind the last sequence.
    symmetric : bool
        Whether the elements of a pair have the same angle.
    seed : int
        Of the values.
    """

    lengths: tuple[int, ...] = (3, 5)
    starts: tuple[int, ...] | None = None
    cp_size: int = 1
    cp_rank: int = 0
    heads: int = 1
    head_dim: int = 8
    rotary_dim: int = 8
    interleaved: bool = False
    transpose: bool = False
    dtype: str = "float32"
    table_dtype: str = "float32"
    layout: Layout = Layout()
    table_gap: int = 0
    table_offset: int = 0
    spare_rows: int = 0
    tail_rows: int = 0
    symmetric: bool = False
    seed: int = 0

    def at_rank(self, cp_rank: int) -> Call:
        return dataclasses.replace(self, cp_rank=cp_rank)

    @property
    def cu_seqlens(self) -> list[int]:
        return padded_cu_seqlens(self.lengths, self.cp_size).tolist()

    @property
    def rows(self) -> int:
        """Local rows that a sequence owns."""
        return self.cu_seqlens[-1] // self.cp_size

    @property
    def shape(self) -> tuple[int, int, int]:
        return (self.rows + self.tail_rows, self.heads, self.head_dim)

    @property
    def table_rows(self) -> int:
        starts = self.starts or [0] * len(self.lengths)
        cu = self.cu_seqlens
        ends = [s + n for s, n in zip(starts, _diff(cu), strict=False) if n > 0]
        return max(ends, default=0) + self.spare_rows

    def table_row_of(self, row: int) -> int:
        """Which table row a local row uses; -1 for a tail row. Written out, chunk by chunk."""
        cu = self.cu_seqlens
        for i, (begin, end) in enumerate(itertools.pairwise(cu)):
            first, last = begin // self.cp_size, end // self.cp_size
            if first <= row < last:
                chunk = (last - first) // 2 if self.cp_size > 1 else last - first
                mine = [self.cp_rank, 2 * self.cp_size - 1 - self.cp_rank]
                held = [mine[k] * chunk + p for k in (0, 1) for p in range(chunk)]
                return held[row - first] + (self.starts[i] if self.starts else 0)
        return -1


def _diff(values: list[int]) -> list[int]:
    return [b - a for a, b in itertools.pairwise(values)]


def _truncate(boundary: int, cp_size: int) -> int:
    """Divide as C does."""
    return boundary // cp_size if boundary >= 0 else -(-boundary // cp_size)


@dataclass
class Tensors:
    """The tensors of a call. Each is a view into `memory`, whose other elements are `filling`."""

    t: torch.Tensor
    freqs: torch.Tensor
    cu_seqlens: torch.Tensor
    starts: torch.Tensor | None
    memory: list[torch.Tensor]


def make_tensors(call: Call, device: torch.device, filling: float = float("nan")) -> Tensors:
    """Make the tensors of a call, with `filling` before, behind and between their elements."""
    dtype = DTYPES[call.dtype]
    strides = call.layout.strides(call.shape)
    lead = GUARD + call.layout.offset
    values = randn(*call.shape, dtype=dtype, seed=call.seed)
    t, t_memory = _place(values, strides, lead, filling, device)

    table_dtype = TABLE_DTYPES[call.table_dtype]
    width = call.rotary_dim + call.table_gap
    table = randn(call.table_rows, 1, 1, call.rotary_dim, seed=call.seed + 1) * 30.0
    if call.symmetric:
        half = call.rotary_dim // 2
        first = table[..., :half]
        table = (
            first.repeat_interleave(2, -1) if call.interleaved else torch.cat([first, first], -1)
        )
    freqs, freqs_memory = _place(
        table.to(table_dtype), [width, width, width, 1], GUARD + call.table_offset, filling, device
    )
    cu, cu_memory = _place_metadata(call.cu_seqlens, device)
    memory, starts = [t_memory, freqs_memory, cu_memory], None
    if call.starts is not None:
        starts, starts_memory = _place_metadata(call.starts, device)
        memory.append(starts_memory)
    return Tensors(t, freqs, cu, starts, memory)


def _place(
    values: torch.Tensor, strides: list[int], lead: int, filling: float, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put values into a buffer; where entries share an element, the last one stays."""
    extent = sum(s * (n - 1) for s, n in zip(strides, values.shape, strict=True) if n > 0) + 1
    memory = torch.full((lead + extent + GUARD,), filling, dtype=values.dtype, device=device)
    view = memory.as_strided(values.shape, strides, lead)
    if values.numel():
        distinct = [slice(-1, None) if s == 0 else slice(None) for s in strides]
        view[tuple(distinct)] = values[tuple(distinct)].to(device)
    return view, memory


def _place_metadata(
    values: list[int] | tuple[int, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Metadata among values that would lead far astray."""
    memory = boundaries([LIMIT] * 4 + list(values) + [-LIMIT] * 4, device)
    return memory[4 : 4 + len(values)], memory


LAYOUTS = st.one_of(
    st.just(Layout()),
    st.builds(
        Layout,
        order=st.permutations((0, 1, 2)).map(tuple),
        gaps=st.tuples(*[st.sampled_from([0, 0, 1, 8, 13])] * 3),
        expanded=st.sampled_from([(), (), (0,), (1,), (2,), (1, 2), (0, 1, 2)]).map(frozenset),
        offset=st.integers(0, 9),
    ),
)

# Rows that are whole vectors, and rows that are not.
SHAPES = st.one_of(
    st.tuples(
        st.integers(0, 6), st.integers(0, 20).flatmap(lambda half: st.integers(2 * half, 44).map(
            lambda dim: (dim, 2 * half)
        ))
    ).map(lambda x: (x[0], *x[1])),
    st.sampled_from(
        [
            *((1, 64, 64), (1, 128, 64), (4, 128, 128), (2, 96, 96), (5, 64, 64), (8, 128, 128)),
            *((10, 192, 96), (16, 128, 64), (32, 128, 128), (1, 1024, 1024), (3, 80, 20)),
        ]
    ),
)  # fmt: skip

CP = st.sampled_from([1, 1, 1, 2, 3, 4, 8]).flatmap(
    lambda size: st.tuples(st.just(size), st.integers(0, size - 1))
)

LENGTHS = st.one_of(
    st.lists(st.integers(0, 12), max_size=12),
    st.lists(st.sampled_from([0, 0, 1, 2]), min_size=30, max_size=130),
    st.lists(st.integers(20, 70), min_size=1, max_size=2),
)


@st.composite
def calls(draw: st.DrawFn) -> Call:
    """Draw a call on metadata that fit."""
    lengths = tuple(draw(LENGTHS))
    cp_size, cp_rank = draw(CP)
    heads, head_dim, rotary_dim = draw(SHAPES)
    starts = None
    if draw(st.booleans()):
        count = len(lengths) + draw(st.sampled_from([0, 0, 2]))
        starts = tuple(draw(st.lists(st.integers(0, 90), min_size=count, max_size=count)))
    return Call(
        lengths=lengths,
        starts=starts,
        cp_size=cp_size,
        cp_rank=cp_rank,
        heads=heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        interleaved=draw(st.booleans()),
        transpose=draw(st.booleans()),
        dtype=draw(st.sampled_from(sorted(DTYPES))),
        table_dtype=draw(st.sampled_from(["float32"] * 4 + sorted(TABLE_DTYPES))),
        layout=draw(LAYOUTS),
        table_gap=draw(st.sampled_from([0, 0, 0, 1, 8])),
        table_offset=draw(st.integers(0, 5)),
        spare_rows=draw(st.sampled_from([0, 0, 1, 200])),
        tail_rows=draw(st.sampled_from([0, 0, 1, 9])),
        symmetric=draw(st.booleans()),
        seed=draw(st.integers(0, 2**16)),
    )


@dataclass(frozen=True)
class Spoiled:
    """A call whose metadata are replaced by some that do not fit, or by anything.

    Attributes
    ----------
    call : Call
        What the tensor comes from.
    cu_seqlens : tuple of int
        At least one entry.
    starts : tuple of int or None
        An entry for each sequence.
    table_rows : int
        Rows of the table, perhaps too few.
    """

    call: Call
    cu_seqlens: tuple[int, ...]
    starts: tuple[int, ...] | None
    table_rows: int

    def make(self, device: torch.device) -> Tensors:
        tensors = make_tensors(self.call, device)
        width = self.call.rotary_dim
        table = randn(self.table_rows, 1, 1, width, seed=1) * 30.0
        # Contiguous, with NaN around it: to read outside of it would be seen.
        freqs, memory = _place(table, [width, width, width, 1], GUARD, float("nan"), device)
        cu, cu_memory = _place_metadata(self.cu_seqlens, device)
        tensors.memory[1:] = [memory, cu_memory]
        starts = None
        if self.starts is not None:
            starts, starts_memory = _place_metadata(self.starts, device)
            tensors.memory.append(starts_memory)
        return Tensors(tensors.t, freqs, cu, starts, tensors.memory)

    @property
    def decreases(self) -> bool:
        return any(n < 0 for n in _diff(list(self.cu_seqlens)))

    def table_rows_used(self) -> list[int | None]:
        """Table row of each local row by TE's rule, None where it has none.

        Needs boundaries that do not decrease.
        """
        size, rank = self.call.cp_size, self.call.cp_rank
        used: list[int | None] = [None] * self.call.shape[0]
        for i, (begin, end) in enumerate(itertools.pairwise(self.cu_seqlens)):
            first, length = _truncate(begin, size), _truncate(end, size) - _truncate(begin, size)
            # No further than the tensor goes: a length may be 2^31.
            for r in range(max(0, -first), min(length, len(used) - first)):
                position = r
                if size > 1 and r < length // 2:
                    position = r + rank * length // 2
                elif size > 1:
                    position = r + length * size - (rank + 1) * length // 2 - length // 2
                position += self.starts[i] if self.starts else 0
                if 0 <= position < self.table_rows:
                    used[first + r] = position
        return used

    def faults(self) -> set[str]:
        """What checked mode must refuse, worked out sequence by sequence."""
        size, rank = self.call.cp_size, self.call.cp_rank
        cu, found = self.cu_seqlens, set()
        if cu[0] != 0:
            found.add("first boundary")
        for i, (begin, end) in enumerate(itertools.pairwise(cu)):
            if end < begin:
                found.add("decreasing")
            elif size > 1 and end % (2 * size):
                found.add("unpadded")
            if end // size > self.call.shape[0]:
                found.add("rows")
            if end <= begin:
                continue
            start = self.starts[i] if self.starts else 0
            if start < 0:
                found.add("negative start")
            if size == 1 or (begin % (2 * size) == 0 and end % (2 * size) == 0):
                # Chunk 2 * size - 1 - rank is the later one of this rank's two.
                chunk = (end - begin) // (2 * size)
                last = end - begin if size == 1 else (2 * size - rank) * chunk
                if start + last > self.table_rows:
                    found.add("table")
        return found


WILD = st.one_of(st.integers(-40, 60), st.integers(-(2**31), LIMIT), st.sampled_from([0, LIMIT]))


@st.composite
def spoiled_calls(draw: st.DrawFn) -> Spoiled:
    """Draw a call on metadata of which nothing is promised; some of them fit."""
    call = dataclasses.replace(draw(calls()), table_gap=0, table_offset=0, table_dtype="float32")
    cu = list(call.cu_seqlens)
    starts = None if call.starts is None else list(call.starts)
    table_rows = call.table_rows
    for kind in draw(
        st.sets(st.sampled_from(["table", "starts", "shift", "boundary", "lengths", "garbage"]))
    ):
        if kind == "table":
            table_rows = draw(st.integers(0, max(table_rows, 1)))
        elif kind == "starts":
            starts = draw(st.lists(WILD, min_size=len(cu) - 1, max_size=len(cu) - 1))
        elif kind == "shift":
            by = draw(st.integers(-5, 9))
            cu = [max(min(b + by, LIMIT), -LIMIT) for b in cu]
        elif kind == "boundary":
            cu[draw(st.integers(0, len(cu) - 1))] = draw(WILD)
        elif kind == "lengths":
            lengths = draw(st.lists(st.integers(0, 20), min_size=len(cu) - 1, max_size=len(cu) - 1))
            cu = [0, *itertools.accumulate(lengths)]
        elif kind == "garbage":
            cu = draw(st.lists(WILD, min_size=len(cu), max_size=len(cu)))
    return Spoiled(call, tuple(cu), None if starts is None else tuple(starts), table_rows)
