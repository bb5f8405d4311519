# SPDX-License-Identifier: Apache-2.0
"""`te-overlay verify`: the main job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich import box
from rich.table import Table

from transformer_engine_overlay import environment, results, verify, verify_te
from transformer_engine_overlay.cases import Case
from transformer_engine_overlay.cli.common import (
    EXIT_MISMATCH,
    DeviceChoice,
    SpreadCommand,
    check_writable,
    console,
    enable_or_refuse,
    new_progress,
    print_facts,
    print_table,
    select_device,
)

# cases and tokens of a global batch, by device type
FULL = {"cpu": (6, 4096), "cuda": (16, 16384)}
QUICK = {"cpu": (2, 512), "cuda": (2, 1024)}


class DtypeChoice(str, Enum):
    """Element type of the rotated tensor."""

    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class Against(str, Enum):
    """What the kernels are compared with."""

    ORACLE = "oracle"
    TE = "te"


@dataclass(frozen=True)
class Job:
    """What a command line asks for."""

    device: torch.device
    against: Against
    dtypes: Sequence[torch.dtype]
    cp_sizes: Sequence[int]
    cases: Sequence[int]
    seed: int
    tokens: int
    quick: bool

    def run(self) -> verify.Report:
        """Run it under a progress bar."""
        comparison = verify_te.COMPARISON if self.against is Against.TE else verify.BOTH_PATHS
        with new_progress() as progress:
            total = len(self.dtypes) * len(self.cp_sizes) * len(self.cases)
            task = progress.add_task("", total=total)
            progress.advance(task, -1)  # each call says what begins

            def on_progress(text: str) -> None:
                progress.update(task, advance=1, description=text)

            report = verify.run(
                *(self.device, self.dtypes, self.cp_sizes, self.cases, self.seed, self.tokens),
                comparison,
                on_progress,
            )
            progress.update(task, completed=total, description="done")
        return report

    def command(self, case: Case) -> str:
        """Return the command that runs one of its cases alone."""
        parts = [
            f"te-overlay verify --device {self.device.type}",
            *(["--against te"] if self.against is Against.TE else []),
            f"--dtype {verify.dtype_name(case.dtype)} --cp-size {case.cp_size}",
            f"--seed {self.seed} --case {case.index}",
            *(["--quick"] if self.quick else []),
        ]
        return " ".join(parts)


PROOF = {
    Against.ORACLE: "the paths agree bit for bit, match the float64 oracle, and the ranks "
    "reassemble to cp_size 1 bit for bit",
    Against.TE: "routed calls give the bits of stock TransformerEngine in every valid row",
}


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("verify", cls=SpreadCommand)(verify_command)


def verify_command(
    device: Annotated[
        DeviceChoice, typer.Option(help="auto: the GPU if there is one.")
    ] = DeviceChoice.AUTO,
    against: Annotated[
        Against, typer.Option(help="te: stock TransformerEngine against routed calls.")
    ] = Against.ORACLE,
    cp_size: Annotated[
        list[int] | None,
        typer.Option(help="Context-parallel sizes; each with all its ranks.", min=1, max=1024),
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
    csv_file: Annotated[
        Path | None, typer.Option("--csv", help="Write the table to this file.")
    ] = None,
) -> None:
    """Run both paths over realistic packed batches and compare them bit for bit.

    Each case goes through the legacy grid and the token-linear path, forward and backward, at every
    rank of every context-parallel size. The paths must agree bit for bit, match a float64 oracle,
    and the ranks put together must equal the result of cp_size 1 bit for bit.
    """
    check_writable("--json", json_file)
    check_writable("--csv", csv_file)
    if against is Against.TE:
        target = select_device(DeviceChoice.CUDA)
        enable_or_refuse()
    else:
        target = select_device(device)
    cases, tokens = (QUICK if quick else FULL)[target.type]
    job = Job(
        device=target,
        against=against,
        dtypes=[verify.DTYPES[d.value] for d in dtype or list(DtypeChoice)],
        cp_sizes=cp_size or verify.CP_SIZES,
        cases=case or range(cases),
        seed=seed,
        tokens=tokens,
        quick=quick,
    )
    facts = environment.describe(target)
    print_facts(facts)
    report = job.run()
    print_table(report_table(report, target))
    print_verdict(report, job)
    if json_file is not None:
        results.write_json(json_file, facts, {"seed": seed, **report.to_json()})
    if csv_file is not None:
        results.write_csv(csv_file, facts, [row.to_json() for row in report.rows])
    if report.failed:
        raise typer.Exit(EXIT_MISMATCH)


def report_table(report: verify.Report, device: torch.device) -> Table:
    """Lay the report out: blocks where they were counted, milliseconds, checks that passed."""
    names = {"legacy_grid": "legacy", "token_linear": "token-linear"}
    providers = list(report.rows[0].paths)
    counted = [p for p in providers if any(row.paths[p].blocks for row in report.rows)]
    title = f"{' and '.join(names.get(p, p) for p in providers)} on {device}, forward and backward"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("dtype")
    headings = [f"{names.get(p, p)}\nblocks" for p in counted]
    headings += [f"{names.get(p, p)}\nms" for p in providers]
    for heading in ("cp_size", *headings, "passed"):
        table.add_column(heading, justify="right")
    for row in report.rows:
        table.add_row(
            row.dtype,
            str(row.cp_size),
            *(f"{row.paths[p].blocks:,}" for p in counted),
            *(f"{row.paths[p].seconds * 1e3:.1f}" for p in providers),
            f"{row.passed}/{row.passed + row.failed}",
            style="red" if row.failed else None,
        )
    return table


def print_verdict(report: verify.Report, job: Job) -> None:
    """Print the one line that counts, after the smallest failing case if there is one."""
    if not report.failed:
        console.print(
            f"PASS: {report.passed} checks on {job.device}: {PROOF[job.against]}",
            style="bold green",
            highlight=False,
            soft_wrap=True,
        )
        return
    failure = report.smallest_failure()
    console.print(f"smallest failing case, at cp_rank {failure.cp_rank}: {failure.what}")
    console.print(f"  {failure.case.traits()}", highlight=False)
    console.print(f"  {job.command(failure.case)}", highlight=False, soft_wrap=True)
    console.print(
        f"FAIL: {report.failed} of {report.failed + report.passed} checks on {job.device}",
        style="bold red",
        highlight=False,
    )
