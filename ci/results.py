#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Keep README's tables as ci/results/*.csv have them: `python ci/results.py [--check]`.

A table stands between the lines `<!-- table: ci/results/NAME.csv -->` and `<!-- end of table -->`.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
MARKED = re.compile(
    r"(?P<open><!-- table: (?P<csv>\S+) -->\n).*?(?P<close><!-- end of table -->)", re.DOTALL
)


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
    if text.isdigit():
        return f"{int(text):,}"
    return f"{float(text):.4g}" if re.fullmatch(r"-?\d*\.\d+(e-\d+)?", text) else text


def with_tables(text: str) -> str:
    return MARKED.sub(lambda m: m["open"] + markdown_table(ROOT / m["csv"]) + m["close"], text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, only compare")
    check = parser.parse_args().check
    old = README.read_text(encoding="utf-8")
    new = with_tables(old)
    if not check:
        README.write_text(new, encoding="utf-8")
    elif old != new:
        print("README.md differs from ci/results: run `python ci/results.py`")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
