# SPDX-License-Identifier: Apache-2.0
"""The main job's cases against an installed TransformerEngine: stock object against routed call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from transformer_engine_overlay import gate, patching
from transformer_engine_overlay.cases import Batch
from transformer_engine_overlay.environment import forced_path
from transformer_engine_overlay.thd import path_counts
from transformer_engine_overlay.verify import (
    DIRECTIONS,
    Comparison,
    Failure,
    Row,
    same_bits,
    timed,
)

STOCK, ROUTED = "stock", "routed"
FUNCTIONS = {"forward": "fused_rope_forward", "backward": "fused_rope_backward"}


def check_case(batch: Batch, row: Row) -> Iterator[Failure]:
    """Yield each rank and direction in which a routed call differs from stock in a valid row.

    Both the automatic choice and the forced token-linear path are compared. The overlay must be
    enabled.

    Raises
    ------
    RuntimeError
        If a call that must be routed was not.
    """
    case = batch.case
    for cp_rank in range(case.cp_size):
        for direction in DIRECTIONS:
            packed = batch.grad_output if direction == "backward" else batch.t
            local = batch.local(packed, cp_rank)
            arguments = _arguments(batch, local, cp_rank)
            # Stock leaves the tail rows as they were.
            valid = local.shape[0] - case.tail_rows
            expected = _run(STOCK, patching.original(FUNCTIONS[direction]), arguments, row)
            with forced_path("1"):
                forced = _run_routed(direction, arguments, row)
            with forced_path(None):
                automatic = _run_routed(direction, arguments, row)
            for name, result in (("token-linear", forced), ("automatic", automatic)):
                if not same_bits(result[:valid], expected[:valid]):
                    what = f"{direction}: {name} differs from stock TransformerEngine in a bit"
                    yield Failure(case, cp_rank, what)


# Stock launches are not counted, so that stock has no blocks.
COMPARISON = Comparison((STOCK, ROUTED), check_case)


def _arguments(batch: Batch, local: torch.Tensor, cp_rank: int) -> tuple[Any, ...]:
    return (
        local,
        batch.freqs,
        batch.start_positions,
        gate.thd_format(gate.import_extension()),
        batch.case.interleaved,
        batch.cu_seqlens,
        batch.case.cp_size,
        cp_rank,
    )


def _run(
    provider: str, function: Callable[..., torch.Tensor], arguments: tuple[Any, ...], row: Row
) -> torch.Tensor:
    result, seconds = timed(lambda: function(*arguments), arguments[0].device)
    row.paths[provider].seconds += seconds
    return result


def _run_routed(direction: str, arguments: tuple[Any, ...], row: Row) -> torch.Tensor:
    function = getattr(gate.import_extension(), FUNCTIONS[direction])
    before = path_counts()
    result = _run(ROUTED, function, arguments, row)
    after = path_counts()
    if sum(after[p]["routed"] - before[p]["routed"] for p in after) != 1:
        raise RuntimeError(f"a call of {FUNCTIONS[direction]} was not routed")
    row.paths[ROUTED].blocks += sum(after[p]["blocks"] - before[p]["blocks"] for p in after)
    return result
