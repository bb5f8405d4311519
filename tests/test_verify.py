# SPDX-License-Identifier: Apache-2.0
"""The main job: it passes, it fails when a result is wrong, and it says how to see that again."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import transformer_engine_overlay
from transformer_engine_overlay import _native, verify
from transformer_engine_overlay.cases import draw_case, make_batch
from transformer_engine_overlay.cli import app
from transformer_engine_overlay.cli.verify import FULL

CPU = torch.device("cpu")


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, list(arguments))
    return result.exit_code, result.output + (result.stderr if result.stderr_bytes else "")


def run_quick(**changes: Any) -> verify.Report:
    options = {"dtypes": [torch.bfloat16], "cp_sizes": [1, 2], "case_indices": [0, 1]}
    options |= {"comparison": verify.BOTH_PATHS, **changes}
    return verify.run(CPU, **options, seed=0, tokens=256)


class TestCases:
    def test_six_cases_have_every_trait(self) -> None:
        cases = [draw_case(0, i, torch.float32, 4, 2048) for i in range(6)]
        assert all(0 in c.lengths and max(c.lengths) > 64 for c in cases)
        assert {c.interleaved for c in cases} == {True, False}
        assert {c.strided for c in cases} == {True, False}
        assert {c.rotary_dim < c.head_dim for c in cases} == {True, False}
        assert {c.starts is None for c in cases} == {True, False}
        assert any(c.tail_rows for c in cases)
        assert any(c.heads == 1 for c in cases)

    def test_the_cases_for_a_gpu_have_every_kernel(self) -> None:
        kernels = set()
        for case in (draw_case(0, i, torch.bfloat16, 1, 256) for i in range(FULL["cuda"][0])):
            t = make_batch(case, CPU).local(make_batch(case, CPU).t, 0)
            body = _native.choose_body(
                *(2, case.interleaved, case.heads, case.head_dim, case.rotary_dim, t.stride()),
                (4096, 4096, 4096),
            )
            kernels.add((body, case.interleaved))
        never = {(3, True)}  # wide32 is for half-split calls
        assert kernels == set(itertools.product(range(5), (False, True))) - never

    def test_a_case_is_a_function_of_its_seed(self) -> None:
        one, two = (draw_case(7, 3, torch.float32, 2, 512) for _ in range(2))
        assert one == two
        assert torch.equal(make_batch(one, CPU).t, make_batch(two, CPU).t)
        assert draw_case(8, 3, torch.float32, 2, 512) != one

    def test_local_share_ends_in_nan_tail_rows(self) -> None:
        batch = make_batch(draw_case(0, 0, torch.float32, 2, 256), CPU)
        local = batch.local(batch.t, 1)
        assert batch.case.tail_rows > 0
        assert local[-batch.case.tail_rows :].isnan().all()
        assert local[: -batch.case.tail_rows].isfinite().all()
        assert local.is_contiguous() != batch.case.strided


class TestRun:
    def test_counts_checks_and_blocks(self) -> None:
        report = run_quick()
        assert (report.passed, report.failed) == (2 * 1 + 2 * 2, 0)
        cases = [draw_case(0, i, torch.bfloat16, 1, 256) for i in (0, 1)]
        paths = report.rows[0].paths
        # forward and backward
        assert paths["token_linear"].blocks == sum(2 * (256 + c.tail_rows) for c in cases)
        assert paths["legacy_grid"].blocks == sum(2 * c.table_rows * len(c.lengths) for c in cases)
        assert all(tally.seconds > 0 for tally in paths.values())

    @pytest.mark.parametrize(
        ("wrong", "what"),
        [
            (lambda y, path: y.add_(0.1) if path == "1" else y, "the two paths differ in a bit"),
            (lambda y, path: y.mul_(1.1), "outside of the tolerance"),
            (lambda y, path: y.fill_(float("nan")), "outside of the tolerance"),
            (lambda y, path: y.neg_(), "outside of the tolerance"),
        ],
    )
    def test_a_wrong_result_fails(
        self, wrong: Any, what: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def rotate(*arguments: Any) -> torch.Tensor:
            y = transformer_engine_overlay.thd.rotate_thd(*arguments)
            return wrong(y, os.environ.get("NVTE_FUSED_ROPE_THD_TOKEN_LINEAR"))

        monkeypatch.setattr(verify, "rotate_thd", rotate)
        report = run_quick()
        assert report.failed == 6
        assert report.passed == 0
        assert any(what in failure.what for failure in report.failures)

    def test_a_rank_that_differs_from_the_whole_fails(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def rotate(*arguments: Any) -> torch.Tensor:
            y = transformer_engine_overlay.thd.rotate_thd(*arguments)
            cp_size, cp_rank = arguments[5:7]
            if (cp_size, cp_rank) == (2, 1):
                y[0, 0, 0] = torch.nextafter(y[0, 0, 0], y.new_tensor(9.0))
            return y

        monkeypatch.setattr(verify, "rotate_thd", rotate)
        report = run_quick()
        assert report.failed == 2  # two cases, at one rank each
        assert {f.cp_rank for f in report.failures} == {1}
        assert all("differs from cp_size 1" in f.what for f in report.failures)

    def test_a_path_that_did_not_run_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(verify, "PATHS", {"legacy_grid": "1", "token_linear": "1"})
        with pytest.raises(RuntimeError, match="legacy_grid was forced, but the calls counted"):
            run_quick()


class TestCommand:
    def test_passes(self, tmp_path: Path) -> None:
        file = tmp_path / "report.json"
        code, output = invoke(
            *("verify", "--device", "cpu", "--quick", "--seed", "3", "--json", str(file)),
            *("--cp-size", "1", "2", "--dtype", "float32", "bfloat16"),
        )
        assert code == 0, output
        assert "PASS: 12 checks on cpu" in output.splitlines()[-1]
        content = json.loads(file.read_text())
        assert (content["passed"], content["failed"], content["seed"]) == (12, 0, 3)
        assert [(r["dtype"], r["cp_size"]) for r in content["rows"]] == [
            ("float32", 1),
            ("float32", 2),
            ("bfloat16", 1),
            ("bfloat16", 2),
        ]
        assert content["environment"]["torch"] == torch.__version__

    def test_options_may_also_be_repeated(self) -> None:
        code, output = invoke(
            *("verify", "--device=cpu", "--quick", "--cp-size", "1", "--cp-size=4"),
            *("--dtype=float16", "--case", "1"),
        )
        assert code == 0, output
        assert "PASS: 5 checks" in output

    def test_a_mismatch_prints_a_command_that_shows_it_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def rotate(*arguments: Any) -> torch.Tensor:
            y = transformer_engine_overlay.thd.rotate_thd(*arguments)
            return y.zero_() if arguments[5] == 2 and arguments[0].shape[1] == 8 else y

        monkeypatch.setattr(verify, "rotate_thd", rotate)
        code, output = invoke("verify", "--device", "cpu", "--quick", "--cp-size", "1", "2")
        assert code == 1
        assert re.search(r"^FAIL: 6 of 18 checks on cpu", output, re.MULTILINE)
        (command,) = re.findall(r"^\s+te-overlay (verify .*)$", output, re.MULTILINE)
        assert "--cp-size 2" in command
        assert "--case 1" in command
        code, output = invoke(*shlex.split(command))
        assert code == 1
        assert "FAIL: 2 of 2 checks" in output
        monkeypatch.undo()
        assert invoke(*shlex.split(command))[0] == 0

    def test_the_path_variable_of_the_shell_changes_nothing(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        arguments = ("verify", "--device=cpu", "--quick", "--cp-size=2", "--dtype=float16")
        for value in ("0", "yes", ""):
            monkeypatch.setenv("NVTE_FUSED_ROPE_THD_TOKEN_LINEAR", value)
            code, output = invoke(*arguments)
            assert code == 0, output
            assert os.environ["NVTE_FUSED_ROPE_THD_TOKEN_LINEAR"] == value

    def test_csv(self, tmp_path: Path) -> None:
        file = tmp_path / "table.csv"
        arguments = ("verify", "--device=cpu", "--quick", "--cp-size=2", "--dtype=float16")
        assert invoke(*arguments, "--csv", str(file))[0] == 0
        lines = file.read_text().splitlines()
        facts = [line for line in lines if line.startswith("# ")]
        assert any(line.startswith("# command: te-overlay") for line in facts)
        assert f"# torch: {torch.__version__}" in facts
        header, row = lines[len(facts) :]
        assert header.startswith("dtype,cp_size,legacy_grid_blocks,legacy_grid_seconds,token_lin")
        assert row.startswith("float16,2,")

    def test_without_a_gpu_cuda_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        code, output = invoke("verify", "--device", "cuda")
        assert code == 2
        assert "torch 2" in output
        assert "sees none" in output

    def test_a_build_without_cuda_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(_native, "WITH_CUDA", False)
        code, output = invoke("verify", "--device", "cuda")
        assert code == 2
        assert "built without CUDA" in output

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--cp-size", "0"], "--cp-size"),
            (["--case=-1"], "--case"),
            (["--seed", "2147483648"], "--seed"),
            (["--cp-size", "2147483647"], "--cp-size"),
            (["--json", "no/such/folder/file"], "--json no/such/folder/file: the file cannot be"),
            (["--csv", "/"], "--csv /: the file cannot be written: Is a directory"),
            (["--dtype", "int8"], "int8"),
            (["--device", "tpu"], "tpu"),
            (["--nonsense"], "nonsense"),
            (["--cp-size"], "cp-size"),
        ],
    )
    def test_bad_options(self, arguments: list[str], message: str) -> None:
        code, output = invoke("verify", *arguments)
        assert code == 2
        assert message in output

    def test_version(self) -> None:
        code, output = invoke("--version")
        assert code == 0
        assert transformer_engine_overlay.__version__ in output
