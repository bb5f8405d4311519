# SPDX-License-Identifier: Apache-2.0
"""The command `te-overlay`."""

from __future__ import annotations

from typing import Annotated

import typer

from transformer_engine_overlay import __version__
from transformer_engine_overlay.cli import bench, doctor, patch, verify
from transformer_engine_overlay.cli.common import console

app = typer.Typer(
    help="Token-linear rotary position embedding for packed (THD) batches.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        console.print(f"transformer-engine-overlay {__version__}", highlight=False)
        raise typer.Exit


verify.register(app)
bench.register(app)
doctor.register(app)
patch.register(app)


def main() -> None:
    """Entry point of `te-overlay`."""
    app(prog_name="te-overlay")
