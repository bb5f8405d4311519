# SPDX-License-Identifier: Apache-2.0
"""The matrix over cp_size and cp_rank: its cells, the cases in them, and the local runner."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "ci" / "matrix.py"
RANKS = {(size, rank) for size in (1, 2, 4, 8) for rank in range(size)}
Cell = dict[str, str]


def python(
    *arguments: str, folder: Path = ROOT.parent, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run Python outside of the checkout, which would hide the installed package."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=600,
    )


def matrix(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return python(str(SCRIPT), *arguments, **environment)


def load_matrix() -> ModuleType:
    spec = importlib.util.spec_from_file_location("matrix", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def cells(*arguments: str) -> list[Cell]:
    done = matrix("list", *arguments)
    assert done.returncode == 0, done.stdout
    return [dict(part.split("=") for part in line.split(",")) for line in done.stdout.split()]


class TestCells:
    def test_every_rank_of_every_size_and_nothing_else(self) -> None:
        by_column: dict[tuple[str, ...], list[tuple[int, int]]] = {}
        for cell in cells():
            column = (cell["device"], cell["te"], cell["dtype"])
            by_column.setdefault(column, []).append((int(cell["cp_size"]), int(cell["cp_rank"])))
        assert all(sorted(ranks) == sorted(RANKS) for ranks in by_column.values())
        dtypes = ("float32", "float16", "bfloat16")
        places = [("cpu", "none"), *(("cuda", te) for te in ("none", "2.18.0", "2.20.2"))]
        assert set(by_column) == {(*place, dtype) for place in places for dtype in dtypes}

    def test_selection(self) -> None:
        found = cells("--select", "cp_size=4,cp_rank=3", "--select", "te=none,dtype=float16")
        assert [cell["device"] for cell in found] == ["cpu", "cuda"]
        assert len(cells("--select", "cp_size=1,cp_size=2,device=cpu,dtype=float32")) == 3

    @pytest.mark.parametrize(
        ("select", "message"),
        [
            ("cp_size=3", "cp_size must be one of 1, 2, 4, 8"),
            ("size=4", "the axis must be one of device, te, cp_size, cp_rank, dtype"),
            ("cp_size=2,cp_rank=3", "no cell of the matrix is that"),
            ("cp_size", "cp_size must be one of"),
        ],
    )
    def test_wrong_selection_is_named(self, select: str, message: str) -> None:
        done = matrix("list", "--select", select)
        assert done.returncode == 2
        assert message in done.stdout

    def test_jobs_for_a_service(self) -> None:
        done = matrix("json", "--by", "cp_size,cp_rank", "--select", "device=cpu")
        jobs = json.loads(done.stdout)["include"]
        assert {(int(job["cp_size"]), int(job["cp_rank"])) for job in jobs} == RANKS
        assert len(jobs) == len(RANKS)
        assert jobs[-1]["select"] == "cp_size=8,cp_rank=7"
        assert "--by names gpu" in matrix("json", "--by", "gpu").stdout


RECORDER = """
import json, sys, pytest
tests = sys.argv[1]
sys.path.insert(0, tests)
from cells import TE_TESTS, coordinates

class Recorder:
    def pytest_collection_finish(self, session):
        for item in session.items:
            found = coordinates(item)
            if {"cp_size", "cp_rank"} <= found.keys():
                print("CASE", json.dumps({**found, "in_te": TE_TESTS in item.path.parents}))

options = ["--collect-only", "-qq", "-p", "no:cacheprovider", tests]
sys.exit(pytest.main(options, plugins=[Recorder()]))
"""


def test_every_case_of_a_rank_is_in_one_cell_and_no_cell_is_empty(tmp_path: Path) -> None:
    done = python("-c", RECORDER, str(ROOT / "tests"), folder=tmp_path)
    lines = [line for line in done.stdout.splitlines() if line.startswith("CASE")]
    assert len(lines) > 500, done.stdout
    cases = Counter(
        (c["device"], c["in_te"], c["cp_size"], c["cp_rank"], c["dtype"])
        for c in (json.loads(line.removeprefix("CASE ")) for line in lines)
    )
    for release in ("2.18.0", "2.20.2"):
        found = [c for c in cells() if c["te"] in ("none", release)]
        places = [
            (c["device"], c["te"] != "none", c["cp_size"], c["cp_rank"], c["dtype"]) for c in found
        ]
        assert sorted(places) == sorted(cases)


class TestRunner:
    """A cell of the real matrix, and what a failure looks like."""

    SELECT = "device=cpu,cp_size=4,cp_rank=3,dtype=bfloat16"

    def test_passes(self, tmp_path: Path) -> None:
        summary = tmp_path / "summary.md"
        arguments = ["run", "--select", self.SELECT, "-n", "0", "--junit", str(tmp_path)]
        done = matrix(*arguments, "--summary", str(summary))
        assert done.returncode == 0, done.stdout
        (report,) = tmp_path.glob("*.xml")
        assert report.name == "cpu-none-4-3-bfloat16.xml"
        assert "[cpu-4-3-" in report.read_text()
        assert "[cpu-4-2-" not in report.read_text()
        assert "PASS: 1 of 1 cells" in done.stdout
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("| cpu")]
        count = report.read_text().count("<testcase ")
        assert count > 0
        assert line == f"| cpu | none | bfloat16 | 4 |  |  |  | {count} |"
        assert line in summary.read_text()
        assert f"{count} passed, 0 failed, 0 skipped" in done.stdout

    def test_failing_cell(self, tmp_path: Path) -> None:
        select = "device=cuda,te=none,cp_size=2,cp_rank=1,dtype=float16"
        arguments = ["run", "--select", select, "-n", "0", "--junit", str(tmp_path)]
        done = matrix(*arguments, CUDA_VISIBLE_DEVICES="")
        assert done.returncode == 1, done.stdout
        assert "TE_OVERLAY_REQUIRE_GPU=1, but torch sees no CUDA device" in done.stdout
        assert "FAIL: 0 of 1 cells" in done.stdout
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("| cuda")]
        assert re.fullmatch(r"\| cuda \| none \| float16 \| 2 \|  \| 0 of [1-9]\d* \|", line)
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("to run it again")]
        assert line.partition(": ")[2] == (
            "TE_OVERLAY_REQUIRE_GPU=1 pytest tests --ignore=tests/te --cp-size 2 --cp-rank 1 "
            "--cp-dtype float16 --cp-device cuda"
        )

    @pytest.mark.parametrize(
        ("status", "counts", "text"),
        [
            (0, (7, 0, 0), "7"),
            (1, (6, 1, 0), "6 of 7"),
            (0, (6, 0, 1), "6 of 7"),  # a skipped case proves nothing
            (5, (0, 0, 0), "no case"),
            (0, (0, 0, 0), "no case"),
            (1, (7, 0, 0), "7 of 7"),  # pytest itself says no
        ],
    )
    def test_what_is_good(self, status: int, counts: tuple[int, int, int], text: str) -> None:
        module = load_matrix()
        cell = module.Cell("cpu", "none", 2, 1, "float32")
        outcome = module.Outcome(cell, status, *counts, 1.0, "")
        assert outcome.text() == text
        assert outcome.is_good == text.isdigit()

    def test_counts_of_a_report(self, tmp_path: Path) -> None:
        module = load_matrix()
        report = tmp_path / "report.xml"
        assert module.read_counts(report) == (0, 0, 0)
        report.write_text(
            '<testsuites><testsuite tests="9" failures="1" errors="2" skipped="2"/></testsuites>'
        )
        assert module.read_counts(report) == (4, 3, 2)


def test_rank_out_of_range_is_refused(tmp_path: Path) -> None:
    file = str(ROOT / "tests" / "test_context_parallel.py")
    options = ["--cp-size", "2", "--cp-rank", "2", "-p", "no:cacheprovider"]
    done = python("-m", "pytest", *options, file, folder=tmp_path)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "--cp-rank is 2; it must be in [0, 2)" in done.stdout


@pytest.fixture
def workflow() -> str:
    file = ROOT / ".github" / "workflows" / "ci.yml"
    if not file.exists():
        pytest.skip("the workflow is not part of this copy of the source")
    return file.read_text(encoding="utf-8")


class TestWorkflow:
    def test_it_runs_scripts_that_exist(self, workflow: str) -> None:
        scripts = set(re.findall(r"\bci/[\w.-]+", workflow)) - {"ci/"}
        assert {"ci/in-env", "ci/lint", "ci/matrix.py", "ci/wheel"} <= scripts
        assert all(os.access(ROOT / script, os.R_OK) for script in scripts)
        called = set(re.findall(r"- run: (ci/[\w-]+)", workflow))
        assert all(os.access(ROOT / script, os.X_OK) for script in called)

    def test_its_jobs_are_those_of_the_matrix(self, workflow: str) -> None:
        commands = re.findall(r"python ci/matrix.py (json [^)]*)\)", workflow)
        jobs = [json.loads(matrix(*command.split()).stdout)["include"] for command in commands]
        assert [len(some) for some in jobs] == [len(RANKS), 3]
        used = set(re.findall(r"matrix\.(\w+)", workflow)) - {"py", "python", "cuda", "image"}
        assert used == {"device", "te", "cp_size", "cp_rank", "select"}
        assert all(used <= job.keys() for job in jobs[0])
        assert all({"device", "te", "select"} <= job.keys() for job in jobs[1])
