# SPDX-License-Identifier: Apache-2.0
"""`te-overlay patch`: TransformerEngine's own source tree with the kernels in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from transformer_engine_overlay import source_tree
from transformer_engine_overlay.cli.common import EXIT_MISMATCH, console, refuse
from transformer_engine_overlay.patch_series import PatchError, describe_blob
from transformer_engine_overlay.source_tree import CHANGED, PATCHED, TreeState

app = typer.Typer(
    help="Put the kernels into a source tree of TransformerEngine, and take them out again.",
    no_args_is_help=True,
)

Source: TypeAlias = Annotated[
    Path,
    typer.Option("--te-source", metavar="DIR", help="Root of TransformerEngine's source tree."),
]


def register(parent: typer.Typer) -> None:
    """Add the commands to the application."""
    parent.add_typer(app, name="patch")


@app.command()
def check(source: Source) -> None:
    """Say whether the patches fit the tree; write nothing.

    The exit status is 0 if they fit or are in place, 2 if not.
    """
    tree = _run(source_tree.check_tree, source)
    _say_skipped(tree)
    fits = "the patches are in place" if tree.state == source_tree.APPLIED else "the patches fit"
    _say(f"{source}: {fits}")


@app.command()
def apply(source: Source) -> None:
    """Apply the patches: all of them, or none if a file is not as expected.

    To apply twice is to apply once. Build TransformerEngine afterwards as its guide says.
    """
    tree = _run(source_tree.apply_series, source)
    _say_skipped(tree)
    _say_count(tree, source_tree.ORIGINAL, f"{source}: the patches are in place, build it now")


@app.command()
def revert(source: Source) -> None:
    """Take the patches out; the tree is then as it was.

    To revert twice is to revert once.
    """
    tree = _run(source_tree.revert_series, source)
    _say_count(tree, PATCHED, f"{source}: the patches are out")


@app.command()
def status(source: Source) -> None:
    """Say for each patch, and each of its files, whether it is applied.

    The exit status is 1 if a file is neither as TransformerEngine has it nor as the patches make
    it.
    """
    tree = _run(source_tree.read_tree, source)
    for name, files in tree.patches.items():
        _say(f"{name}: {tree.state_of(files)}")
        for file in files:
            blob = file.found if len(file.found) != 40 else describe_blob(file.found)
            _say(f"  {file.state:<8}  {file.change.path}  {blob or 'not there'}")
    _say_skipped(tree)
    _say(f"{source}: {tree.state}")
    if tree.state == CHANGED:
        raise typer.Exit(EXIT_MISMATCH)


def _run(action: Callable[[Path], TreeState], source: Path) -> TreeState:
    try:
        return action(source)
    except PatchError as error:
        refuse(str(error))
    except OSError as error:
        refuse(f"--te-source {source}: {error}; the tree is as it was")


def _say(text: str) -> None:
    console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


def _say_count(tree: TreeState, state: str, text: str) -> None:
    count = sum(file.state == state for file in tree.files)
    _say(f"{text} ({count} file{'' if count == 1 else 's'} written)")


def _say_skipped(tree: TreeState) -> None:
    for names in tree.skipped:
        _say(f"left out, as optional and for other releases: {names}")
