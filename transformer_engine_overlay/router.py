# SPDX-License-Identifier: Apache-2.0
"""The functions that stand in for TransformerEngine's fused RoPE: route a call, or pass it on."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from transformer_engine_overlay import _native, checks
from transformer_engine_overlay.thd import rotate_checked


class RouterState:
    """What all routed functions of an installation share.

    Attributes
    ----------
    switch : RouterSwitch
        ``active = False`` makes each of them pass every call on: how a function is switched off
        that somebody else's patch still holds.
    unsupported : str
        Why this build cannot run on the GPU or driver, once that is known.
    """

    def __init__(self) -> None:
        self.switch = _native.RouterSwitch()
        self.unsupported = ""

    @property
    def active(self) -> bool:
        """Whether calls are routed."""
        return self.switch.active

    @active.setter
    def active(self, value: bool) -> None:
        self.switch.active = value

    def give_up(self, reason: str) -> None:
        """Leave all calls to TransformerEngine from now on, and say so once."""
        self.active = False
        if self.unsupported:  # by another thread, whose call was under way as well
            return
        self.unsupported = reason
        warnings.warn(
            f"THD RoPE stays with TransformerEngine's own kernels: {reason}",
            RuntimeWarning,
            stacklevel=4,
        )


def make_routed(
    original: Callable[..., torch.Tensor], transpose: bool, thd_format: object, state: RouterState
) -> Callable[..., torch.Tensor]:
    """Make the replacement of ``fused_rope_forward``, or of ``fused_rope_backward``.

    Parameters
    ----------
    original : callable
        TransformerEngine's function.
    transpose : bool
        True for the backward function.
    thd_format : object
        The enumerator ``NVTE_QKV_Format.NVTE_THD``.
    state : RouterState
        Shared switch.

    Returns
    -------
    callable
        Takes what `original` takes. Calls in THD that the kernels cover go to them, but with
        ``NVTE_FUSED_ROPE_THD_TOKEN_LINEAR=0``; all others go to `original` as they came, and its
        errors come back as they are. A builtin, as `original` is one.
    """
    name = "output_grads" if transpose else "input"  # TransformerEngine's words

    def prepare(*args: Any) -> torch.Tensor:
        """Take a THD call that is not plain, or any that may have to be checked."""
        if is_left_to_stock(*args):
            _native.count_passed_through()
            return original(*args)
        t, freqs, start_positions, _, interleaved, cu_seqlens, cp_size, cp_rank = args
        try:
            return rotate_checked(
                name,
                *(t, freqs, cu_seqlens, start_positions, interleaved, cp_size, cp_rank),
                transpose,
                routed=True,
            )
        except _native.UnsupportedDeviceError as error:
            state.give_up(str(error))
        _native.count_passed_through()
        return original(*args)

    routed: Callable[..., torch.Tensor] = _native.make_routed(
        original, prepare, state.give_up, thd_format, state.switch, transpose
    )
    return routed


def is_left_to_stock(
    t: object,
    freqs: object,
    start_positions: object,
    qkv_format: object,
    interleaved: object,
    cu_seqlens: object,
    cp_size: object,
    cp_rank: object,
) -> bool:
    """Tell whether a THD call that is not plain belongs to TransformerEngine.

    Returns
    -------
    bool
        True if TransformerEngine refuses the call too, so that its error is the one to see, or if
        the kernels do not cover it. False if TransformerEngine would read or write out of bounds.
    """
    tensors = (t, freqs, cu_seqlens)
    if not all(isinstance(x, torch.Tensor) for x in tensors):
        return True
    if not isinstance(start_positions, (torch.Tensor, type(None))):
        return True
    if not all(isinstance(x, int) for x in (interleaved, cp_size, cp_rank)):
        return True
    assert isinstance(t, torch.Tensor)
    assert isinstance(freqs, torch.Tensor)
    assert isinstance(cu_seqlens, torch.Tensor)
    assert isinstance(cp_size, int)
    assert isinstance(cp_rank, int)
    not_covered = (
        t.dtype not in checks.DTYPES
        or max(t.shape[1:], default=0) > _native.MAX_ROW_EXTENT
        or (cp_size == 1 and cp_rank != 0)  # TransformerEngine does not look at the rank then
        or not all(-(2**31) <= x < 2**31 for x in (cp_size, cp_rank))
    )
    refused = (
        t.dim() != 3
        or freqs.dim() != 4
        or freqs.shape[1] != 1
        or freqs.shape[2] != 1
        or freqs.dtype != torch.float32
        or freqs.shape[3] > t.shape[2]
        or cu_seqlens.dim() != 1
        or (start_positions is not None and start_positions.dim() != 1)
    )
    return not_covered or refused
