#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Keep measured results as CSV, and README's tables as these files have them.

    python ci/results.py record REPORT.json ci/results/NAME.csv   # from a JSON report
    python ci/results.py readme [--check]                         # write, or check, the tables

A CSV begins with a comment line for each fact about the machine and for the command.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
MARKED = re.compile(
    r"(?P<open><!-- table: (?P<csv>\S+) -->\n).*?(?P<close><!-- end of table -->)", re.DOTALL
)


def flatten(row: dict[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            flat.update(flatten(value, f"{prefix}{key}_"))
        else:
            flat[prefix + key] = round(value, 6) if isinstance(value, float) else value
    return flat


def record(report: Path, target: Path) -> None:
    content = json.loads(report.read_text(encoding="utf-8"))
    rows = [flatten(row) for row in content["rows"]]
    facts = {"command": content["command"], **content["environment"]}
    with target.open("w", encoding="utf-8", newline="") as file:
        file.writelines(f"# {name}: {text}\n" for name, text in facts.items())
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def markdown_table(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    facts = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# "))
    rows = list(csv.DictReader(line for line in lines if not line.startswith("# ")))
    heads = [name.replace("_", " ") for name in rows[0]]
    table = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    table += [f"| {' | '.join(map(readable, row.values()))} |" for row in rows]
    machine = ", ".join(f"{name} {text}" for name, text in facts.items() if name != "command")
    return "\n".join([*table, "", f"`{facts['command']}` ({machine})", ""])


def readable(text: str) -> str:
    return f"{int(text):,}" if text.isdigit() else text


def with_tables(text: str) -> str:
    return MARKED.sub(
        lambda m: m["open"] + markdown_table(ROOT / m["csv"]) + m["close"],
        text,
    )


def readme(check: bool) -> int:
    old = README.read_text(encoding="utf-8")
    new = with_tables(old)
    if check:
        if old != new:
            print("README.md differs from ci/results: run `python ci/results.py readme`")
        return int(old != new)
    README.write_text(new, encoding="utf-8")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    record_parser = commands.add_parser("record")
    record_parser.add_argument("report", type=Path)
    record_parser.add_argument("target", type=Path)
    commands.add_parser("readme").add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    if arguments.command == "record":
        record(arguments.report, arguments.target)
        return 0
    return readme(arguments.check)


if __name__ == "__main__":
    sys.exit(main())
