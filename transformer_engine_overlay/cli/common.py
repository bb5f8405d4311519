# SPDX-License-Identifier: Apache-2.0
"""What the commands share: console, device choice, refusals, output files, option spreading."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import typer
import typer.core
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from transformer_engine_overlay import OverlayError, _native, enable, status

# Names of files and devices come as they are: brackets in them are no markup, colons no emoji.
new_console = partial(Console, markup=False, emoji=False)
console = new_console()

# A mismatch is 1; a command line or a machine that cannot run the job is 2.
EXIT_MISMATCH = 1
EXIT_USAGE = 2

MAX_TABLE_WIDTH = 1000  # in characters; none of ours is as wide


class DeviceChoice(str, Enum):
    """Where to run."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class SpreadCommand(typer.core.TyperCommand):
    """A command whose repeatable options take several values: ``--cp-size 1 2 4 8``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat the name of such an option before each further value."""
        repeatable = {
            name
            for parameter in self.params
            if getattr(parameter, "multiple", False)
            for name in parameter.opts
        }
        spread: list[str] = []
        current = None
        expects_value = False
        for arg in args:
            if arg.startswith("-"):
                current = arg if arg in repeatable else None
                expects_value = current is not None
            elif current is not None and not expects_value:
                spread.append(current)
            else:
                expects_value = False
            spread.append(arg)
        return super().parse_args(ctx, spread)


def refuse(message: str) -> NoReturn:
    """End the command with a message and exit status 2."""
    new_console(stderr=True).print(
        f"te-overlay: {message}", style="red", highlight=False, soft_wrap=True
    )
    raise typer.Exit(EXIT_USAGE)


def select_device(choice: DeviceChoice) -> torch.device:
    """Turn the choice into a device that works, or end with the reason why there is none."""
    usable = _native.WITH_CUDA and torch.cuda.is_available()
    if choice is DeviceChoice.CPU or (choice is DeviceChoice.AUTO and not usable):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        refuse(f"a CUDA device is needed, but torch {torch.__version__} sees none")
    if not _native.WITH_CUDA:
        refuse("a CUDA device was asked for, but the package was built without CUDA; reinstall it")
    complaint = _native.driver_complaint(*_native.cuda_versions())
    if complaint:
        refuse(complaint)
    return torch.device("cuda", torch.cuda.current_device())


def enable_or_refuse() -> None:
    """Enable the overlay, or end with the reason why it cannot be."""
    try:
        enable(strict=True)
    except OverlayError as error:
        refuse(str(error))
    if library := status().library:
        refuse(
            f"TransformerEngine's core library is patched with {library}, so that nothing is "
            "routed; compare its paths with tests/pytorch/test_fused_rope_thd_token_linear.py and "
            "benchmarks/benchmark_thd_rope.py of the patched tree"
        )


def check_writable(option: str, path: Path | None) -> None:
    """End the command, before it works for long, if a file could not be written."""
    if path is None:
        return
    existed = path.exists()
    try:
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        refuse(f"{option} {path}: the file cannot be written: {error.strerror}")
    if not existed:
        path.unlink()


def print_facts(facts: Mapping[str, str]) -> None:
    """Print names and values in two columns."""
    for name, text in facts.items():
        console.print(f"{name:>26}  {text}", highlight=False, soft_wrap=True)


def print_table(table: Table) -> None:
    """Print a table whole: where the terminal is narrow its lines go on, and no number is cut."""
    options = console.options.update(max_width=MAX_TABLE_WIDTH)
    needed = console.measure(table, options=options).maximum
    new_console(width=max(console.width, needed)).print(table)


def new_progress() -> Progress:
    """Return a progress bar with a count and the time."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )
