# SPDX-License-Identifier: Apache-2.0
"""`te-overlay doctor`."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
from rich.console import Console

from transformer_engine_overlay import doctor
from transformer_engine_overlay.findings import PROBLEM

EXIT_PROBLEM = 1
NAME_WIDTH = 26
# stands in for the spaces of a command, which are no place to break a line
_GLUE = "\N{NO-BREAK SPACE}"


class OptionalFileCommand(typer.core.TyperCommand):
    """A command whose ``--json`` may stand alone: it then means ``--json -``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put in the value that was left out."""
        filled: list[str] = []
        for arg in [*args, "--"]:
            if filled and filled[-1] == "--json" and arg.startswith("-") and arg != "-":
                filled.append("-")
            filled.append(arg)
        return super().parse_args(ctx, filled[:-1])


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("doctor", cls=OptionalFileCommand)(doctor_command)


def doctor_command(
    json_file: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="[FILE|-]", help="Write the report as JSON; - or nothing: to stdout."
        ),
    ] = None,
) -> None:
    """Report versions, GPUs and the state of the overlay, and what is wrong, with its remedy.

    Works without TransformerEngine and without a GPU. TransformerEngine is imported in a
    process of its own.

    The exit status is 1 if there is a problem, else 0.
    """
    if json_file is not None and not (folder := Path(json_file).parent).is_dir():
        raise typer.BadParameter(f"there is no folder {folder}", param_hint="--json")
    report = doctor.examine()
    if json_file is not None:
        text = json.dumps(report.to_json(), indent=2) + "\n"
        if json_file == "-":
            typer.echo(text, nl=False)
        else:
            Path(json_file).write_text(text, encoding="utf-8")
    if json_file != "-":
        print_report(report, Console())
    if report.problems:
        raise typer.Exit(EXIT_PROBLEM)


def print_report(report: doctor.Report, console: Console) -> None:
    """Print the facts in two columns, the findings, and a verdict in a line."""

    def show(text: str, style: str = "") -> None:
        # Values hold brackets and paths: no markup, and no line broken in the middle of one.
        console.print(text, style=style, markup=False, highlight=False, emoji=False, soft_wrap=True)

    for section, facts in report.facts.items():
        show(section, "bold")
        for name, text in facts.items():
            first, *more = text.splitlines() or [""]
            show(f"{name:>{NAME_WIDTH}}  {first}")
            for line in more:
                show(f"{'':{NAME_WIDTH}}  {line}")
    for finding in report.findings:
        show("")
        is_problem = finding.level == PROBLEM
        show(fold(finding.level, finding.what, console.width), "red" if is_problem else "")
        show(fold("remedy", finding.remedy, console.width))
    show("")
    count = report.problems
    if count:
        show(f"doctor: {count} problem{'s' if count > 1 else ''}", "bold red")
    else:
        show("doctor: no problems", "bold green")


def fold(name: str, text: str, width: int) -> str:
    """Break a text into lines, with its name before it; what is in backticks stays in one line."""
    glued = re.sub("`[^`]*`", lambda command: command[0].replace(" ", _GLUE), text)
    lines = textwrap.wrap(
        glued,
        max(width, 40),
        initial_indent=f"{name + ':':<9}",
        subsequent_indent=" " * 9,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines).replace(_GLUE, " ")
