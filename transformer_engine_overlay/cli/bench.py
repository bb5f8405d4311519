# SPDX-License-Identifier: Apache-2.0
"""`te-overlay bench`: kernels on named shapes, host time of a call, time of a whole layer."""

from __future__ import annotations

import csv
import importlib.util
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.table import Table

from transformer_engine_overlay import (
    bench,
    bench_kernel,
    bench_plots,
    bench_points,
    bench_providers,
    environment,
    gate,
    results,
)
from transformer_engine_overlay.cli.common import (
    DeviceChoice,
    SpreadCommand,
    check_writable,
    console,
    enable_or_refuse,
    new_progress,
    print_facts,
    print_table,
    refuse,
    select_device,
)

CsvOption = Annotated[Path | None, typer.Option("--csv", help="Write the table to this file.")]
RoundsOption = Annotated[int, typer.Option(help="Rounds; the median is reported.", min=1)]

# The CPU backend is there for tests; a point of more elements takes seconds a call.
CPU_ELEMENTS = 1 << 21

app = typer.Typer(
    help="Measure the kernels, a call's host time, a whole layer.", no_args_is_help=True
)


def register(parent: typer.Typer) -> None:
    """Add the commands to `parent`."""
    parent.add_typer(app, name="bench")


@app.command("kernel", cls=SpreadCommand)
def kernel_command(
    pattern: Annotated[
        str, typer.Option("--filter", help="Only points whose name this expression is found in.")
    ] = "",
    quick: Annotated[bool, typer.Option(help="A selection, in less than a minute.")] = False,
    list_only: Annotated[bool, typer.Option("--list", help="Print the names, then stop.")] = False,
    provider: Annotated[
        list[str] | None, typer.Option(help="Only these, beside the copy. Repeatable.")
    ] = None,
    device: Annotated[DeviceChoice, typer.Option(help="Where to run.")] = DeviceChoice.AUTO,
    rounds: RoundsOption = 11,
    csv_file: CsvOption = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write it as JSON.")] = None,
) -> None:
    """Time the kernels on named shapes: ours, stock TransformerEngine, a copy of the same bytes.

    Everything that can run here takes part, interleaved. On a GPU: device time with cold caches.
    Without one: the CPU backend's two paths.
    """
    points = bench_points.quick_points() if quick else bench_points.all_points()
    points = _matching(points, pattern)
    if list_only:
        for point in points:
            console.print(point.name, highlight=False)
        return
    if unknown := set(provider or ()) - set(bench_providers.NAMES):
        names = ", ".join(bench_providers.NAMES)
        refuse(f"--provider {sorted(unknown)[0]!r} is none of {names}")
    check_writable("--csv", csv_file)
    check_writable("--json", json_file)
    if csv_file and json_file and csv_file.resolve() == json_file.resolve():
        refuse(f"--csv and --json are both {csv_file}: the second would replace the first")
    where = select_device(device)
    if where.type == "cpu":
        console.print("no GPU in use: these are times of the CPU backend, not of the kernels")
        points = [point for point in points if point.elements <= CPU_ELEMENTS]
        if not points:
            refuse(f"the CPU backend is timed at points of up to {CPU_ELEMENTS} elements alone")
    elif gate.te_version():
        enable_or_refuse()
    facts = environment.describe(where)
    print_facts(facts)
    with _kept(facts, _kernel_table, csv_file, json_file) as rows, new_progress() as progress:
        task = progress.add_task("measuring", total=len(points))
        for group in bench_kernel.kernel_rows(points, where, rounds, provider):
            rows += group
            progress.advance(task)
    if absent := set(provider or ()) - {row.provider for row in rows}:
        console.print(f"not measured, as it cannot run here: {', '.join(sorted(absent))}")


@contextmanager
def _kept(
    facts: dict[str, str],
    tabulate: Callable[[list[Any]], Table],
    csv_file: Path | None,
    json_file: Path | None = None,
) -> Iterator[list[Any]]:
    """Collect rows, print and write them: those of a run that is broken off as well, marked so."""
    rows: list[Any] = []
    try:
        yield rows
    except BaseException as error:
        facts["broken off"] = f"by {type(error).__name__}, after {len(rows)} rows"
        raise
    finally:
        if rows:
            print_table(tabulate(rows))
            plain = bench.as_dicts(rows)
            if csv_file is not None:
                results.write_csv(csv_file, facts, plain)
            if json_file is not None:
                results.write_json(json_file, facts, {"rows": plain})


def _matching(points: list[bench_points.Point], pattern: str) -> list[bench_points.Point]:
    try:
        expression = re.compile(pattern)
    except re.error as error:
        refuse(f"--filter {pattern!r} is not a regular expression: {error}")
    found = [point for point in points if expression.search(point.name)]
    if not found:
        refuse(f"--filter {pattern!r} matches none of {len(points)} points; --list prints them")
    return found


def _kernel_table(rows: list[bench_kernel.KernelRow]) -> Table:
    """Tabulate microseconds, a line for each point and direction, a column for each provider."""
    names = list(dict.fromkeys(row.provider for row in rows))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("point", no_wrap=True)
    table.add_column("")
    for name in names:
        table.add_column(f"{name}\nµs", justify="right")
    table.add_column("ours\nof copy", justify="right")
    table.add_column("automatic\nof stock", justify="right")
    lines: dict[tuple[str, str], dict[str, bench_kernel.KernelRow]] = {}
    for row in rows:
        lines.setdefault((row.point, row.direction), {})[row.provider] = row
    for (point, direction), by_name in lines.items():
        ours = by_name.get("token_linear") or by_name.get("fused")
        automatic = by_name.get("automatic")
        table.add_row(
            point,
            direction[:3],
            *(f"{by_name[name].median_us:.1f}" if name in by_name else "" for name in names),
            f"{ours.of_copy:.3f}" if ours else "",
            f"{automatic.of_stock:.3f}" if automatic and automatic.of_stock else "",
        )
    return table


@app.command("plot")
def plot_command(
    csv_file: Annotated[Path, typer.Argument(help="What `bench kernel --csv` wrote.")],
    folder: Annotated[Path, typer.Option("--out", help="Folder for the PNG files.")] = Path("."),
) -> None:
    """Plot time over sequence count, and fraction of the copy, from a result file."""
    if importlib.util.find_spec("matplotlib") is None:
        refuse("plots need matplotlib: pip install 'transformer-engine-overlay[bench]'")
    if not csv_file.is_file():
        refuse(f"{csv_file} is not a file; write one with `te-overlay bench kernel --csv`")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"--out {folder}: the folder cannot be made: {error.strerror}")
    nothing = []
    for name, plot in bench_plots.PLOTS.items():
        target = folder / f"{csv_file.stem}-{name}.png"
        try:
            plot(csv_file, target)
        except bench_plots.NothingToPlotError as error:
            nothing.append(f"nothing to plot as {name}: {error}")
        except (ValueError, csv.Error) as error:
            refuse(f"{csv_file} is not as `bench kernel` writes it: {error}")
        except OSError as error:
            refuse(f"{error.filename}: {error.strerror}")
        else:
            console.print(f"wrote {target}", highlight=False, soft_wrap=True)
    if len(nothing) == len(bench_plots.PLOTS):
        refuse(f"{csv_file}: {'; '.join(nothing)}")
    for text in nothing:
        console.print(text, highlight=False, soft_wrap=True)


@app.command("host")
def host_command(rounds: RoundsOption = 41, csv_file: CsvOption = None) -> None:
    """Host time of a call: stock TransformerEngine and routed, interleaved."""
    _measure(lambda device: bench.host_rows(device, rounds), "host time of a call", csv_file)


@app.command("layer")
def layer_command(rounds: RoundsOption = 9, csv_file: CsvOption = None) -> None:
    """Time a whole TransformerLayer: stock, with the overlay, and without RoPE.

    Hidden size 4096, 32 heads of which 8 for k and v, feed-forward 11008, bfloat16, forward and
    backward, a table of 65,536 rows.
    """
    _measure(lambda device: bench.layer_rows(device, rounds), "TransformerLayer", csv_file)


def _measure(
    measure: Callable[[torch.device], Iterator[Any]], title: str, csv_file: Path | None
) -> None:
    check_writable("--csv", csv_file)
    device = select_device(DeviceChoice.CUDA)
    enable_or_refuse()
    facts = environment.describe(device)
    print_facts(facts)
    with (
        _kept(facts, partial(_plain_table, title), csv_file) as rows,
        console.status(f"measuring: {title}") as status,
    ):
        for row in measure(device):
            rows.append(row)
            status.update(f"measuring: {title}, {len(rows)} done")


def _plain_table(title: str, rows: list[Any]) -> Table:
    """Tabulate rows as they are, a column for each field."""
    plain = bench.as_dicts(rows)
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name, value in plain[0].items():
        is_text = isinstance(value, str)
        table.add_column(name.replace("_", "\n"), justify="left" if is_text else "right")
    for row in plain:
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
    return table
