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


def read_rows(path: Path) -> tuple[dict[str, str], list[Row]]:
    """Return the facts and the rows of a result file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    facts = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# "))
    return facts, list(csv.DictReader(line for line in lines if not line.startswith("# ")))


def plot_sequences(path: Path, target: Path) -> None:
    """Plot forward plus backward over the number of sequences, one panel a shape."""
    facts, rows = read_rows(path)
    panels: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        found = SEQUENCES.search(row["point"])
        if row["point"].startswith("headline/") and found and row["provider"] in STYLES:
            series = panels[SEQUENCES.sub("/", row["point"])][row["provider"]]
            count = int(found[1])
            series[count] = series.get(count, 0.0) + float(row["median_us"]) / 1e3
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
    figure, axes = _new_figure(1)
    for provider, (color, marker, label) in STYLES.items():
        dots = [
            (float(row["megabytes"]), float(row["of_copy"]))
            for row in rows
            if row["provider"] == provider
            and row["direction"] == "forward"
            and not row["point"].startswith("tail/")
        ]
        if dots and provider != "copy":
            axes[0].scatter(*zip(*dots, strict=True), s=14, color=color, marker=marker, label=label)
    axes[0].axhline(1.0, color="#555555", linewidth=1)
    axes[0].set(xscale="log", ylim=(0, 1.1), xlabel="MB that must be moved", ylabel="speed / copy")
    axes[0].grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    _save(figure, target, facts, "fraction of a copy's speed, forward, all named points")


PLOTS = {"sequences": plot_sequences, "fractions": plot_fractions}


def _new_figure(panels: int) -> tuple[Any, Sequence[Any]]:
    if panels == 0:
        raise ValueError("no headline points")
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
