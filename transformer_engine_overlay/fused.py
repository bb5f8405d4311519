# SPDX-License-Identifier: Apache-2.0
"""Query and key rotated together, and the same on a fused QKV projection: one launch each.

On a GPU the fused kernels take a call whose rows are made of whole 16-byte vectors and whose two
tables have one shape. Any other call, and each one on the CPU, on the legacy grid or in checked
mode, is made of calls of `rotate_thd` and copies, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from transformer_engine_overlay import _native, checked, checks
from transformer_engine_overlay.thd import is_in_graph, rotate_checked, savable

Pair = tuple[torch.Tensor, torch.Tensor]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Batch(NamedTuple):
    """What query and key share: tables and where each token is; as for `rotate_thd`."""

    q_freqs: torch.Tensor
    k_freqs: torch.Tensor
    cu_seqlens: torch.Tensor
    start_positions: torch.Tensor | None
    interleaved: bool
    cp_size: int
    cp_rank: int
    transpose: bool

    def rotate(
        self, name: str, t: torch.Tensor, table_name: str, freqs: torch.Tensor
    ) -> torch.Tensor:
        """Rotate one part by itself; the names are for messages."""
        *_, cu_seqlens, start_positions, interleaved, cp_size, cp_rank, transpose = self
        return rotate_checked(
            f"grad_{name}" if transpose else name,
            *(t, freqs, cu_seqlens, start_positions, interleaved, cp_size, cp_rank),
            transpose,
            routed=False,
            table_name=table_name,
        )


def apply_rotary_pos_emb_thd_qk(
    q: torch.Tensor,
    k: torch.Tensor,
    freqs: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    k_freqs: torch.Tensor | None = None,
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Pair:
    """Apply rotary position embedding to query and key of a packed batch, in one launch.

    The result is bit for bit that of `apply_rotary_pos_emb_thd` on each, and so are the gradients.
    With one table for both, the angles of a token are computed once.

    Parameters
    ----------
    q, k : torch.Tensor
        ``[t, h_q, d]`` and ``[t, h_k, d]``, of one dtype, on one device, any strides.
    freqs : torch.Tensor
        Angle table ``[s, 1, 1, d2]``, of the query, and of the key unless it has its own.
    cu_seqlens : torch.Tensor
        As for `apply_rotary_pos_emb_thd`, like `start_positions`, `interleaved`, `cp_size` and
        `cp_rank`.
    k_freqs : torch.Tensor, optional
        Angle table of the key.

    Returns
    -------
    tuple of torch.Tensor
        Query and key, contiguous, of the shapes of `q` and `k`.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `apply_rotary_pos_emb_thd`; also for `q` and `k` that differ in more than their heads.
    """
    batch = Batch(
        *(freqs, freqs if k_freqs is None else k_freqs, cu_seqlens, start_positions),
        *(interleaved, cp_size, cp_rank, False),
    )
    rotate: Callable[..., Any] = (
        torch.ops.transformer_engine_overlay.rotate_qk if is_in_graph() else _RotateQk.apply
    )
    result: Pair = rotate(q, k, *batch)
    return result


def apply_fused_qkv_rotary_pos_emb_thd(
    qkv: torch.Tensor,
    q_freqs: torch.Tensor,
    k_freqs: torch.Tensor,
    qkv_split_arg_list: Sequence[int],
    cu_seqlens: torch.Tensor,
    *,
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Triple:
    """Take query, key and value out of a fused projection and rotate the first two, in one launch.

    What TransformerEngine's ``apply_fused_qkv_rotary_pos_emb`` does for padded batches, for packed
    ones. The result is bit for bit that of splitting, rotating and copying, and so is the gradient,
    which comes as one tensor in the layout of `qkv`.

    Parameters
    ----------
    qkv : torch.Tensor
        ``[t, h, sum(qkv_split_arg_list)]``: for each of ``h`` key-value heads its query heads side
        by side, the key and the value. float32, float16 or bfloat16, any strides.
    q_freqs, k_freqs : torch.Tensor
        Angle tables ``[s, 1, 1, d2]``; may be the same tensor.
    qkv_split_arg_list : sequence of int
        Widths ``[n * d, d, d_v]`` of the query heads, the key and the value of a key-value head.
    cu_seqlens : torch.Tensor
        As for `apply_rotary_pos_emb_thd`, like `start_positions`, `interleaved`, `cp_size` and
        `cp_rank`.

    Returns
    -------
    tuple of torch.Tensor
        Query ``[t, h * n, d]``, key ``[t, h, d]`` and value ``[t, h, d_v]``, contiguous. Tail rows
        of query and key are zeros; those of the value are copied.

    Raises
    ------
    TypeError, ValueError, RuntimeError
        As `apply_rotary_pos_emb_thd`; also for widths that do not make up a row.
    """
    split = checks.check_split(qkv, qkv_split_arg_list)
    batch = (q_freqs, k_freqs, cu_seqlens, start_positions, interleaved, cp_size, cp_rank, False)
    rotate: Callable[..., Any] = (
        torch.ops.transformer_engine_overlay.split_qkv if is_in_graph() else _SplitQkv.apply
    )
    result: Triple = rotate(qkv, *split, *batch)
    return result


def rotate_qk(q: torch.Tensor, k: torch.Tensor, *arguments: Any) -> Pair:
    """Rotate query and key, without autograd; `arguments` are those of `Batch`."""
    batch = Batch(*arguments)
    q, k = checks.check_same_rows(q, k)
    together = _rotate_qk_fused(q, k, batch) if _may_fuse(q) else None
    if together is not None:
        return together
    of_key = "freqs" if batch.k_freqs is batch.q_freqs else "k_freqs"
    return (
        batch.rotate("q", q, "freqs", batch.q_freqs),
        batch.rotate("k", k, of_key, batch.k_freqs),
    )


def split_qkv(qkv: torch.Tensor, width: int, d: int, d_v: int, *arguments: Any) -> Triple:
    """Split, rotate and copy, without autograd; `arguments` are those of `Batch`."""
    batch = Batch(*arguments)
    qkv = _plain("qkv", qkv)
    parts = _parts(qkv, width, d)
    together = _split_qkv_fused(parts, d_v, batch) if _may_fuse(qkv) else None
    if together is not None:
        return together
    query, key, value = parts
    return (
        batch.rotate("qkv", query.flatten(1, 2), "q_freqs", batch.q_freqs),
        batch.rotate("qkv", key.squeeze(2), "k_freqs", batch.k_freqs),
        value.squeeze(2).clone(memory_format=torch.contiguous_format),
    )


def join_qkv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    width: int,
    d: int,
    d_v: int,
    *arguments: Any,
) -> torch.Tensor:
    """Do the transpose of `split_qkv`: rotate, and copy into one tensor ``[t, h, widths]``."""
    batch = Batch(*arguments)
    q, k, v = _plain("q", q), _plain("k", k), _plain("v", v)
    qkv = _new(k, (*k.shape[:2], width + d + d_v))
    targets = _parts(qkv, width, d)
    sources = (torch.unflatten(q, 1, targets[0].shape[1:3]), k.unsqueeze(2), v.unsqueeze(2))
    if _may_fuse(k) and _fused(sources, targets, batch):
        return qkv
    targets[0].copy_(batch.rotate("q", q, "q_freqs", batch.q_freqs).view(targets[0].shape))
    targets[1].copy_(batch.rotate("k", k, "k_freqs", batch.k_freqs).unsqueeze(2))
    targets[2].copy_(sources[2])
    return qkv


# Apart from their callers, so that outputs that were not filled are gone before others are made.
def _rotate_qk_fused(q: torch.Tensor, k: torch.Tensor, batch: Batch) -> Pair | None:
    outputs = (_new(q, q.shape), _new(k, k.shape))
    views = [x.unsqueeze(1) for x in (q, k, *outputs)]
    return outputs if _fused(views[:2], views[2:], batch) else None


def _split_qkv_fused(parts: Triple, d_v: int, batch: Batch) -> Triple | None:
    query, key, _ = parts
    t, h, heads, d = query.shape
    q, k, v = (_new(key, shape) for shape in ((t, h * heads, d), (t, h, d), (t, h, d_v)))
    views = (q.view(query.shape), k.unsqueeze(2), v.unsqueeze(2))
    return (q, k, v) if _fused(parts, views, batch) else None


def _plain(name: str, t: torch.Tensor) -> torch.Tensor:
    """Return `t` as what it is, should a subclass answer torch's functions in its own way."""
    return t if type(t) is torch.Tensor else checks.check_tensor(name, t)


def _parts(qkv: torch.Tensor, width: int, d: int) -> Triple:
    """Return views ``[t, h, heads, dim]`` of the parts."""
    query, rest = qkv[..., :width], qkv[..., width:]
    return torch.unflatten(query, 2, (width // d, d)), rest[..., None, :d], rest[..., None, d:]


def _may_fuse(t: torch.Tensor) -> bool:
    return t.is_cuda and not checked.is_requested()


def _new(t: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return torch.empty(shape, dtype=t.dtype, device=t.device)


def _fused(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], batch: Batch) -> bool:
    """Write `outputs` if the fused kernels take the call.

    Both are views ``[t, groups, heads, dim]`` of query and key, and of the value if there is one.
    """
    q, k, *v = inputs
    new_q, new_k, *new_v = outputs
    return isinstance(batch.interleaved, bool) and _native.rotate_fused(
        *(q, new_q, k, new_k, v[0] if v else None, new_v[0] if v else None),
        *(batch.q_freqs, batch.k_freqs, batch.start_positions),
        batch.interleaved,
        *(batch.cu_seqlens, batch.cp_size, batch.cp_rank),
        batch.transpose,
    )


def _save(ctx: Any, arguments: Sequence[Any]) -> None:
    """Keep the arguments of `Batch`, which a call has checked, for the backward pass."""
    if not any(ctx.needs_input_grad):
        return
    q_freqs, k_freqs, *metadata = arguments[:4]
    q_table = savable(q_freqs)
    k_table = q_table if k_freqs is q_freqs else savable(k_freqs)  # one table stays one
    ctx.save_for_backward(q_table, k_table, *map(savable, metadata))
    ctx.scalars = arguments[4:]


def _transposed(ctx: Any) -> tuple[Any, ...]:
    *scalars, transpose = ctx.scalars
    return (*ctx.saved_tensors, *scalars, not transpose)


class _RotateQk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, *arguments: Any) -> Pair:
        outputs = rotate_qk(q, k, *arguments)
        _save(ctx, arguments)
        return outputs

    @staticmethod
    def backward(ctx: Any, grad_q: torch.Tensor, grad_k: torch.Tensor) -> tuple[Any, ...]:
        grads = _RotateQk.apply(grad_q, grad_k, *_transposed(ctx))  # type: ignore[no-untyped-call]
        return (*grads, *[None] * 8)


class _SplitQkv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: torch.Tensor, *arguments: Any) -> Triple:
        outputs = split_qkv(qkv, *arguments)
        ctx.split = arguments[:3]
        _save(ctx, arguments[3:])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        arguments = (*ctx.split, *_transposed(ctx))
        grad = _JoinQkv.apply(*grads, *arguments)  # type: ignore[no-untyped-call]
        return (grad, *[None] * 11)


class _JoinQkv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *arguments: Any
    ) -> torch.Tensor:
        qkv = join_qkv(q, k, v, *arguments)
        ctx.split = arguments[:3]
        _save(ctx, arguments[3:])
        return qkv

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        arguments = (*ctx.split, *_transposed(ctx))
        grads = _SplitQkv.apply(grad, *arguments)  # type: ignore[no-untyped-call]
        return (*grads, *[None] * 11)
