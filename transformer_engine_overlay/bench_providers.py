# SPDX-License-Identifier: Apache-2.0
"""What `te-overlay bench kernel` compares on one shape, each as a call on prepared tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from transformer_engine_overlay import _native, gate, patching
from transformer_engine_overlay.bench_points import Point
from transformer_engine_overlay.environment import forced_path
from transformer_engine_overlay.fused import join_qkv, rotate_qk, split_qkv
from transformer_engine_overlay.thd import rotate_thd

# Rotates set `i` of the tensors; the second argument asks for the gradient.
Call = Callable[[int, bool], Any]


@dataclass
class Tensors:
    """Several sets of the tensors of one point, so that a timed call finds cold caches.

    Attributes
    ----------
    t : list of torch.Tensor
        ``[tokens, heads, head_dim]`` each, of all heads.
    freqs : list of torch.Tensor
        ``[table_rows, 1, 1, rotary_dim]`` float32 each.
    cu_seqlens : torch.Tensor
        ``[sequences + 1]`` int32.
    rows : torch.Tensor
        Table row of each token, ``[tokens]`` int64; -1 for a tail row.
    cp_rank : int
        The rank that is timed: the last one.
    num_bytes : int
        Bytes that a call must move: input, output, and each table row that is used once.
    """

    point: Point
    t: list[torch.Tensor]
    freqs: list[torch.Tensor]
    cu_seqlens: torch.Tensor
    rows: torch.Tensor
    cp_rank: int
    num_bytes: int


def prepare(point: Point, device: torch.device, cold_bytes: int, max_sets: int) -> Tensors:
    """Make at least two sets of tensors, together of `cold_bytes` or as many as `max_sets`."""
    lengths = torch.tensor([0, *point.lengths()])
    cu_seqlens = lengths.cumsum(0).to(torch.int32)
    table_rows = point.table_rows or max(int(lengths.max()), 1)
    rows = _table_rows(point, cu_seqlens, table_rows)
    used = int(torch.unique(rows[rows >= 0]).numel())
    shape = (point.tokens, point.all_heads, point.head_dim)
    element = point.torch_dtype.itemsize
    num_bytes = 2 * element * shape[0] * shape[1] * shape[2] + 4 * used * point.rotary_dim
    sets = max(2, min(max_sets, -(-cold_bytes // num_bytes)))
    table = _angles(point, table_rows, device)
    return Tensors(
        point=point,
        t=[torch.randn(shape, device=device, dtype=point.torch_dtype) for _ in range(sets)],
        freqs=[table.clone() for _ in range(sets)],
        cu_seqlens=cu_seqlens.to(device),
        rows=rows.to(device),
        cp_rank=point.cp_size - 1,
        num_bytes=num_bytes,
    )


def _table_rows(point: Point, cu_seqlens: torch.Tensor, table_rows: int) -> torch.Tensor:
    sequences = torch.empty(point.tokens, dtype=torch.int64)
    rows = torch.empty_like(sequences)
    _native.locate_tokens(
        cu_seqlens.data_ptr(),
        0,
        point.sequences,
        table_rows,
        point.cp_size,
        point.cp_size - 1,
        point.tokens,
        False,
        sequences.data_ptr(),
        rows.data_ptr(),
    )
    return rows


def _angles(point: Point, table_rows: int, device: torch.device) -> torch.Tensor:
    """Return a table as models have it, base 10,000."""
    half = point.rotary_dim // 2
    inverse = 10000.0 ** (-torch.arange(half, device=device) / half)
    angles = torch.arange(table_rows, device=device)[:, None] * inverse
    if point.interleaved:
        return angles.repeat_interleave(2, -1)[:, None, None]
    return torch.cat((angles, angles), -1)[:, None, None]


COPIES = ("copy_", "copy kernel")
NAMES = (
    "token_linear",
    "automatic",
    "legacy_grid",
    "stock TE",
    "torch.compile",
    "flash-attn Triton",
    "fused",
    "parts",
)


def providers(tensors: Tensors, only: Collection[str] | None = None) -> dict[str, Call]:
    """Return what can run the point here, by name; the copies first and always.

    plain torch takes part in the headline points only: it compiles anew for many shapes.
    """
    kinds = {"qk": _query_and_key, "qkv": _projection}
    makers = kinds.get(tensors.point.group, _one_tensor)(tensors)
    found = {
        "copy_": _copies(tensors, lambda source, target: target.copy_(source)),
        "copy kernel": _copies(tensors, lambda source, target: torch.neg(source, out=target)),
    }
    for name, make in makers.items():
        call = make() if only is None or name in only else None
        if call is not None:
            found[name] = call
    return found


def _one_tensor(tensors: Tensors) -> dict[str, Callable[[], Call | None]]:
    makers: dict[str, Callable[[], Call | None]] = {
        "token_linear": lambda: partial(_ours, tensors, "1"),
        "automatic": lambda: partial(_ours, tensors, None),
        "legacy_grid": lambda: partial(_ours, tensors, "0"),
    }
    if tensors.t[0].is_cuda:
        makers["stock TE"] = lambda: _stock(tensors) if patching.status().enabled else None
        makers["flash-attn Triton"] = lambda: _flash_attention(tensors)
        if tensors.point.group == "headline":
            makers["torch.compile"] = lambda: _compiled(tensors)
    return makers


def _query_and_key(tensors: Tensors) -> dict[str, Callable[[], Call | None]]:
    """One launch beside two calls, on the heads of one tensor."""
    heads = tensors.point.heads
    pairs = [(t[:, :heads], t[:, heads:]) for t in tensors.t]

    def fused(i: int, transpose: bool) -> Any:
        return rotate_qk(*pairs[i], *_batch(tensors, i, transpose))

    def parts(i: int, transpose: bool) -> Any:
        _, *batch = _batch(tensors, i, transpose)
        return [rotate_thd(part, *batch) for part in pairs[i]]

    return {"fused": lambda: fused, "parts": lambda: parts}


def _projection(tensors: Tensors) -> dict[str, Callable[[], Call | None]]:
    """One launch beside splitting, rotating and copying; backward, rotating and concatenating."""
    point = tensors.point
    key_heads, d = point.key_heads, point.head_dim
    split = [point.heads // key_heads * d, d, d]
    grads = [
        [part.view(point.tokens, -1, d) for part in torch.split(t.view(-1), _sizes(point))]
        for t in tensors.t
    ]

    def fused(i: int, transpose: bool) -> Any:
        batch = _batch(tensors, i, transpose)
        if transpose:
            q, k, v = grads[i]
            return join_qkv(q, k, v, *split, *batch)
        return split_qkv(tensors.t[i].view(point.tokens, key_heads, -1), *split, *batch)

    def parts(i: int, transpose: bool) -> Any:
        _, *batch = _batch(tensors, i, transpose)
        if transpose:
            q, k, v = grads[i]
            q, k = rotate_thd(q, *batch), rotate_thd(k, *batch)
            return torch.cat((q.view(point.tokens, key_heads, -1), k, v), -1)
        q, k, v = torch.split(tensors.t[i].view(point.tokens, key_heads, -1), split, -1)
        q = q.reshape(point.tokens, point.heads, d)
        return rotate_thd(q, *batch), rotate_thd(k, *batch), v.contiguous()

    return {"fused": lambda: fused, "parts": lambda: parts}


def _sizes(point: Point) -> list[int]:
    """Elements of query, key and value."""
    heads = (point.heads, point.key_heads, point.key_heads)
    return [point.tokens * point.head_dim * count for count in heads]


def _batch(tensors: Tensors, i: int, transpose: bool) -> tuple[Any, ...]:
    """Return the arguments of fused calls; without the first, those of `rotate_thd`."""
    point, freqs = tensors.point, tensors.freqs[i]
    return (
        *(freqs, freqs, tensors.cu_seqlens, None),
        *(point.interleaved, point.cp_size, tensors.cp_rank, transpose),
    )


def _copies(tensors: Tensors, copy: Callable[[torch.Tensor, torch.Tensor], object]) -> Call:
    """Return a copy that reads and writes together as many bytes as the point must move."""
    words = max(tensors.num_bytes // 8 // 1024 * 1024, 1)
    device = tensors.t[0].device
    sources = [torch.ones(words, dtype=torch.int32, device=device) for _ in tensors.t]
    targets = [torch.empty_like(source) for source in sources]
    return lambda i, transpose: copy(sources[i], targets[i])


def _ours(tensors: Tensors, path: str | None, i: int, transpose: bool) -> torch.Tensor:
    _, *batch = _batch(tensors, i, transpose)
    with forced_path(path):
        return rotate_thd(tensors.t[i], *batch)


def _stock(tensors: Tensors) -> Call:
    point = tensors.point
    thd = gate.thd_format(gate.import_extension())
    functions = [patching.original(name) for name in patching.FUNCTIONS]

    def call(i: int, transpose: bool) -> Any:
        return functions[transpose](
            tensors.t[i],
            tensors.freqs[i],
            None,
            thd,
            point.interleaved,
            tensors.cu_seqlens,
            point.cp_size,
            tensors.cp_rank,
        )

    return call


def _plain_rope(
    t: torch.Tensor, freqs: torch.Tensor, rows: torch.Tensor, transpose: bool
) -> torch.Tensor:
    """Half-split rotation in plain torch, positions given, as a compiler likes it."""
    angles = freqs[rows].squeeze(1)
    x = t.float()
    first, second = x.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    sine = -angles.sin() if transpose else angles.sin()
    return (x * angles.cos() + turned * sine).to(t.dtype)


def _compiled(tensors: Tensors) -> Call:
    compiled = torch.compile(_plain_rope, dynamic=True)
    rows = tensors.rows.clamp_min(0)
    return lambda i, transpose: compiled(tensors.t[i], tensors.freqs[i], rows, transpose)


def _flash_attention(tensors: Tensors) -> Call | None:
    """flash-attn's Triton rotary on the same batch; it has neither context parallelism nor tails.

    It takes cosines and sines in the dtype of the input, made outside of the timed part.
    """
    point = tensors.point
    if point.cp_size > 1 or point.used < 1.0:
        return None
    try:
        rotary = importlib.import_module("flash_attn.ops.triton.rotary")
    except ImportError:
        return None
    half = point.rotary_dim // 2
    step = 2 if point.interleaved else 1
    angles = [f.squeeze(1).squeeze(1)[:, : half * step : step] for f in tensors.freqs]
    cosines = [a.cos().to(point.torch_dtype) for a in angles]
    sines = [a.sin().to(point.torch_dtype) for a in angles]
    longest = max(point.lengths())
    return lambda i, transpose: rotary.apply_rotary(
        tensors.t[i],
        cosines[i],
        sines[i],
        cu_seqlens=tensors.cu_seqlens,
        max_seqlen=longest,
        interleaved=point.interleaved,
        conjugate=transpose,
    )
