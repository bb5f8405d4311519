# SPDX-License-Identifier: Apache-2.0
"""`te-overlay bench`: measurements beside an installed TransformerEngine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.table import Table

from transformer_engine_overlay import bench, environment, results
from transformer_engine_overlay.cli.common import (
    DeviceChoice,
    check_writable,
    console,
    enable_or_refuse,
    print_facts,
    select_device,
)

CsvOption = Annotated[Path | None, typer.Option("--csv", help="Write the table to this file.")]
RoundsOption = Annotated[int, typer.Option(help="Rounds; the median is reported.", min=1)]

app = typer.Typer(
    help="Measure beside an installed TransformerEngine; needs a GPU.", no_args_is_help=True
)


def register(parent: typer.Typer) -> None:
    """Add the commands to `parent`."""
    parent.add_typer(app, name="bench")


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
    rows = []
    with console.status(f"measuring: {title}") as status:
        for row in measure(device):
            rows.append(row)
            status.update(f"measuring: {title}, {len(rows)} done")
    plain = bench.as_dicts(rows)
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name, value in plain[0].items():
        is_text = isinstance(value, str)
        table.add_column(name.replace("_", "\n"), justify="left" if is_text else "right")
    for row in plain:
        table.add_row(*(f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()))
    console.print(table)
    if csv_file is not None:
        results.write_csv(csv_file, facts, plain)
