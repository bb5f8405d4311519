# SPDX-License-Identifier: Apache-2.0
"""The rotations as operators that torch.compile keeps in its graph.

Eager calls do not come here: a registered operator costs host time that they need not pay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from transformer_engine_overlay import fused, thd

NAMESPACE = "transformer_engine_overlay"
BATCH = (
    "Tensor cu_seqlens, Tensor? start_positions, bool interleaved, "
    "SymInt cp_size, SymInt cp_rank, bool transpose"
)
TABLES = f"Tensor q_freqs, Tensor k_freqs, {BATCH}"
SPLIT = "SymInt width, SymInt d, SymInt d_v"

Fake = Callable[..., Any]


@dataclass(frozen=True)
class Operator:
    """An operator whose gradient is an operator with `transpose`, its last argument, inverted.

    Attributes
    ----------
    schema : str
        Without the name; what is differentiated comes first, `transpose` last.
    function : callable
        What it runs.
    fake : callable
        Gives tensors of the right shapes, contiguous as the real ones.
    inputs : int
        Number of arguments that are differentiated.
    gradient : str
        Name of the operator that takes the gradients of the outputs to those of the inputs.
    """

    schema: str
    function: Callable[..., Any]
    fake: Fake
    inputs: int
    gradient: str


def _like(*tensors: torch.Tensor) -> Any:
    new = tuple(_new(t, *t.shape) for t in tensors)
    return new if len(new) > 1 else new[0]


def _new(t: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=t.dtype, device=t.device)


def _parts(qkv: torch.Tensor, width: int, d: int, d_v: int, *_: Any) -> Any:
    t, h = qkv.shape[:2]
    return _new(qkv, t, h * (width // d), d), _new(qkv, t, h, d), _new(qkv, t, h, d_v)


def _joined(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, width: int, d: int, d_v: int, *_: Any
) -> Any:
    return _new(k, k.shape[0], k.shape[1], width + d + d_v)


OPERATORS = {
    "rotate_thd": Operator(
        f"(Tensor t, Tensor freqs, {BATCH}) -> Tensor",
        thd.rotate_thd,
        lambda t, *_: _like(t),
        1,
        "rotate_thd",
    ),
    "rotate_qk": Operator(
        f"(Tensor q, Tensor k, {TABLES}) -> (Tensor, Tensor)",
        fused.rotate_qk,
        lambda q, k, *_: _like(q, k),
        2,
        "rotate_qk",
    ),
    "split_qkv": Operator(
        f"(Tensor qkv, {SPLIT}, {TABLES}) -> (Tensor, Tensor, Tensor)",
        fused.split_qkv,
        _parts,
        1,
        "join_qkv",
    ),
    "join_qkv": Operator(
        f"(Tensor q, Tensor k, Tensor v, {SPLIT}, {TABLES}) -> Tensor",
        fused.join_qkv,
        _joined,
        3,
        "split_qkv",
    ),
}


def _register(name: str, operator: Operator) -> None:
    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep all but what is differentiated, tensors apart from the others."""
        ctx.rest = list(inputs[operator.inputs :])
        ctx.places = [i for i, x in enumerate(ctx.rest) if isinstance(x, torch.Tensor)]
        ctx.save_for_backward(*(ctx.rest[i] for i in ctx.places))
        for i in ctx.places:
            ctx.rest[i] = None

    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        rest = list(ctx.rest)
        for i, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
            rest[i] = tensor
        *arguments, transpose = rest
        gradient = getattr(torch.ops.transformer_engine_overlay, operator.gradient)
        result = gradient(*grads, *arguments, not transpose)
        of_inputs = result if isinstance(result, tuple | list) else (result,)
        return (*of_inputs, *[None] * len(rest))

    qualified = f"{NAMESPACE}::{name}"
    torch.library.define(qualified, operator.schema)
    torch.library.impl(qualified, ("cpu", "cuda"), operator.function)
    torch.library.register_fake(qualified, operator.fake)
    torch.library.register_autograd(qualified, backward, setup_context=save)


def register() -> bool:
    """Register the operators; False with a torch older than 2.4, which cannot."""
    if not hasattr(torch.library, "register_autograd"):
        return False
    for name, operator in OPERATORS.items():
        _register(name, operator)
    return True


thd.has_operators = register()
