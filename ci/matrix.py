#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The context-parallel matrix: every cp_rank of every cp_size is a cell that can be run alone.

    python ci/matrix.py list --select cp_size=4
    python ci/matrix.py json --by device,cp_size,cp_rank
    python ci/matrix.py run --select cp_size=4,cp_rank=3 -j 2

ci/matrix.toml names the axes. A cell runs the cases of tests/ that are parametrised by its cp_size
and cp_rank, and fails if it has none or if one is skipped. `run` ends in a grid of pass counts. A
failing cell makes the exit status 1, and the command that runs it again is printed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
import time
import xml.etree.ElementTree
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings this one
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
AXES = ("device", "te", "cp_size", "cp_rank", "dtype")
NO_TE = "none"
TIMEOUT_S = 900  # of a cell: a wrong kernel may hang
PASSED, FAILED = 0, 1
Values = dict[str, list[str]]


@dataclass(frozen=True)
class Cell:
    """A point of the matrix."""

    device: str
    te: str
    cp_size: int
    cp_rank: int
    dtype: str

    def value(self, axis: str) -> str:
        return str(getattr(self, axis))

    def select(self, axes: Iterable[str] = AXES) -> str:
        """What `--select` takes for it; also its name."""
        return ",".join(f"{axis}={self.value(axis)}" for axis in axes)

    @property
    def file_name(self) -> str:
        return "-".join(map(self.value, AXES))

    def pytest_arguments(self, root: str = "") -> list[str]:
        tests, te = f"{root}tests", f"{root}tests/te"
        paths = [tests, f"--ignore={te}"] if self.te == NO_TE else [te]
        options = {"size": self.cp_size, "rank": self.cp_rank, "dtype": self.dtype}
        named = [part for name, value in options.items() for part in (f"--cp-{name}", str(value))]
        return [*paths, *named, "--cp-device", self.device]

    def environment(self) -> dict[str, str]:
        """Variables that make a test fail which could not run, instead of being skipped."""
        variables = {"TE_OVERLAY_REQUIRE_GPU": "1"} if self.device == "cuda" else {}
        return variables if self.te == NO_TE else {**variables, "TE_OVERLAY_REQUIRE_TE": self.te}

    def command(self) -> str:
        """The command that runs it again, in the root of the checkout."""
        variables = [f"{name}={value}" for name, value in self.environment().items()]
        return shlex.join([*variables, "pytest", *self.pytest_arguments()])


@dataclass(frozen=True)
class Outcome:
    """What pytest said of a cell."""

    cell: Cell
    status: int
    passed: int
    failed: int
    skipped: int
    seconds: float
    output: str

    @property
    def is_good(self) -> bool:
        return not (self.status or self.failed or self.skipped) and self.passed > 0

    def text(self) -> str:
        """Its entry in the grid."""
        if self.is_good:
            return str(self.passed)
        total = self.passed + self.failed + self.skipped
        return f"{self.passed} of {total}" if total else "no case"


def all_cells() -> list[Cell]:
    axes = tomllib.loads((ROOT / "ci" / "matrix.toml").read_text(encoding="utf-8"))
    return [
        Cell(device, te, cp_size, cp_rank, dtype)
        for device, releases in axes["te"].items()
        for te in releases
        for cp_size in axes["cp_size"]
        for cp_rank in range(cp_size)
        for dtype in axes["dtype"]
    ]


def parse_selection(texts: Sequence[str], cells: Sequence[Cell]) -> Values:
    """Read `cp_size=4,cp_rank=3`; several values of an axis are alternatives."""
    wanted: Values = {}
    for part in ",".join(texts).split(",") if texts else ():
        axis, _, value = part.partition("=")
        if axis not in AXES:
            raise ValueError(f"--select {part}: the axis must be one of {', '.join(AXES)}")
        known = list(dict.fromkeys(cell.value(axis) for cell in cells))
        if value not in known:
            raise ValueError(f"--select {part}: {axis} must be one of {', '.join(known)}")
        wanted.setdefault(axis, []).append(value)
    return wanted


def selected(cells: Sequence[Cell], wanted: Values) -> list[Cell]:
    found = [c for c in cells if all(c.value(axis) in values for axis, values in wanted.items())]
    if not found:
        asked = ",".join(f"{axis}={value}" for axis, some in wanted.items() for value in some)
        raise ValueError(f"--select {asked}: no cell of the matrix is that")
    return found


def of_this_machine() -> Values:
    """What `run` takes where the selection names no device, or no TransformerEngine."""
    import torch

    releases = [NO_TE]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        releases.append(importlib.metadata.version("transformer_engine").partition("+")[0])
    return {"device": ["cpu"] + ["cuda"] * torch.cuda.is_available(), "te": releases}


def grouped(cells: Sequence[Cell], axes: Sequence[str]) -> list[dict[str, str]]:
    """Jobs for a CI service: one for each combination of values of `axes` that has a cell."""
    selections = dict.fromkeys(cell.select(axes) for cell in cells)
    jobs = [dict(part.split("=") for part in selection.split(",")) for selection in selections]
    return [{**job, "select": text} for job, text in zip(jobs, selections, strict=True)]


def run_cell(cell: Cell, workers: int, folder: Path, threads: int) -> Outcome:
    report = folder.resolve() / f"{cell.file_name}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", *cell.pytest_arguments(f"{ROOT}/"), "-q"]
    # Of cells that run at once, none may change the cache of another.
    command += ["-n", str(workers), f"--junitxml={report}", "-p", "no:cacheprovider"]
    begin = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT / "tests",  # in the root, the source folder would hide the installed package
            env={"OMP_NUM_THREADS": str(threads), **os.environ, **cell.environment()},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired:
        status, output = FAILED, f"not done after {TIMEOUT_S} s"
    counts = read_counts(report)
    return Outcome(cell, status, *counts, time.perf_counter() - begin, output)


def read_counts(report: Path) -> tuple[int, int, int]:
    """Passed, failed and skipped cases in a JUnit report; zeros where there is none."""
    if not report.exists():
        return 0, 0, 0
    counts = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in xml.etree.ElementTree.parse(report).iter("testsuite"):
        for name in counts:
            counts[name] += int(suite.get(name, 0))
    failed = counts["failures"] + counts["errors"]
    return counts["tests"] - failed - counts["skipped"], failed, counts["skipped"]


def run_cells(
    cells: Sequence[Cell], jobs: int, workers: int | None, folder: Path
) -> Iterator[Outcome]:
    """Run `jobs` cells at a time; yields each when it is done."""
    folder.mkdir(parents=True, exist_ok=True)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    share = max(1, (cores or 1) // jobs)
    if workers is None:
        workers = share if share > 1 else 0  # one worker would only import torch once more
    threads = max(1, share // max(1, workers))
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(run_cell, cell, workers, folder, threads) for cell in cells]
        for future in as_completed(running):
            yield future.result()


def grid(outcomes: Sequence[Outcome]) -> list[list[str]]:
    """Pass counts: a line for each device, TransformerEngine, dtype and size, a column a rank."""
    by_cell = {outcome.cell: outcome for outcome in outcomes}
    ranks = range(max(cell.cp_rank for cell in by_cell) + 1)
    lines = [["device", "TE", "dtype", "cp_size", *(f"rank {rank}" for rank in ranks)]]
    heads = sorted(by_cell, key=all_cells().index)
    for head in dict.fromkeys((c.device, c.te, c.dtype, c.cp_size) for c in heads):
        device, te, dtype, cp_size = head
        cells = [Cell(device, te, cp_size, rank, dtype) for rank in ranks]
        texts = [by_cell[cell].text() if cell in by_cell else "" for cell in cells]
        lines.append([device, te, dtype, str(cp_size), *texts])
    return lines


def markdown(lines: Sequence[Sequence[str]]) -> str:
    rows = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([rows[0], f"|{'---|' * len(lines[0])}", *rows[1:]])


def print_grid(lines: Sequence[Sequence[str]]) -> None:
    """As a table on a terminal, else as Markdown."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        print(markdown(lines))
        return
    table = Table(title="cases passed", box=box.SIMPLE_HEAD, pad_edge=False)
    for column, name in enumerate(lines[0]):
        table.add_column(name, justify="left" if column < 3 else "right")
    for line in lines[1:]:
        bad = any(text and not text.isdigit() for text in line[4:])
        table.add_row(*line, style="red" if bad else None)
    console.print(table)


def run(cells: Sequence[Cell], options: argparse.Namespace) -> int:
    outcomes: list[Outcome] = []
    begin = time.perf_counter()
    for outcome in run_cells(cells, options.jobs, options.workers, options.junit):
        outcomes.append(outcome)
        sign = "ok  " if outcome.is_good else "FAIL"
        place = f"[{len(outcomes)}/{len(cells)}]"
        print(place, sign, outcome.cell.select(), f"{outcome.text()}, {outcome.seconds:.1f} s")
        sys.stdout.flush()
    lines = grid(outcomes)
    print_grid(lines)
    bad = [outcome for outcome in outcomes if not outcome.is_good]
    for outcome in bad:
        print(f"\n{outcome.cell.select()}: {outcome.text()} passed; the end of its output:")
        print("\n".join(outcome.output.rstrip().splitlines()[-40:]))
        print(f"to run it again: {outcome.cell.command()}")
    passed, failed = sum(o.passed for o in outcomes), sum(o.failed for o in outcomes)
    skipped = sum(o.skipped for o in outcomes)
    verdict = (
        f"{len(cells) - len(bad)} of {len(cells)} cells in {time.perf_counter() - begin:.0f} s"
    )
    totals = f"{passed} passed, {failed} failed, {skipped} skipped"
    print(f"\n{'FAIL' if bad else 'PASS'}: {verdict}\n{totals}")
    if options.summary:
        again = "".join(f"\n- `{outcome.cell.command()}`" for outcome in bad)
        with options.summary.open("a", encoding="utf-8") as file:
            file.write(f"{markdown(lines)}\n\n{verdict}: {totals}{again}\n")
    return FAILED if bad else PASSED


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="print the cells, one a line")
    service = commands.add_parser("json", help="print jobs for a CI service: {include: [...]}")
    service.add_argument(
        "--by", default=",".join(AXES), metavar="AXES", help="one job for each value of these axes"
    )
    runner = commands.add_parser("run", help="run the cells with pytest")
    runner.add_argument("-j", "--jobs", type=int, default=1, help="cells at a time")
    runner.add_argument(
        "-n", "--workers", type=int, help="pytest-xdist workers in a cell (default: cores / jobs)"
    )
    runner.add_argument(
        "--junit", type=Path, default=ROOT / "build" / "matrix", help="folder for JUnit files"
    )
    runner.add_argument("--summary", type=Path, help="append the grid to this file, as Markdown")
    for command in (listing, service, runner):
        command.add_argument(
            "--select", action="append", default=[], metavar="AXIS=VALUE,...", help="these only"
        )
    arguments = parser.parse_args()
    if arguments.command == "run" and arguments.jobs < 1:
        parser.error(f"--jobs is {arguments.jobs}; it must be at least 1")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    cells = all_cells()
    try:
        wanted = parse_selection(arguments.select, cells)
        if arguments.command == "run":
            wanted = {**of_this_machine(), **wanted}
        cells = selected(cells, wanted)
        by = arguments.by.split(",") if arguments.command == "json" else []
        if unknown := set(by) - set(AXES):
            raise ValueError(f"--by names {', '.join(unknown)}; axes are {', '.join(AXES)}")
    except ValueError as error:
        print(f"matrix.py: {error}", file=sys.stderr)
        return 2
    if arguments.command == "run":
        return run(cells, arguments)
    if arguments.command == "json":
        print(json.dumps({"include": grouped(cells, by)}))
    else:
        print("\n".join(cell.select() for cell in cells))
    return PASSED


if __name__ == "__main__":
    sys.exit(main())
