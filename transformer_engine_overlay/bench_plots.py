# SPDX-License-Identifier: Apache-2.0
"""Plots of what `te-overlay bench kernel --csv` wrote; needs the `bench` extra."""

from __future__ import annotations

import csv
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, str]
SEQUENCES = re.compile(r"/n(\d+)/")
STYLES = {
    "token_linear": ("#0072b2", "o", "token-linear"),
    "stock TE": ("#d55e00", "s", "stock TransformerEngine"),
    "legacy_grid": ("#cc79a7", "v", "legacy grid"),
    "torch.compile": ("#009e73", "^", "plain torch, torch.compile"),
    "flash-attn Triton": ("#e69f00", "D", "flash-attn, Triton"),
    "copy": ("#555555", "", "copy of the same bytes"),
}


KEYS = ("point", "provider", "direction")
NUMBERS = ("median_us", "of_copy", "megabytes")


class NothingToPlotError(ValueError):
    """A result file has no point of the kind that a plot shows."""


def read_rows(path: Path) -> tuple[dict[str, str], list[Row]]:
    """Return the facts and the rows of a result file.

    Raises
    ------
    ValueError
        If a row lacks a name, has a number that is none, or is there twice; it says which.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    facts = dict(line[2:].partition(": ")[::2] for line in lines if line.startswith("# "))
    rows = list(csv.DictReader(line for line in lines if not line.startswith("# ")))
    seen = set()
    for number, row in enumerate(rows, 1):
        if missing := [name for name in KEYS if not row.get(name)]:
            raise ValueError(f"row {number} has no {missing[0]}")
        for name in NUMBERS:
            if not _is_positive(row.get(name)):
                raise ValueError(
                    f"{name} of row {number} is {row.get(name)!r}, and must be a positive number; "
                    "is the file cut short?"
                )
        key = tuple(row[name] for name in KEYS)
        if key in seen:
            raise ValueError(f"row {number} is there twice: {key}; is the file of one run?")
        seen.add(key)
    return facts, rows


def _is_positive(value: str | None) -> bool:
    try:
        return 0.0 < float(value or "") < float("inf")
    except ValueError:
        return False


def plot_sequences(path: Path, target: Path) -> None:
    """Plot forward plus backward over the number of sequences, one panel a shape."""
    facts, rows = read_rows(path)
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        times[row["point"], row["provider"]].append(float(row["median_us"]) / 1e3)
    panels: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for (point, provider), both in times.items():
        found = SEQUENCES.search(point)
        if point.startswith("headline/") and found and provider in STYLES and len(both) == 2:
            panels[SEQUENCES.sub("/", point)][provider][int(found[1])] = sum(both)
    figure, axes = _new_figure(len(panels))
    for ax, (shape, providers) in zip(axes, panels.items(), strict=True):
        for provider, (color, marker, label) in STYLES.items():
            if provider in providers:
                points = sorted(providers[provider].items())
                ax.plot(*zip(*points, strict=True), color=color, marker=marker, label=label)
        _, dtype, pairing, tokens, heads, dim = shape.split("/")[:6]
        ax.set(xscale="log", yscale="log", xlabel="sequences in the batch", ylabel="ms")
        ax.set_title(f"{dtype}, {pairing}, {tokens[1:]} tokens, h={heads[1:]}, d={dim[1:]}")
        ax.grid(alpha=0.3, which="both")
    axes[0].legend(fontsize=8)
    _save(figure, target, facts, "forward + backward over the number of sequences")


def plot_fractions(path: Path, target: Path) -> None:
    """Plot the fraction of a copy's speed over the bytes moved, one dot a point."""
    facts, rows = read_rows(path)
    series: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if row["direction"] == "forward" and not row["point"].startswith("tail/"):
            series[row["provider"]].append((float(row["megabytes"]), float(row["of_copy"])))
    shown = {name: series[name] for name in STYLES if name in series and name != "copy"}
    if not shown:
        raise NothingToPlotError("no points but those of a copy, or of tail rows")
    figure, axes = _new_figure(1)
    for provider, dots in shown.items():
        color, marker, label = STYLES[provider]
        axes[0].scatter(*zip(*dots, strict=True), s=14, color=color, marker=marker, label=label)
    highest = max(fraction for dots in shown.values() for _, fraction in dots)
    axes[0].axhline(1.0, color="#555555", linewidth=1)
    axes[0].set(xscale="log", xlabel="MB that must be moved", ylabel="speed / copy")
    axes[0].set_ylim(0, max(1.1, 1.05 * highest))
    axes[0].grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    _save(figure, target, facts, "fraction of a copy's speed, forward, all named points")


PLOTS = {"sequences": plot_sequences, "fractions": plot_fractions}


def _new_figure(panels: int) -> tuple[Any, Sequence[Any]]:
    if panels == 0:
        raise NothingToPlotError("no headline points")
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    columns = min(panels, 2)
    lines = -(-panels // columns)
    figure, axes = pyplot.subplots(
        lines, columns, figsize=(5.2 * columns + 1.0 * (columns == 1), 3.6 * lines), squeeze=False
    )
    return figure, list(axes.flat)[:panels]


def _save(figure: Any, target: Path, facts: dict[str, str], title: str) -> None:
    device = facts.get("device", "")
    te = facts.get("TransformerEngine", "")
    figure.suptitle(f"{title}\n{device}, TransformerEngine {te}", fontsize=10)
    figure.tight_layout()
    figure.savefig(target, dpi=110, metadata={"Software": None})
