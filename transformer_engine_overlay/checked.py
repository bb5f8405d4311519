# SPDX-License-Identifier: Apache-2.0
"""Checked mode, ``TE_OVERLAY_CHECK=1``: what the metadata of each call says, against its tensors.

Without it the kernels are safe with any metadata, but silent: a row that has no table row is zeros,
and an unpadded context-parallel batch turns by positions that are off. To see such a mistake, the
values of ``cu_seqlens`` and ``start_positions`` have to come to the host, which synchronises with
the GPU at each call; hence a mode of its own.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch

CHECK_VARIABLE = "TE_OVERLAY_CHECK"

# os.environ.get() raises and catches a KeyError for a variable that is not set, at each call half a
# microsecond. The dictionary beneath it does not.
_entries: Mapping[Any, Any] = getattr(os.environ, "_data", os.environ)
_key: Any = CHECK_VARIABLE if _entries is os.environ else os.environ.encodekey(CHECK_VARIABLE)

_warned_of_capture = False


def is_requested() -> bool:
    """Tell whether ``TE_OVERLAY_CHECK`` asks for checks now.

    Raises
    ------
    ValueError
        For a value other than ``0`` and ``1``.
    """
    entry = _entries.get(_key)
    if entry is None:  # the common case: one lookup
        return False
    value = os.fsdecode(entry)
    if value not in ("0", "1"):
        raise ValueError(
            f"{CHECK_VARIABLE} is {value!r}; it must be 1 (check the metadata of each call), 0 or "
            "unset"
        )
    return value == "1"


def check_values(
    name: str,
    t: torch.Tensor,
    freqs: torch.Tensor,
    cu_seqlens: torch.Tensor,
    start_positions: torch.Tensor | None,
    cp_size: int,
    cp_rank: int,
    table_name: str = "freqs",
) -> None:
    """Raise unless every sequence has its rows in the tensor and its positions in the table.

    Synchronises with the GPU, unless a CUDA graph is being captured: then nothing can be looked at,
    and a warning says so once.

    Parameters
    ----------
    name, table_name : str
        What to call `t` and `freqs` in a message.
    t : torch.Tensor
        ``[t, h, d]``; its shape alone is looked at.
    freqs : torch.Tensor
        ``[s, 1, 1, d2]``; its shape alone is looked at.
    cu_seqlens, start_positions, cp_size, cp_rank
        As `checks.normalize` returns them.

    Raises
    ------
    ValueError
        Naming the first sequence at fault, its length, and the numbers that do not fit.
    """
    if t.is_cuda and _is_capturing(t.device):
        _warn_of_capture()
        return
    boundaries = cu_seqlens.to("cpu", torch.int64)
    _check_order(boundaries)
    if cp_size > 1:
        _check_padding(boundaries, cp_size, cp_rank)
    _check_rows(boundaries, name, t.shape[0], cp_size, cp_rank)
    starts = None
    if start_positions is not None:
        starts = start_positions[: len(boundaries) - 1].to("cpu", torch.int64)
    _check_positions(boundaries, starts, table_name, freqs.shape[0], cp_size, cp_rank)


def _check_order(boundaries: torch.Tensor) -> None:
    """Boundaries begin with 0 and do not decrease."""
    first = int(boundaries[0])
    if first != 0:
        raise ValueError(
            f"cu_seqlens[0] is {first}; it must be 0: rows before the first boundary belong to no "
            "sequence. Was cu_seqlens sliced, or made by cumsum without a leading 0?"
        )
    bad = boundaries.diff() < 0
    if bad.any():
        raise ValueError(
            f"{_describe_first(bad, boundaries)}; boundaries must not decrease. Was cu_seqlens "
            "padded with zeros behind its end? Repeat its last boundary instead"
        )


def _check_padding(boundaries: torch.Tensor, cp_size: int, cp_rank: int) -> None:
    """Each boundary can be divided among the ranks, two chunks for each."""
    chunks = 2 * cp_size
    bad = boundaries[1:] % chunks != 0
    if not bad.any():
        return
    i = _first(bad)
    begin, end = boundaries[i] // cp_size, boundaries[i + 1] // cp_size
    share = ""
    if begin == end and boundaries[i] < boundaries[i + 1]:
        share = f", and its share rounds to nothing on cp_rank {cp_rank} and all others"
    raise ValueError(
        f"{_describe_first(bad, boundaries)}; with cp_size={cp_size} each boundary must be "
        f"divisible by 2 * cp_size = {chunks}{share}. Is cu_seqlens unpadded with "
        f"cp_size={cp_size}? Pass the boundaries of the padded batch "
        "(transformer_engine_overlay.packing.padded_cu_seqlens)"
    )


def _check_rows(boundaries: torch.Tensor, name: str, rows: int, cp_size: int, cp_rank: int) -> None:
    """Each sequence's local rows are in the tensor."""
    bad = boundaries[1:] // cp_size > rows
    if not bad.any():
        return
    end = int(boundaries[_first(bad) + 1]) // cp_size
    raise ValueError(
        f"{_describe_first(bad, boundaries)}; its rows go up to {end - 1} on cp_rank {cp_rank} of "
        f"cp_size {cp_size}, but {name} has {rows} rows. It must have at least cu_seqlens[-1] // "
        f"cp_size = {int(boundaries[-1]) // cp_size}: are cu_seqlens and {name} of the same batch?"
    )


def _check_positions(
    boundaries: torch.Tensor,
    starts: torch.Tensor | None,
    table_name: str,
    table_rows: int,
    cp_size: int,
    cp_rank: int,
) -> None:
    """Each position that this rank uses has a row in the table."""
    lengths = boundaries.diff()
    if starts is None:
        starts = torch.zeros_like(lengths)
    held = lengths > 0  # the start of an empty sequence is not used
    bad = held & (starts < 0)
    if bad.any():
        raise ValueError(
            f"{_describe_first(bad, boundaries)}; start_positions[{_first(bad)}] is "
            f"{int(starts[_first(bad)])}, and it must not be negative: {table_name} has rows "
            f"0 to {table_rows - 1}"
        )
    # This rank's second chunk of a sequence, of 2 * cp_size, is cp_rank chunks from the end.
    highest = starts + lengths - 1 - cp_rank * (lengths // (2 * cp_size))
    bad = held & (highest >= table_rows)
    if not bad.any():
        return
    i = _first(bad)
    # The whole batch's, so that the advice is right for all ranks.
    needed = int((starts + lengths)[held].max())
    start = f" with start position {int(starts[i])}" if starts[i] else ""
    hint = ", which is the length of the whole sequences, not of a rank's share" * (cp_size > 1)
    raise ValueError(
        f"{_describe_first(bad, boundaries)}; it uses position {int(highest[i])}{start} on cp_rank "
        f"{cp_rank} of cp_size {cp_size}, but {table_name} has {table_rows} rows. It must have at "
        f"least {needed} for this batch{hint}"
    )


def _first(bad: torch.Tensor) -> int:
    return int(bad.nonzero()[0])


def _describe_first(bad: torch.Tensor, boundaries: torch.Tensor) -> str:
    """Name the first sequence of `bad` by index, length and boundaries, and count the others."""
    i = _first(bad)
    begin, end = int(boundaries[i]), int(boundaries[i + 1])
    others = int(bad.sum()) - 1
    more = f" (and {others} more like it)" if others else ""
    return (
        f"sequence {i}{more} has length {end - begin}, cu_seqlens[{i}] = {begin} to "
        f"cu_seqlens[{i + 1}] = {end}"
    )


def _is_capturing(device: torch.device) -> bool:
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _warn_of_capture() -> None:
    global _warned_of_capture
    if not _warned_of_capture:
        _warned_of_capture = True
        warnings.warn(
            f"{CHECK_VARIABLE}=1 checks nothing while a CUDA graph is captured, as it would have "
            "to synchronise; calls outside of the capture are checked",
            RuntimeWarning,
            stacklevel=4,
        )
