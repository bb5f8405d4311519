# SPDX-License-Identifier: Apache-2.0
"""`te-overlay bench kernel` and its shapes, without a GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from transformer_engine_overlay import (
    bench,
    bench_kernel,
    bench_plots,
    bench_points,
    bench_providers,
)
from transformer_engine_overlay.bench_points import Point
from transformer_engine_overlay.cli import app
from transformer_engine_overlay.cli import bench as cli_bench

CPU = torch.device("cpu")


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench", *arguments])
    return result.exit_code, result.output


def test_points_are_named_once_and_fill_their_ranks() -> None:
    points = bench_points.all_points()
    names = [point.name for point in points]
    assert len(set(names)) == len(names)
    assert 180 <= len(names) <= 240
    for point in points:
        lengths = point.lengths()
        assert len(lengths) == point.sequences
        assert min(lengths) >= 0
        unit = 2 * point.cp_size if point.cp_size > 1 else 1
        assert all(length % unit == 0 for length in lengths)
        assert sum(lengths) == int(point.tokens * point.used) * point.cp_size
        if point.table_rows:
            assert max(lengths) <= point.table_rows, point.name


def test_quick_points_are_some_of_all() -> None:
    quick = bench_points.quick_points()
    assert set(quick) < set(bench_points.all_points())
    assert len(quick) >= 12


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("cp_size", [1, 2])
def test_bytes_count_each_used_table_row_once(interleaved: bool, cp_size: int) -> None:
    point = Point(
        "test", 64, 2, 16, 8, 4, table_rows=128, cp_size=cp_size, interleaved=interleaved, used=0.5
    )
    tensors = bench_providers.prepare(point, CPU, 0, 2)
    rows = tensors.rows[tensors.rows >= 0].tolist()
    assert len(rows) == 32
    assert tensors.num_bytes == 2 * 2 * 64 * 2 * 16 + 4 * 8 * len(set(rows))


def test_plain_rope_of_the_compiled_provider_is_rope() -> None:
    tensors = bench_providers.prepare(Point("test", 24, 2, 16, 16, 3), CPU, 0, 2)
    ours = bench_providers.providers(tensors)["token_linear"]
    for transpose in (False, True):
        plain = bench_providers._plain_rope(tensors.t[0], tensors.freqs[0], tensors.rows, transpose)
        torch.testing.assert_close(plain, ours(0, transpose), atol=0.02, rtol=0.02)


def test_rows_pair_rounds_and_take_the_faster_copy() -> None:
    tensors = bench_providers.prepare(Point("test", 24, 2, 16, 16, 3), CPU, 0, 2)
    times = {
        ("copy_", "forward"): [4e-6, 4e-6, 4e-6],
        ("copy kernel", "forward"): [2e-6, 1e-6, 2e-6],
        ("stock TE", "forward"): [8e-6, 8e-6, 8e-6],
        ("token_linear", "forward"): [4e-6, 2e-6, 5e-6],
    }
    times |= {(name, "backward"): list(values) for (name, _), values in times.items()}
    rows = {(r.provider, r.direction): r for r in bench_kernel._rows(tensors, times)}
    assert rows["copy", "forward"].median_us == pytest.approx(2.0)
    assert rows["copy", "forward"].of_copy == 1.0
    ours = rows["token_linear", "backward"]
    assert ours.median_us == pytest.approx(4.0)
    assert ours.of_copy == pytest.approx(0.5)  # 2/4, 1/2, 2/5
    assert ours.of_stock == pytest.approx(0.5)
    assert ours.p20_us < ours.median_us < ours.p80_us
    assert ours.tb_per_s == pytest.approx(tensors.num_bytes / 4e-6 / 1e12)


def test_command_on_the_cpu(tmp_path: Path) -> None:
    table, content = tmp_path / "k.csv", tmp_path / "k.json"
    status, output = run(
        *("kernel", "--device", "cpu", "--filter", "size/.*/t512/h1/.*/n16/", "--rounds", "2"),
        *("--csv", str(table), "--json", str(content)),
    )
    assert status == 0, output
    assert "times of the CPU backend" in output
    facts, rows = bench_plots.read_rows(table)
    assert facts["device"].startswith("CPU")
    assert {row["provider"] for row in rows} == {
        "copy",
        "token_linear",
        "automatic",
        "legacy_grid",
    }
    assert all(float(row["median_us"]) > 0 for row in rows)
    assert len(json.loads(content.read_text())["rows"]) == len(rows) == 8


def test_a_provider_that_cannot_run_is_named() -> None:
    status, output = run(
        *("kernel", "--device", "cpu", "--filter", "size/.*/t512/h1/.*/n16/", "--rounds", "1"),
        *("--provider", "stock TE", "automatic"),
    )
    assert status == 0, output
    assert "not measured, as it cannot run here: stock TE\n" in output


def three_groups(points: list[Point], *_: Any) -> Iterator[list[bench_kernel.KernelRow]]:
    times = [1234567.8] * 4
    for name in ("token_linear", "automatic", "copy"):
        yield [bench_kernel.KernelRow(points[0].name, name, "forward", *times, 0.5, None, 1.0)]


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_run_that_is_broken_off_keeps_its_rows(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel_rows(*arguments: Any) -> Iterator[list[bench_kernel.KernelRow]]:
        yield from three_groups(*arguments)
        raise error

    monkeypatch.setattr(bench_kernel, "kernel_rows", kernel_rows)
    table, content = tmp_path / "k.csv", tmp_path / "k.json"
    status, output = run(
        *("kernel", "--device", "cpu", "--filter", "size/.*/t512/h1/"),
        *("--csv", str(table), "--json", str(content)),
    )
    assert status != 0
    assert output.count("1234567.8") == 3
    facts, rows = bench_plots.read_rows(table)
    assert facts["broken off"] == f"by {error.__name__}, after 3 rows"
    assert len(rows) == len(json.loads(content.read_text())["rows"]) == 3


def test_host_times_that_are_broken_off_keep_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`bench layer` is made in the same way."""

    def host_rows(*_: Any) -> Iterator[bench.HostRow]:
        yield bench.HostRow("fused_rope_forward", "plain", 1.0, 2.0, 2.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "host_rows", host_rows)
    monkeypatch.setattr(cli_bench, "select_device", lambda _: CPU)
    monkeypatch.setattr(cli_bench, "enable_or_refuse", lambda: None)
    status, output = run("host", "--csv", str(tmp_path / "h.csv"))
    assert status != 0
    assert "fused_rope_forward" in output
    text = (tmp_path / "h.csv").read_text()
    assert "# broken off: by KeyboardInterrupt, after 1 rows\n" in text
    assert text.endswith("fused_rope_forward,plain,1.0,2.0,2.0\n")


@pytest.mark.parametrize("width", ["20", "80"])
def test_a_narrow_terminal_cuts_no_number(width: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", width)
    monkeypatch.setattr(bench_kernel, "kernel_rows", three_groups)
    status, output = run("kernel", "--device", "cpu", "--filter", "size/.*/t512/h1/.*/n256/")
    assert status == 0
    assert output.count("1234567.8") == 3
    assert "size/bf16/half/t512/h1/d64/r64/n256/equal/smax/cp1  for" in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--filter", "nothing like this"), "matches none of 236 points"),
        (("--filter", "("), "is not a regular expression"),
        (("--filter", "[x][/y]:bug:"), "--filter '[x][/y]:bug:' matches none"),
        (("--provider", "magic"), "'magic' is none of token_linear"),
        (("--csv", "/nowhere/k.csv"), "cannot be written"),
        (("--csv", "k.x", "--json", "./k.x"), "--csv and --json are both k.x"),
        (("--filter", "t65536/h32/"), "points of up to 2097152 elements alone"),
    ],
)
def test_command_refuses(
    arguments: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, output = run("kernel", "--device", "cpu", *arguments)
    assert status == 2
    assert message in " ".join(output.split())


HEADLINE = Point("headline", 65536, 32).name
TAIL = Point("tail", 65536, 32).name
PLOTTED = ("copy", "token_linear", "stock TE")
COLUMNS = ("point", "provider", "direction", "median_us", "of_copy", "megabytes")


def result_lines(point: str = HEADLINE, providers: tuple[str, ...] = PLOTTED) -> list[str]:
    return [
        f"{point},{provider},{direction},100.0,0.9,1074.0"
        for provider in providers
        for direction in bench_kernel.DIRECTIONS
    ]


def run_plot(folder: Path, lines: list[str]) -> tuple[int, str]:
    pytest.importorskip("matplotlib")
    text = "\n".join(["# device: a GPU", ",".join(COLUMNS), *lines])
    (folder / "k.csv").write_text(text)
    status, output = run("plot", str(folder / "k.csv"), "--out", str(folder / "plots [1]"))
    return status, " ".join(output.split())


def test_plots(tmp_path: Path) -> None:
    status, output = run_plot(tmp_path, result_lines())
    assert status == 0, output
    for name in bench_plots.PLOTS:
        assert f"plots [1]/k-{name}.png" in output
        assert (tmp_path / "plots [1]" / f"k-{name}.png").read_bytes().startswith(b"\x89PNG")


def test_what_there_is_is_plotted(tmp_path: Path) -> None:
    """No headline point is no reason to plot nothing else."""
    status, output = run_plot(tmp_path, result_lines(Point("shape", 16384, 8).name))
    assert status == 0, output
    assert "nothing to plot as sequences: no headline points" in output
    assert (tmp_path / "plots [1]" / "k-fractions.png").exists()


PLOT_REFUSALS = {
    "no rows": ([], "nothing to plot as sequences: no headline points; nothing to plot as frac"),
    "the copy alone": (result_lines(TAIL), "no points but those of a copy, or of tail rows"),
    "a row cut short": (
        [*result_lines()[:-1], f"{HEADLINE},stock TE,backward"],
        "median_us of row 6 is None, and must be a positive number; is the file cut short?",
    ),
    "a word for a number": ([f"{HEADLINE},copy,forward,fast,0.9,1"], "row 1 is 'fast'"),
    "no number": ([f"{HEADLINE},copy,forward,1,nan,1"], "of_copy of row 1 is 'nan'"),
    "zero": ([f"{HEADLINE},copy,forward,1,1,0"], "megabytes of row 1 is '0'"),
    "no provider": ([f"{HEADLINE},,forward,1,1,1"], "row 1 has no provider"),
    "two runs": (result_lines() * 2, "row 7 is there twice: ('headline/"),
    "a result of another command": (["fused_rope_forward,plain"], "row 1 has no direction"),
    "a cut between the directions": (result_lines(TAIL)[:1], "no headline points"),
    "NUL": ([f"{HEADLINE},copy,forward,1\0,1,1"], "k.csv is not as `bench kernel` writes it"),
}


@pytest.mark.parametrize("name", PLOT_REFUSALS)
def test_plot_refuses(name: str, tmp_path: Path) -> None:
    lines, message = PLOT_REFUSALS[name]
    status, output = run_plot(tmp_path, lines)
    assert status == 2, output
    assert message in output


def test_a_direction_alone_is_no_forward_plus_backward(tmp_path: Path) -> None:
    other = Point("headline", 65536, 32, sequences=8).name
    status, output = run_plot(tmp_path, [*result_lines()[:-1], *result_lines(other)[::2]])
    assert status == 0, output
    pyplot = pytest.importorskip("matplotlib.pyplot")
    drawn = pyplot.figure(pyplot.get_fignums()[-2]).axes[0].get_lines()
    assert [line.get_label() for line in drawn] == ["token-linear", "copy of the same bytes"]
    assert all(list(line.get_xdata()) == [1] for line in drawn)
    assert all(list(line.get_ydata()) == [0.2] for line in drawn)


@pytest.mark.parametrize(
    ("where", "message"),
    [("k.csv", "the folder cannot be made"), ("k.csv/x", "the folder cannot be made"), (".", "k-")],
)
def test_plot_names_what_cannot_be_written(where: str, message: str, tmp_path: Path) -> None:
    run_plot(tmp_path, result_lines())
    (tmp_path / "k-sequences.png").mkdir()
    status, output = run("plot", str(tmp_path / "k.csv"), "--out", str(tmp_path / where))
    assert status == 2
    assert message in " ".join(output.split())
