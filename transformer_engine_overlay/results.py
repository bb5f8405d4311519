# SPDX-License-Identifier: Apache-2.0
"""Write measured results down, with what they were made with."""

from __future__ import annotations

import csv
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


def command_line() -> str:
    """Return the command that this process was started with, as one types it."""
    return shlex.join(["te-overlay", *sys.argv[1:]])


def flatten(row: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Join the keys of nested mappings by ``_``; round floats to six decimals."""
    flat: dict[str, object] = {}
    for key, value in row.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}_"))
        else:
            flat[prefix + key] = round(value, 6) if isinstance(value, float) else value
    return flat


def write_csv(path: Path, facts: Mapping[str, str], rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows as CSV, after a comment line for the command and for each fact.

    Parameters
    ----------
    path : Path
        The file, replaced if it exists.
    facts : mapping
        As `transformer_engine_overlay.environment.describe` gives them.
    rows : sequence of mappings
        All with the same keys; nested mappings are flattened.
    """
    flat = [flatten(row) for row in rows]
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(f"# command: {command_line()}\n")
        file.writelines(f"# {name}: {text}\n" for name, text in facts.items())
        writer = csv.DictWriter(file, flat[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(flat)


def write_json(path: Path, facts: Mapping[str, str], content: Mapping[str, object]) -> None:
    """Write `content` as JSON, with the command and the facts."""
    whole = {"command": command_line(), "environment": dict(facts), **content}
    path.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
