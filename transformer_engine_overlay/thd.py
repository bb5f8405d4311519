# SPDX-License-Identifier: Apache-2.0
"""The torch API: rotary position embedding of packed tensors, differentiable, on CPU and GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from transformer_engine_overlay import (
    _native,
    checked,
    checks,
    faults,  # noqa: F401 (reports at exit)
)

# Set by ops.py, which needs this module.
has_operators = False


def is_in_graph() -> bool:
    """Tell whether torch.compile traces the call and is to find an operator."""
    return torch.compiler.is_compiling() and has_operators


def apply_rotary_pos_emb_thd(
    t: torch.Tensor,
    freqs: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """Apply rotary position embedding to a packed batch of sequences.

    Token at position ``p`` of its sequence has each pair ``(x[i], x[j])`` of its rotary dimensions
    turned by the angles of table row ``p``::

        y[i] = x[i] * cos(freqs[p, i]) - x[j] * sin(freqs[p, i])
        y[j] = x[j] * cos(freqs[p, j]) + x[i] * sin(freqs[p, j])

    computed in float32 and rounded once (RoFormer, arXiv:2104.09864, equation 34). On a GPU, each
    row that a sequence owns is bit for bit what TransformerEngine's
    ``apply_rotary_pos_emb(..., tensor_format="thd", fused=True)`` gives.

    Parameters
    ----------
    t : torch.Tensor
        Packed input ``[t, h, d]``, float32, float16 or bfloat16, any strides. With context
        parallelism, the rows of this rank in dual-chunk order.
    freqs : torch.Tensor
        Angle table ``[s, 1, 1, d2]`` in radians, ``d2 <= d`` and even. Made float32 and contiguous
        if it is not. Not differentiated.
    cu_seqlens : torch.Tensor
        Boundaries of the global batch, ``[b + 1]`` int32, on the device of `t`. With
        ``cp_size > 1``, of the padded batch: each boundary divisible by ``2 * cp_size``.
    start_positions : torch.Tensor, optional
        Added to the positions of sequence ``i``: ``[b]`` int32 (further entries are not read), on
        the device of `t`.
    interleaved : bool
        Pairs are ``(2j, 2j + 1)`` if true, else ``(j, j + d2 / 2)``.
    cp_size, cp_rank : int
        Context-parallel size and this rank, ``0 <= cp_rank < cp_size``.

    Returns
    -------
    torch.Tensor
        ``[t, h, d]``, contiguous, of the dtype of `t`. Dimensions from ``d2`` on are copied bit for
        bit. Rows past ``cu_seqlens[-1] // cp_size`` (tail rows) and rows whose position has no
        table row are zeros, and so are their gradients.

    Raises
    ------
    TypeError, ValueError
        For an argument of the wrong type, dtype, shape or device, before anything is launched.
        Values on the device are not looked at, as that would synchronise, but with
        ``TE_OVERLAY_CHECK=1``: then metadata that do not fit `t` and `freqs` raise ValueError.
    RuntimeError
        If CUDA reports an error, the driver is too old or the package has no code for the GPU.

    Notes
    -----
    Runs on the current stream of the device of `t`, whichever device is current. Autocast does not
    touch it: the output has the dtype of `t`. The environment variable
    ``NVTE_FUSED_ROPE_THD_TOKEN_LINEAR`` forces one of the two paths (``1`` token-linear, ``0``
    legacy grid); both give the same bits. ``torch.compile`` keeps the call in its graph as the
    operator ``transformer_engine_overlay::rotate_thd`` (torch 2.4 and later), with the same bits.
    Transforms of ``torch.func`` and graph tracing by ``make_fx`` are not supported.
    """
    rotate: Callable[..., Any] = (
        torch.ops.transformer_engine_overlay.rotate_thd if is_in_graph() else _ThdRope.apply
    )
    result: torch.Tensor = rotate(
        t, freqs, cu_seqlens, start_positions, interleaved, cp_size, cp_rank, False
    )
    return result


def rotate_thd(
    t: torch.Tensor,
    freqs: torch.Tensor,
    cu_seqlens: torch.Tensor,
    start_positions: torch.Tensor | None,
    interleaved: bool,
    cp_size: int,
    cp_rank: int,
    transpose: bool,
) -> torch.Tensor:
    """Rotate, or apply the transposed rotation, without autograd.

    Parameters are those of `apply_rotary_pos_emb_thd`; `transpose` turns by the opposite angles,
    which is the gradient: `t` is then the gradient of the output.

    Returns
    -------
    torch.Tensor
        A new contiguous tensor of the shape and dtype of `t`.
    """
    return rotate_checked(
        "grad_output" if transpose else "t",
        *(t, freqs, cu_seqlens, start_positions, interleaved, cp_size, cp_rank),
        transpose,
        routed=False,
    )


def rotate_checked(
    name: str,
    t: torch.Tensor,
    freqs: torch.Tensor,
    cu_seqlens: torch.Tensor,
    start_positions: torch.Tensor | None,
    interleaved: bool,
    cp_size: int,
    cp_rank: int,
    transpose: bool,
    *,
    routed: bool,
    table_name: str = "freqs",
) -> torch.Tensor:
    """Do what `rotate_thd` does.

    `name` and `table_name` are what messages call `t` and `freqs`, `routed` is for the counters.
    """
    check_values = checked.is_requested()
    output = None
    if not check_values:
        output = _native.rotate(
            *(t, freqs, start_positions, interleaved, cu_seqlens, cp_size, cp_rank),
            transpose,
            routed,
            False,
        )
    if output is None:  # not plain: it has to be converted, or refused
        t, freqs, cu_seqlens, start_positions, interleaved, cp_size, cp_rank = checks.normalize(
            *(name, t, freqs, cu_seqlens, start_positions, interleaved, cp_size, cp_rank),
            table_name,
        )
        if check_values:
            checked.check_values(
                *(name, t, freqs, cu_seqlens, start_positions, cp_size, cp_rank), table_name
            )
        output = _native.rotate(
            *(t, freqs, start_positions, interleaved, cu_seqlens, cp_size, cp_rank),
            transpose,
            routed,
            True,
        )
    assert output is not None, "checks.normalize and the native module disagree"
    return output


def path_counts() -> dict[str, dict[str, int]]:
    """Count what ran in this process so far, on the CPU and on all GPUs.

    Returns
    -------
    dict
        For ``"legacy_grid"`` and ``"token_linear"`` the number of ``"calls"`` and of ``"blocks"``
        launched (on the CPU: pairs of table row and sequence visited, or tokens). Calls with
        nothing to do are not counted.
    """
    counts: dict[str, dict[str, int]] = _native.path_counts()
    return counts


class _ThdRope(torch.autograd.Function):
    """The rotation and its transpose; each is the gradient of the other, to any order."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, *arguments: Any) -> torch.Tensor:
        freqs, cu_seqlens, start_positions, *scalars = arguments
        output = rotate_thd(t, *arguments)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(*map(savable, (freqs, cu_seqlens, start_positions)))
            ctx.scalars = scalars
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad = None
        if ctx.needs_input_grad[0]:
            *scalars, transpose = ctx.scalars
            grad = _ThdRope.apply(  # type: ignore[no-untyped-call]
                grad_output, *ctx.saved_tensors, *scalars, not transpose
            )
        return (grad, *[None] * 7)


def savable(value: torch.Tensor | None) -> torch.Tensor | None:
    """Return what can be saved for a backward pass: of an inference tensor a copy."""
    return value.clone() if value is not None and value.is_inference() else value
