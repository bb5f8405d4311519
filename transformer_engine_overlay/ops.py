# SPDX-License-Identifier: Apache-2.0
"""The rotation as an operator that torch.compile keeps in its graph.

Eager calls do not come here: a registered operator costs host time that they need not pay.
"""

from __future__ import annotations

from typing import Any

import torch

from transformer_engine_overlay import thd
from transformer_engine_overlay.thd import rotate_thd

NAMESPACE = "transformer_engine_overlay"
NAME = f"{NAMESPACE}::rotate_thd"
SCHEMA = (
    "(Tensor t, Tensor freqs, Tensor cu_seqlens, Tensor? start_positions, bool interleaved, "
    "SymInt cp_size, SymInt cp_rank, bool transpose) -> Tensor"
)


def _fake(t: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device=t.device)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, freqs, cu_seqlens, start_positions, *scalars = inputs
    ctx.save_for_backward(freqs, cu_seqlens, start_positions)
    ctx.scalars = scalars


def _gradient(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    *scalars, transpose = ctx.scalars
    grad = operator(grad_output, *ctx.saved_tensors, *scalars, not transpose)
    return (grad, *[None] * 7)


def operator(*arguments: Any) -> torch.Tensor:
    """Call ``torch.ops.transformer_engine_overlay.rotate_thd``; arguments as for `rotate_thd`."""
    result: torch.Tensor = torch.ops.transformer_engine_overlay.rotate_thd(*arguments)
    return result


def register() -> bool:
    """Register the operator; False with a torch older than 2.4, which cannot."""
    if not hasattr(torch.library, "register_autograd"):
        return False
    torch.library.define(NAME, SCHEMA)
    torch.library.impl(NAME, ("cpu", "cuda"), rotate_thd)
    torch.library.register_fake(NAME, _fake)
    torch.library.register_autograd(NAME, _gradient, setup_context=_save)
    return True


if register():
    thd._in_graph = operator
