# SPDX-License-Identifier: Apache-2.0
"""The command `te-overlay`."""

from __future__ import annotations

import json
import shlex
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import typer.core
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from transformer_engine_overlay import __version__, _native, environment, verify

app = typer.Typer(
    help="Token-linear rotary position embedding for packed (THD) batches.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
console = Console()

# A mismatch is 1; a command line or a machine that cannot run the job is 2.
EXIT_MISMATCH = 1
EXIT_USAGE = 2

# cases and tokens of a global batch, by device type
FULL = {"cpu": (6, 4096), "cuda": (12, 16384)}
QUICK = {"cpu": (2, 512), "cuda": (2, 1024)}


class DeviceChoice(str, Enum):
    """Where to run."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class DtypeChoice(str, Enum):
    """Element type of the rotated tensor."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


def main() -> None:
    """Entry point of `te-overlay`."""
    app(prog_name="te-overlay")


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        console.print(f"transformer-engine-overlay {__version__}", highlight=False)
        raise typer.Exit


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


@app.command("verify", cls=SpreadCommand)
def verify_command(
    device: Annotated[
        DeviceChoice, typer.Option(help="auto: the GPU if there is one.")
    ] = DeviceChoice.AUTO,
    cp_size: Annotated[
        list[int] | None,
        typer.Option(help="Context-parallel sizes; each with all its ranks.", min=1),
    ] = None,
    dtype: Annotated[list[DtypeChoice] | None, typer.Option(help="Element types.")] = None,
    quick: Annotated[bool, typer.Option(help="Fewer and smaller cases.")] = False,
    seed: Annotated[
        int, typer.Option(help="What the cases are drawn from.", min=0, max=2**31 - 1)
    ] = 0,
    case: Annotated[
        list[int] | None, typer.Option(help="Run these cases only.", min=0, max=2**31 - 1)
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the report to this file.")
    ] = None,
) -> None:
    """Run both paths over realistic packed batches and compare them bit for bit.

    Each case goes through the legacy grid and the token-linear path, forward and backward, at every
    rank of every context-parallel size. The paths must agree bit for bit, match a float64 oracle,
    and the ranks put together must equal the result of cp_size 1 bit for bit.
    """
    target = _select_device(device)
    cases, tokens = (QUICK if quick else FULL)[target.type]
    indices = list(case) if case else list(range(cases))
    sizes = list(cp_size) if cp_size else list(verify.CP_SIZES)
    if json_file is not None and not json_file.parent.is_dir():
        _refuse(f"--json {json_file}: there is no folder {json_file.parent}")
    dtypes = [verify.DTYPES[d.value] for d in dtype or list(DtypeChoice)]
    facts = environment.describe(target)
    for name, text in facts.items():
        console.print(f"{name:>26}  {text}", highlight=False)

    with _progress() as progress:
        task = progress.add_task("", total=len(dtypes) * len(sizes) * len(indices))
        started = -1

        def on_progress(text: str) -> None:
            nonlocal started
            started += 1
            progress.update(task, completed=started, description=text)

        report = verify.run(target, dtypes, sizes, indices, seed, tokens, on_progress)
        progress.update(task, completed=started + 1, description="done")

    console.print(_report_table(report, target))
    if json_file is not None:
        command = shlex.join(["te-overlay", *sys.argv[1:]])
        content = {"command": command, "environment": facts, "seed": seed, **report.to_json()}
        json_file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _print_verdict(report, target, seed, quick)
    if report.failed:
        raise typer.Exit(EXIT_MISMATCH)


def _select_device(choice: DeviceChoice) -> torch.device:
    """Turn the choice into a device that works, or end with the reason why there is none."""
    usable = _native.WITH_CUDA and torch.cuda.is_available()
    if choice is DeviceChoice.CPU or (choice is DeviceChoice.AUTO and not usable):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        _refuse(f"--device cuda: torch {torch.__version__} sees no CUDA device")
    if not _native.WITH_CUDA:
        _refuse("--device cuda: the package was built without CUDA; reinstall it from source")
    complaint = _native.driver_complaint(*_native.cuda_versions())
    if complaint:
        _refuse(f"--device cuda: {complaint}")
    return torch.device("cuda", torch.cuda.current_device())


def _refuse(message: str) -> None:
    Console(stderr=True).print(f"te-overlay: {message}", style="red", highlight=False)
    raise typer.Exit(EXIT_USAGE)


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
    )


def _report_table(report: verify.Report, device: torch.device) -> Table:
    title = f"both paths on {device}, forward and backward"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("dtype")
    for heading in (
        "cp_size",
        "legacy\nblocks",
        "token-linear\nblocks",
        "legacy\nms",
        "token-linear\nms",
        "passed",
    ):
        table.add_column(heading, justify="right")
    for row in report.rows:
        legacy, linear = row.paths["legacy_grid"], row.paths["token_linear"]
        table.add_row(
            row.dtype,
            str(row.cp_size),
            f"{legacy.blocks:,}",
            f"{linear.blocks:,}",
            f"{legacy.seconds * 1e3:.1f}",
            f"{linear.seconds * 1e3:.1f}",
            f"{row.passed}/{row.passed + row.failed}",
            style="red" if row.failed else None,
        )
    return table


def _print_verdict(report: verify.Report, device: torch.device, seed: int, quick: bool) -> None:
    if not report.failed:
        console.print(
            f"PASS: {report.passed} checks on {device}: the paths agree bit for bit, match the "
            "float64 oracle, and the ranks reassemble to cp_size 1 bit for bit",
            style="bold green",
            highlight=False,
            soft_wrap=True,
        )
        return
    failure = report.smallest_failure()
    case = failure.case
    command = (
        f"te-overlay verify --device {device.type} --dtype {verify.dtype_name(case.dtype)} "
        f"--cp-size {case.cp_size} --seed {seed} --case {case.index}{' --quick' if quick else ''}"
    )
    console.print(f"smallest failing case, at cp_rank {failure.cp_rank}: {failure.what}")
    console.print(f"  {case.traits()}", highlight=False)
    console.print(f"  {command}", highlight=False, soft_wrap=True)
    console.print(
        f"FAIL: {report.failed} of {report.failed + report.passed} checks on {device}",
        style="bold red",
        highlight=False,
    )
