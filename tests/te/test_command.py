# SPDX-License-Identifier: Apache-2.0
"""The commands that need an installed TransformerEngine."""

from __future__ import annotations

import sys

import pytest
import torch
from programs import run_python
from typer.testing import CliRunner

import transformer_engine_overlay as overlay
from transformer_engine_overlay.cli import app


@pytest.fixture(autouse=True)
def _disabled_afterwards() -> None:
    yield
    overlay.disable()


def test_verify_against_te() -> None:
    result = CliRunner().invoke(app, ["verify", "--against", "te", "--quick"])
    assert result.exit_code == 0, result.output
    assert "PASS: 90 checks" in result.output
    assert "bits of stock TransformerEngine" in result.output


def test_verify_against_te_sees_a_wrong_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    overlay.enable(strict=True)
    tex = sys.modules["transformer_engine_torch"]
    routed = tex.fused_rope_forward

    def wrong(*arguments: object) -> torch.Tensor:
        y = routed(*arguments)
        y.view(torch.int16)[0, 0, 0] ^= 1
        return y

    monkeypatch.setattr(tex, "fused_rope_forward", wrong)
    arguments = ["verify", "--against", "te", "--quick", "--dtype", "bfloat16", "--cp-size", "2"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 1, result.output
    assert "differs from stock TransformerEngine in a bit" in " ".join(result.output.split())
    assert "FAIL: 4 of 4 checks" in result.output


def test_bench_host() -> None:
    result = CliRunner(env={"COLUMNS": "160"}).invoke(app, ["bench", "host", "--rounds", "2"])
    assert result.exit_code == 0, result.output
    assert "fused_rope_backward" in result.output


def test_activation_by_the_variable() -> None:
    code = (
        "import transformer_engine.pytorch, transformer_engine_overlay as overlay\n"
        "s = overlay.status()\nassert s.enabled, s\nprint(s.te_version, s.activation)\n"
    )
    done = run_python(code, TE_OVERLAY_ENABLE="1")
    assert "the start-up hook ran" in done.stdout
