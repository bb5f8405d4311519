# SPDX-License-Identifier: Apache-2.0
"""Say what a kernel met in its metadata: read at a later call, without a synchronisation."""

from __future__ import annotations

import atexit
import os
import traceback
import warnings

import torch

from transformer_engine_overlay import _native

VARIABLE = "TE_OVERLAY_ON_FAULT"
POLICIES = ("warn", "raise", "ignore")

# FaultKind in common/fused_rope/thd_fault.h
POSITION, BOUNDARY, BEFORE, DISORDER = 1, 2, 3, 4


class PackingError(RuntimeError):
    """Packing metadata does not fit the tensors, as a kernel found."""


def policy() -> str:
    """Return what ``TE_OVERLAY_ON_FAULT`` asks for.

    Raises
    ------
    ValueError
        For a value that asks for nothing.
    """
    value = os.environ.get(VARIABLE, POLICIES[0])
    if value not in POLICIES:
        raise ValueError(f"{VARIABLE} is {value!r}; it must be warn, raise, ignore or unset (warn)")
    return value


def report(
    device: int, kind: int, sequence: int, value: int, limit: int, cp_size: int, cp_rank: int
) -> None:
    """Report the first fault of a device as ``TE_OVERLAY_ON_FAULT`` asks for.

    Parameters
    ----------
    device : int
        CUDA device index, or -1 for the CPU backend.
    kind : int
        One of the constants of this module.
    sequence : int
        The sequence in which it was met.
    value, limit : int
        Position and table length; boundary and what it must be a multiple of; row and first row.
    cp_size, cp_rank : int
        Of the call.

    Raises
    ------
    PackingError
        With ``raise``.
    ValueError
        For a policy that there is not; it names the fault as well, which is told only once.
    """
    where = "the CPU" if device < 0 else f"cuda:{device}"
    when = "a THD RoPE call" if device < 0 else "an earlier THD RoPE call"
    message = (
        f"{when} on {where} met wrong packing: "
        f"{describe(kind, sequence, value, limit, cp_size, cp_rank)} Only the first fault of a "
        f"device is reported; TE_OVERLAY_CHECK=1 checks each call before it runs."
    )
    try:
        chosen = policy()
    except ValueError as error:
        raise ValueError(f"{error}. It was read because {message}") from None
    if chosen == "ignore":
        return
    if chosen == "raise":
        raise PackingError(message)
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def describe(kind: int, sequence: int, value: int, limit: int, cp_size: int, cp_rank: int) -> str:
    """Put a fault and its likely cause into words."""
    rank = f" (cp_rank {cp_rank} of cp_size {cp_size})" if cp_size > 1 else ""
    if kind == POSITION:
        return (
            f"sequence {sequence} has a token at position {value}{rank}, and freqs has {limit} "
            "rows; the row was set to zeros. Likely causes: a table shorter than the longest "
            "sequence, start_positions that lead beyond it, or the lengths of another batch."
        )
    if kind == BOUNDARY:
        return (
            f"boundary {value} of sequence {sequence} is not divisible by 2 * cp_size = {limit}"
            f"{rank}; positions are TransformerEngine's for that case. Likely cause: cu_seqlens "
            f"unpadded with cp_size={cp_size}; pass the padded boundaries."
        )
    if kind == BEFORE:
        return (
            f"row {value} lies before the first boundary, local row {limit}{rank}; it was set to "
            "zeros. Likely cause: cu_seqlens that does not begin with 0."
        )
    return (
        f"the boundaries decrease near sequence {sequence}{rank}. Likely cause: lengths passed "
        "where boundaries are expected, or memory that was overwritten."
    )


# Whether CUDA was in use in the process that forks.
_cuda_in_use = False


def _report_at_exit() -> None:
    """Report what no call has found. An error is printed, and does not hide another device's."""
    while True:
        try:
            _native.report_faults()
        except Exception:  # each takes the fault of one device along
            traceback.print_exc()
        else:
            return


def _before_fork() -> None:
    global _cuda_in_use
    _cuda_in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _after_fork_in_child() -> None:
    """Leave the records of devices to the parent: the child has no CUDA, and maybe not its memory.

    One that starts CUDA by itself, which it can if its parent has not, reports as any process does.
    """
    if _cuda_in_use:
        atexit.unregister(_report_at_exit)


atexit.register(_report_at_exit)
os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
