# SPDX-License-Identifier: Apache-2.0
"""A TransformerEngine built from a patched tree: recognised, and left to its own launcher."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import typer
from stub_fixtures import thd_arguments
from te_wheels import PRETEND, texts, write_te

import transformer_engine_overlay as overlay
from transformer_engine_overlay import _native, doctor, doctor_checks, gate, te_probe
from transformer_engine_overlay.cli import common
from transformer_engine_overlay.doctor_checks import Activation, Build
from transformer_engine_overlay.findings import NOTE
from transformer_engine_overlay.te_install import Install
from transformer_engine_overlay.te_probe import Probe


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(gate, "patched_library", lambda: "0.0.9")
    return "0.0.9"


class TestRouterStaysAway:
    def test_enable_changes_nothing_and_says_why(
        self, te: ModuleType, library: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        tex = sys.modules["transformer_engine_torch"]
        before = tex.fused_rope_forward, tex.fused_rope_backward
        with caplog.at_level(logging.INFO):
            assert overlay.enable(strict=True)
        (record,) = caplog.records
        assert record.levelno == logging.INFO
        assert "TransformerEngine 2.18.0 is patched with transformer-engine-overlay 0.0.9" in (
            record.getMessage()
        )
        assert (tex.fused_rope_forward, tex.fused_rope_backward) == before
        with pytest.raises(tex.OriginalCalled):
            te.forward(*thd_arguments())

    def test_status(self, te: ModuleType, library: str) -> None:
        overlay.enable(strict=True)
        status = overlay.status()
        assert not status.enabled
        assert status.library == library
        assert status.te_version == "2.18.0"
        assert status.problem == ""
        assert status.sites == {}

    def test_patched_and_disable(self, te: ModuleType, library: str) -> None:
        tex = sys.modules["transformer_engine_torch"]
        with overlay.patched() as works:
            assert works
            with pytest.raises(tex.OriginalCalled):
                te.forward(*thd_arguments())
        overlay.disable()

    def test_a_build_without_cuda_is_no_obstacle(
        self, te: ModuleType, library: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(_native, "WITH_CUDA", False)
        assert overlay.enable(strict=True)

    def test_refusal_from_before_is_forgotten(
        self, stub: Callable[..., None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stub(version="2.9.0")
        assert not overlay.enable()
        monkeypatch.setattr(gate, "patched_library", lambda: "0.1.0")
        assert overlay.enable()
        assert overlay.status().problem == ""

    def test_commands_that_compare_refuse(
        self, te: ModuleType, library: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(typer.Exit):
            common.enable_or_refuse()
        assert "patched with 0.0.9" in " ".join(capsys.readouterr().err.split())

    def test_unpatched_library_is_routed(self, te: ModuleType) -> None:
        assert gate.patched_library() == ""
        assert overlay.enable(strict=True)
        status = overlay.status()
        assert status.enabled
        assert status.library == ""


def test_symbol_of_a_loaded_library(tmp_path: Path) -> None:
    """A library as TransformerEngine loads its own, in the process that the doctor starts."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source, library = tmp_path / "core.c", tmp_path / "core.so"
    source.write_text(f'const char *{gate.PATCHED_SYMBOL}(void) {{ return "0.0.9"; }}\n')
    subprocess.run([compiler, "-shared", "-fPIC", source, "-o", library], check=True)
    load = f"import ctypes\nctypes.CDLL({str(library)!r}, mode=ctypes.RTLD_GLOBAL)\n"
    folder = write_te(tmp_path / "site", PRETEND + load)
    found = te_probe.run_probe([str(folder), *sys.path], 60)
    assert found.imported, found.output
    assert found.library == "0.0.9"
    assert found.enabled
    assert found.refusal == ""


class TestDoctor:
    PROBE = Probe(0, "", True, "2.18.0", {}, True, library="0.0.9")

    def test_finding(self) -> None:
        (finding,) = doctor_checks.check_library(self.PROBE, "0.0.9")
        assert finding.level == NOTE
        assert "core library is patched with transformer-engine-overlay 0.0.9" in finding.what
        assert finding.remedy == "none is needed"

    def test_another_version_is_told(self) -> None:
        found = texts(doctor_checks.check_library(self.PROBE, "0.1.0"), NOTE)
        assert "installed is 0.1.0 -> to have the kernels of 0.1.0" in found
        assert "te-overlay patch apply" in found

    def test_unpatched_is_no_finding(self) -> None:
        assert doctor_checks.check_library(Probe(0, imported=True), "0.1.0") == []

    def test_facts(self) -> None:
        install = Install(module=Path("/site/transformer_engine"))
        facts = doctor.te_facts(install, self.PROBE, "2.18.0")
        assert facts["patched with the overlay"] == "0.0.9"
        facts = doctor.te_facts(install, Probe(0, imported=True), "2.18.0")
        assert facts["patched with the overlay"] == "no"

    def test_nothing_would_be_routed(self) -> None:
        build = Build(True, "90", 13000, 13000)
        obstacle = doctor.find_obstacle(Install(), self.PROBE, build, ())
        hook = Activation("1", ran=True, module=True, pth="/site/x.pth")
        routing = doctor.describe_routing("2.18.0", obstacle, "unset: automatic", hook)
        assert routing == (
            "nothing: the core library is patched with 0.0.9 and runs the kernels by itself"
        )
