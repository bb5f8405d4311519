#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Keep the documents' tables as ci/results/*.csv have them: `python ci/results.py [--check]`.

A table stands between the lines `<!-- table: ci/results/NAME.csv -->` and `<!-- end of table -->`;
`<!-- headline: ... -->` names results of `te-overlay bench kernel`, one a TransformerEngine, and
`<!-- fused: ... -->` one such result.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = (ROOT / "README.md", ROOT / "patches" / "PULL_REQUEST.md")
MARKED = re.compile(
    r"(?P<open><!-- (?P<kind>table|headline|fused): (?P<csv>[^\n]+?) -->\n)"
    r".*?(?P<close><!-- end of table -->)",
    re.DOTALL,
)


def read(path: Path) -> tuple[dict[str, str], list[dict[str, str]]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    facts = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# "))
    return facts, list(csv.DictReader(line for line in lines if not line.startswith("# ")))


def provenance(facts: dict[str, str]) -> str:
    machine = ", ".join(f"{name} {text}" for name, text in facts.items() if name != "command")
    return f"`{facts['command']}` ({machine})"


def markdown(heads: list[str], rows: list[list[str]]) -> list[str]:
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def markdown_table(paths: list[Path]) -> str:
    facts, rows = read(paths[0])
    heads = [name.replace("_", " ") for name in rows[0]]
    table = markdown(heads, [list(map(readable, row.values())) for row in rows])
    return "\n".join([*table, "", provenance(facts), ""])


def headline_table(paths: list[Path]) -> str:
    """Forward plus backward, ms; a provider's time from the first file that has it."""
    runs = [read(path) for path in paths]
    times: list[dict[str, dict[str, dict[str, float]]]] = []
    for _, rows in runs:
        points: dict[str, dict[str, dict[str, float]]] = {}
        for row in rows:
            if row["point"].startswith("headline/"):
                providers = points.setdefault(row["point"], {})
                directions = providers.setdefault(row["provider"], {})
                directions[row["direction"]] = float(row["median_us"]) / 1e3
        times.append(points)
    releases = [facts["TransformerEngine"] for facts, _ in runs]
    heads = ["dtype", "h", "d", "sequences"]
    heads += ["copy", "token-linear", "of it backward", "speed / copy"]
    heads += [text for release in releases for text in (f"TE {release}", "ratio")]
    heads += ["torch.compile"]
    lines = []
    for point, first in times[0].items():
        _, dtype, _, _, heads_, dim, _, sequences = point.split("/")[:8]
        ours = sum(first["token_linear"].values())
        copy = sum(first["copy"].values())
        line = [dtype, heads_[1:], dim[1:], f"{int(sequences[1:]):,}"]
        line += [f"{copy:.4f}", f"{ours:.4f}", f"{first['token_linear']['backward']:.4f}"]
        line += [f"{copy / ours:.3f}"]
        for run in times:
            stock = sum(run[point]["stock TE"].values())
            ratio = stock / sum(run[point]["token_linear"].values())
            line += [f"{stock:.4g}", readable(f"{ratio:.4f}")]
        line += [f"{sum(first['torch.compile'].values()):.4g}"]
        lines.append(line)
    texts = [provenance(facts) for facts, _ in runs]
    return "\n".join([*markdown(heads, lines), "", *texts, ""])


def fused_table(paths: list[Path]) -> str:
    """Points of fused calls, a line for each direction, us."""
    facts, rows = read(paths[0])
    points: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        if row["point"].startswith(("qk/", "qkv/")):
            times = points.setdefault((row["point"], row["direction"]), {})
            times[row["provider"]] = float(row["median_us"])
    heads = ["call", "q heads", "k heads", "d", "tokens", "sequences", "direction"]
    heads += ["copy", "one launch", "parts", "speed / copy", "speed / parts"]
    lines = []
    for (point, direction), times in points.items():
        call, _, _, tokens, query, dim, _, sequences, *_, key = point.split("/")
        line = [call, query[1:], key[1:], dim[1:], f"{int(tokens[1:]):,}", sequences[1:], direction]
        line += [f"{times[name]:.2f}" for name in ("copy", "fused", "parts")]
        line += [f"{times[name] / times['fused']:.3f}" for name in ("copy", "parts")]
        lines.append(line)
    return "\n".join([*markdown(heads, lines), "", provenance(facts), ""])


KINDS = {"table": markdown_table, "headline": headline_table, "fused": fused_table}


def readable(text: str) -> str:
    if text.isdigit():
        return f"{int(text):,}"
    return f"{float(text):.4g}" if re.fullmatch(r"-?\d*\.\d+(e-\d+)?", text) else text


def with_tables(text: str) -> str:
    def table(found: re.Match[str]) -> str:
        paths = [ROOT / name for name in found["csv"].split()]
        return found["open"] + KINDS[found["kind"]](paths) + found["close"]

    return MARKED.sub(table, text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, only compare")
    check = parser.parse_args().check
    differs = False
    for document in DOCUMENTS:
        old = document.read_text(encoding="utf-8")
        new = with_tables(old)
        if not check:
            document.write_text(new, encoding="utf-8")
        elif old != new:
            print(f"{document.name} differs from ci/results: run `python ci/results.py`")
            differs = True
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
