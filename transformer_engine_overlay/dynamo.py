# SPDX-License-Identifier: Apache-2.0
"""Routed calls under torch.compile: an operator of the graph, where the call else ends it.

TransformerEngine's fused RoPE is an autograd function in Python around two builtins. torch.compile
traces the function and stops at the builtins, of which it knows nothing. Of the builtins that
replace them it is told what to trace: an operator that makes the same call when the graph runs. All
that a routed call decides (the path, checked mode, what is left to TransformerEngine) is so decided
at run time, call by call. Without torch.compile nothing of this is in the way.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

from transformer_engine_overlay import ops

logger = logging.getLogger("transformer_engine_overlay")

NAME = f"{ops.NAMESPACE}::routed_rotate_thd"
# The arguments are those of TransformerEngine's functions, in their order, without the layout.
SCHEMA = (
    "(Tensor t, Tensor freqs, Tensor? start_positions, bool interleaved, Tensor? cu_seqlens, "
    "SymInt cp_size, SymInt cp_rank, bool transpose) -> Tensor"
)

# By `transpose`: the routed function made last, and its enumerator of layout THD.
_routed: dict[bool, tuple[Callable[..., torch.Tensor], object]] = {}


def _call(
    t: torch.Tensor,
    freqs: torch.Tensor,
    start_positions: torch.Tensor | None,
    interleaved: bool,
    cu_seqlens: torch.Tensor | None,
    cp_size: int,
    cp_rank: int,
    transpose: bool,
) -> torch.Tensor:
    if transpose not in _routed:
        raise RuntimeError(
            f"{NAME} runs what transformer_engine_overlay.enable() put in place, which was not "
            "called in this process; call it, or compile again"
        )
    function, thd_format = _routed[transpose]
    return function(
        t, freqs, start_positions, thd_format, interleaved, cu_seqlens, cp_size, cp_rank
    )


def _fake(t: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty(t.shape, dtype=t.dtype, device=t.device)


def _register() -> bool:
    """Register the operator; False with a torch older than 2.5, which cannot be told of it."""
    if not hasattr(torch.compiler, "substitute_in_graph"):
        return False
    torch.library.define(NAME, SCHEMA)
    torch.library.impl(NAME, ("cpu", "cuda"), _call)
    # As the builtins: no gradient by itself, which TransformerEngine's autograd function gives.
    torch.library.impl(NAME, "Autograd", torch.library.fallthrough_kernel)
    torch.library.register_fake(NAME, _fake)
    return True


_REGISTERED = _register()


def keep_in_graph(routed: Callable[..., torch.Tensor], transpose: bool, thd_format: object) -> None:
    """Let torch.compile trace THD calls of a routed function as the operator.

    Other calls still end the graph, and are made as they are without torch.compile. What was
    compiled before stays right, and stays broken where it was.

    Parameters
    ----------
    routed : callable
        From `router.make_routed`. torch.compile keeps it as long as the process lives.
    transpose : bool
        True for the backward function.
    thd_format : object
        The enumerator ``NVTE_QKV_Format.NVTE_THD``.
    """
    _routed[transpose] = (routed, thd_format)
    # TransformerEngine imports torch._dynamo by itself; it takes too long to do it for others.
    if not _REGISTERED or "torch._dynamo" not in sys.modules:
        return

    def call(*args: Any, **names: Any) -> torch.Tensor:
        return routed(*args, **names)

    outside: Callable[..., torch.Tensor] = torch.compiler.disable(call)  # type: ignore[no-untyped-call]

    def traced(*args: Any, **names: Any) -> torch.Tensor:
        # Of an enumerator of a binding torch.compile must know where it is, so: not from a closure.
        thd = _routed[transpose][1]
        if len(args) == 8 and not names and args[3] is thd and _fits_the_schema(*args):
            t, freqs, starts, _, interleaved, cu_seqlens, cp_size, cp_rank = args
            output: torch.Tensor = torch.ops.transformer_engine_overlay.routed_rotate_thd(
                t, freqs, starts, interleaved, cu_seqlens, cp_size, cp_rank, transpose
            )
            return output
        return outside(*args, **names)

    try:
        torch.compiler.substitute_in_graph(routed, skip_signature_check=True)(traced)
    except Exception as error:  # not worth a call that would work
        logger.warning(
            "torch.compile will end its graphs at THD RoPE calls, as without the overlay: %s: %s",
            type(error).__name__,
            error,
        )


def _fits_the_schema(
    t: object,
    freqs: object,
    start_positions: object,
    _: object,
    interleaved: object,
    cu_seqlens: object,
    cp_size: object,
    cp_rank: object,
) -> bool:
    return (
        isinstance(t, torch.Tensor)
        and isinstance(freqs, torch.Tensor)
        and (start_positions is None or isinstance(start_positions, torch.Tensor))
        and (cu_seqlens is None or isinstance(cu_seqlens, torch.Tensor))
        and isinstance(interleaved, bool)
        and isinstance(cp_size, int)
        and isinstance(cp_rank, int)
    )
