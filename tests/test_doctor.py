# SPDX-License-Identifier: Apache-2.0
"""`te-overlay doctor`: each finding appears where it should, and in the healthy case none does."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from te_stub import BACKWARD_OLD
from te_wheels import LIBRARIES, PRETEND, TORCH_SYMBOL, texts, write_te
from typer.testing import CliRunner, Result

from transformer_engine_overlay import _native, doctor, te_install
from transformer_engine_overlay import doctor_checks as checks
from transformer_engine_overlay.cli.doctor import fold, register
from transformer_engine_overlay.doctor_checks import Activation, Build, Gpu, Torch
from transformer_engine_overlay.findings import NOTE, PROBLEM
from transformer_engine_overlay.gate import SIGNATURE
from transformer_engine_overlay.patching import Status
from transformer_engine_overlay.te_install import Install
from transformer_engine_overlay.te_probe import Probe

BUILD = Build(True, "80-real 90", 13000, 13000)
H200 = Gpu(0, "NVIDIA H200", (9, 0))
TORCH = Torch("2.13.0+cu130", "13.0", None, True, (H200,))
HOOK = Activation("", ran=False, module=True, pth="/site/te_overlay_activate.pth")
WORKING = Probe(0, "", True, "2.18.0", {"f": list(SIGNATURE), "b": list(SIGNATURE)}, True)


@pytest.mark.parametrize(
    ("chips", "capability", "code"),
    [
        ("80-real 90", (9, 0), "machine code"),
        ("80-real", (8, 6), "machine code"),
        ("86-real", (8, 0), ""),
        ("80-real", (9, 0), ""),
        ("80-real 90", (10, 3), "PTX"),
        ("90", (8, 9), ""),
        ("90-virtual", (9, 0), "PTX"),
        ("100-real 120-real", (12, 1), "machine code"),
        ("75-real 100-real", (12, 0), ""),
        ("90a", (9, 0), "machine code"),
        ("90a", (10, 0), ""),
        ("100f", (10, 3), "machine code"),
        ("100f", (12, 0), ""),
        ("", (9, 0), ""),
    ],
)
def test_chip_code(chips: str, capability: tuple[int, int], code: str) -> None:
    assert checks.chip_code(chips, capability) == code


class TestMachine:
    def test_healthy(self) -> None:
        install = Install(module=Path("/site/transformer_engine"))
        assert checks.check_package("0.1.0") == []
        assert checks.check_build(BUILD, TORCH, install) == []
        assert checks.check_driver(BUILD, _native.driver_complaint) == []
        assert checks.check_torch(TORCH, BUILD) == []
        assert checks.check_gpus(TORCH.gpus, BUILD) == []

    def test_package_without_metadata(self) -> None:
        assert "metadata" in texts(checks.check_package("0+unknown"), NOTE)

    def test_build_without_cuda(self) -> None:
        build, cpu = Build(False, "", 0, 0), Torch("2.13.0+cpu", None)
        te = Install(module=Path("/site/transformer_engine"))
        assert "without TE_OVERLAY_CUDA=0" in texts(checks.check_build(build, TORCH, Install()))
        assert "built without CUDA" in texts(checks.check_build(build, cpu, te))
        assert "on the CPU" in texts(checks.check_build(build, cpu, Install()), NOTE)
        assert not texts(checks.check_build(build, cpu, Install()))
        assert checks.check_driver(build, _native.driver_complaint) == []
        assert checks.check_gpus([H200], build) == []

    def test_no_driver_is_a_note(self) -> None:
        (finding,) = checks.check_driver(Build(True, "90", 0, 13000), _native.driver_complaint)
        assert finding.level == NOTE

    def test_old_driver(self) -> None:
        found = checks.check_driver(Build(True, "90", 12080, 13000), _native.driver_complaint)
        assert "CUDA up to 12.8" in texts(found)
        assert "update the driver" in texts(found)

    def test_torch_without_cuda_is_a_note(self) -> None:
        (finding,) = checks.check_torch(Torch("2.13.0+cpu", None), BUILD)
        assert (finding.level, "without CUDA" in finding.what) == (NOTE, True)

    def test_rocm_is_a_note(self) -> None:
        (finding,) = checks.check_torch(Torch("2.13.0+rocm", None, "6.4", True), BUILD)
        assert (finding.level, "ROCm" in finding.what) == (NOTE, True)

    def test_torch_newer_than_driver(self) -> None:
        info = Torch("2.13.0+cu130", "13.0")
        found = checks.check_torch(info, Build(True, "90", 12080, 12080))
        assert "the driver supports CUDA up to 12.8" in texts(found)

    def test_torch_that_sees_no_gpu(self) -> None:
        info = Torch("2.13.0+cu130", "13.0")
        assert "CUDA_VISIBLE_DEVICES" in texts(checks.check_torch(info, BUILD), NOTE)
        assert checks.check_torch(info, Build(True, "90", 0, 13000)) == []

    def test_torch_that_fails(self) -> None:
        info = Torch("2.13.0+cu130", "13.0", error="RuntimeError: no device")
        assert "fails to start CUDA: RuntimeError: no device" in texts(
            checks.check_torch(info, BUILD)
        )

    def test_another_cuda_major_is_a_note(self) -> None:
        found = checks.check_torch(TORCH, Build(True, "90", 13000, 12080))
        assert "linked statically" in texts(found, NOTE)
        assert not texts(found)

    def test_gpu_without_code(self) -> None:
        gpus = [Gpu(i, "NVIDIA L4", (8, 9)) for i in range(8)]
        (finding,) = checks.check_gpus(gpus, Build(True, "90", 13000, 13000))
        assert "no compiled chip fits NVIDIA L4 (compute capability 8.9)" in finding.what
        assert "TE_OVERLAY_CUDA_ARCHS=89 pip install" in finding.remedy
        assert finding.level == PROBLEM

    def test_ptx(self) -> None:
        gpu = Gpu(0, "NVIDIA B300", (10, 3))
        assert "TE_OVERLAY_CUDA_ARCHS=103" in texts(checks.check_gpus([gpu], BUILD), NOTE)
        older = Build(True, "90", 13000, 13010)
        assert "PTX of CUDA 13.1" in texts(checks.check_gpus([gpu], older))


class TestGate:
    TE = Install(module=Path("/site/transformer_engine"))

    def test_healthy(self) -> None:
        assert checks.check_te(self.TE, "2.18.0+cu13") == []
        assert checks.check_signatures(WORKING, "2.18.0") == []
        assert checks.check_refusal(WORKING, explained=False) == []

    def test_no_te_is_a_note(self) -> None:
        (finding,) = checks.check_te(Install(), "")
        assert finding.level == NOTE
        assert "transformer-engine[pytorch]" in finding.remedy

    @pytest.mark.parametrize("version", ["1.13.0", "2.2.0", "2.9.1"])
    def test_too_old(self, version: str) -> None:
        found = checks.check_te(self.TE, version)
        assert f"TransformerEngine {version} is older than 2.10" in texts(found)
        assert "go on without the overlay" in texts(found)
        assert checks.check_signatures(Probe(0, signatures={"f": None}), version) == []

    @pytest.mark.parametrize("version", ["2.99.0", "3.0.0.dev1", "unknown"])
    def test_unlisted_is_a_note(self, version: str) -> None:
        found = checks.check_te(self.TE, version)
        assert "te-overlay verify --against te" in texts(found, NOTE)
        assert not texts(found)

    def test_no_signature(self) -> None:
        found = checks.check_signatures(Probe(0, signatures={"fused_rope_forward": None}), "2.18.0")
        assert "fused_rope_forward takes an unknown list" in texts(found)


class TestOverlay:
    def test_healthy(self) -> None:
        ran = Activation("1", ran=True, module=True, pth=HOOK.pth)
        assert checks.check_path_variable("") == []
        assert checks.check_activation(HOOK) == []
        assert checks.check_activation(ran) == []
        assert checks.check_status(Status(enabled=True)) == []

    def test_path_variable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert doctor.read_path_complaint() == ""
        monkeypatch.setenv("NVTE_FUSED_ROPE_THD_TOKEN_LINEAR", "yes")
        found = texts(checks.check_path_variable(doctor.read_path_complaint()))
        assert "NVTE_FUSED_ROPE_THD_TOKEN_LINEAR is 'yes' -> it must be 1" in found

    def test_another_value(self) -> None:
        hook = Activation("yes", ran=True, module=True, pth=HOOK.pth)
        assert "TE_OVERLAY_ENABLE is 'yes' -> it must be 1" in texts(checks.check_activation(hook))

    @pytest.mark.parametrize(
        ("module", "pth", "switches", "why"),
        [
            (False, HOOK.pth, (), "the module te_overlay_activate cannot be imported"),
            (True, "", (), "no site folder has te_overlay_activate.pth"),
            (True, HOOK.pth, ("-S",), "this Python runs with -S"),
            (True, HOOK.pth, (), "after Python had started"),
        ],
    )
    def test_hook_that_did_not_run(
        self, module: bool, pth: str, switches: tuple[str, ...], why: str
    ) -> None:
        found = texts(checks.check_activation(Activation("1", False, module, pth, switches)))
        assert why in found
        assert "enable()" in found
        assert ("start Python without -S" in found) == bool(switches)

    def test_hook_that_would_not_run_is_a_note(self) -> None:
        found = checks.check_activation(Activation("", False, module=False, pth=""))
        assert "TE_OVERLAY_ENABLE=1 would do nothing" in texts(found, NOTE)

    def test_reads_this_interpreter(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor.site, "getsitepackages", lambda: [str(tmp_path)])
        monkeypatch.setattr(doctor.site, "ENABLE_USER_SITE", False)
        assert doctor.read_activation().pth == ""
        (tmp_path / "te_overlay_activate.pth").touch()
        assert doctor.read_activation().pth == str(tmp_path / "te_overlay_activate.pth")

    def test_foreign_patch(self) -> None:
        status = Status(enabled=True, problem="x.fused_rope_forward is patched by others (y)")
        assert "patched by others" in texts(checks.check_status(status))

    @pytest.mark.parametrize(
        ("obstacle", "rule", "hook", "text"),
        [
            ("", "unset: automatic", HOOK, "THD calls of TransformerEngine 2.18.0, forward and "),
            ("", "unset: automatic", HOOK, "automatic path; in programs that call"),
            ("", "1: token-linear always", HOOK, "token-linear always"),
            ("", "0: TransformerEngine's own", HOOK, "nothing: NVTE_FUSED_ROPE_THD_TOKEN_LINEAR=0"),
            ("", "unset", Activation("1", True, True, "/p"), "in each program"),
            ("it is broken", "unset: automatic", HOOK, "nothing: it is broken"),
        ],
    )
    def test_routing(self, obstacle: str, rule: str, hook: Activation, text: str) -> None:
        assert text in doctor.describe_routing("2.18.0", obstacle, rule, hook)

    @pytest.mark.parametrize(
        ("found", "gpus", "obstacle"),
        [
            (WORKING, (H200,), ""),
            (WORKING, (), ""),
            (None, (), "not installed"),
            (Probe(1), (), "cannot be imported"),
            (Probe(0, imported=True, refusal="too old"), (), "too old"),
            (Probe(-11, imported=True), (), "crashed with SIGSEGV"),
            (WORKING, (Gpu(0, "V100", (7, 0)),), "no compiled chip"),
        ],
    )
    def test_obstacle(self, found: Probe | None, gpus: tuple[Gpu, ...], obstacle: str) -> None:
        text = doctor.find_obstacle(Install(), found, BUILD, gpus)
        assert obstacle in text
        assert bool(obstacle) == bool(text)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Pretend to be a healthy machine; calling the fixture installs a stub TransformerEngine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "read_build", lambda: BUILD)
    monkeypatch.setattr(doctor, "read_torch", lambda: TORCH)
    monkeypatch.setattr(doctor, "read_activation", lambda: HOOK)
    monkeypatch.setattr(doctor, "driver_release", lambda: "580.159.04")
    monkeypatch.setattr(doctor.transformer_engine_overlay, "__version__", "0.1.0")
    # As if the environment had none of its own.
    real_module, real_packages = te_install.find_module, te_install.find_packages
    site = tmp_path / "site"
    monkeypatch.setattr(te_install, "find_module", lambda path: real_module([str(site)]))
    monkeypatch.setattr(te_install, "find_packages", lambda path: real_packages([str(site)]))
    monkeypatch.syspath_prepend(str(site))

    def install(**options: str) -> Path:
        return write_te(site, **options)

    return install


class TestExamine:
    def test_healthy(self, machine: Callable[..., Path]) -> None:
        site = machine(code=PRETEND)
        report = doctor.examine()
        assert report.findings == []
        facts = report.facts
        assert facts["TransformerEngine"]["module"] == str(site / "transformer_engine")
        assert facts["TransformerEngine"]["transformer-engine"] == f"2.18.0, wheel, in {site}"
        assert facts["TransformerEngine"]["its THD launch"] == "legacy grid"
        assert facts["TransformerEngine"]["fused_rope_backward"] == "as known"
        assert facts["TransformerEngine"]["overlay can be enabled"] == "yes"
        assert "compute capability 9.0, runs machine" in facts["torch and GPUs"]["cuda:0"]
        assert facts["overlay"]["would be routed"].startswith("THD calls of TransformerEngine")
        assert "transformer_engine" not in sys.modules

    def test_old_te_is_one_problem(self, machine: Callable[..., Path]) -> None:
        machine(code=PRETEND, version="2.9.0", backward=BACKWARD_OLD)
        report = doctor.examine()
        assert report.problems == len(report.findings) == 1
        assert "2.9.0 is older than 2.10" in report.facts["overlay"]["would be routed"]

    def test_foreign_patch_is_a_refusal(self, machine: Callable[..., Path]) -> None:
        after = "module.fused_rope_forward = print\n"
        machine(code=PRETEND, after=after)
        report = doctor.examine()
        assert report.problems == 1
        assert "fused_rope_forward takes" in texts(report.findings)
        assert "another patch" in report.facts["TransformerEngine"]["overlay can be enabled"]

    def test_missing_library_is_one_problem(self, machine: Callable[..., Path]) -> None:
        site = machine(code="raise FileNotFoundError('Could not find shared object file for x')\n")
        (site / LIBRARIES[1]).unlink()
        report = doctor.examine()
        assert report.problems == len(report.findings) == 1
        assert "is missing" in report.findings[0].what
        assert "nothing: TransformerEngine cannot be" in report.facts["overlay"]["would be routed"]
        lines = report.facts["TransformerEngine"]["last lines of the import"]
        assert lines.endswith("Could not find shared object file for x")

    def test_import_that_works_has_its_libraries(self, machine: Callable[..., Path]) -> None:
        # Our list of folders is then not the whole truth.
        site = machine(code=PRETEND)
        (site / LIBRARIES[1]).unlink()
        assert doctor.examine().findings == []

    def test_source_folder_is_one_problem(
        self, machine: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        site = machine(code="raise AssertionError('Could not find `transformer-engine`.')\n")
        monkeypatch.chdir(site)
        monkeypatch.setattr(te_install, "find_packages", lambda path: {})
        for library in LIBRARIES:
            (site / library).unlink()
        missing = iter([site / "transformer_engine", None])
        monkeypatch.setattr(te_install, "find_module", lambda path: next(missing))
        report = doctor.examine()
        assert report.problems == len(report.findings) == 1
        assert "source folder that is not installed" in report.findings[0].what

    def test_problems_come_first(
        self, machine: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("NVTE_FUSED_ROPE_THD_TOKEN_LINEAR", "2")
        report = doctor.examine()
        assert [finding.level for finding in report.findings] == [PROBLEM, NOTE]

    def test_this_machine(self) -> None:
        """Whatever it is, reading it raises nothing."""
        assert doctor.read_torch().version
        assert doctor.read_build().chips == _native.CUDA_ARCHS
        doctor.read_activation()


class TestCommand:
    def run(self, *arguments: str) -> Result:
        app = typer.Typer()
        app.callback()(lambda: None)
        register(app)
        return CliRunner().invoke(app, ["doctor", *arguments])

    def test_without_te(self, machine: Callable[..., Path]) -> None:
        done = self.run()
        assert done.exit_code == 0
        assert done.stdout.rstrip().endswith("doctor: no problems")
        assert "note:    TransformerEngine is not installed" in done.stdout
        assert "nothing: TransformerEngine is not installed" in done.stdout
        assert "transformer-engine[pytorch]" in done.stdout  # brackets are no markup

    def test_without_te_cuda_or_gpu(
        self, machine: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(doctor, "read_build", lambda: Build(False, "", 0, 0))
        monkeypatch.setattr(doctor, "read_torch", lambda: Torch("2.13.0+cpu", None))
        assert self.run().exit_code == 0

    def test_problem(self, machine: Callable[..., Path]) -> None:
        site = machine(code=f"raise ImportError({TORCH_SYMBOL!r})\n")
        done = self.run()
        assert done.exit_code == 1
        assert done.stdout.rstrip().endswith("doctor: 1 problem")
        assert f"ImportError: {TORCH_SYMBOL}" in done.stdout  # nothing is cut off
        assert str(site / "transformer_engine") in done.stdout

    @pytest.mark.parametrize("arguments", [("--json",), ("--json", "-"), ("--json=-",)])
    def test_json(self, machine: Callable[..., Path], arguments: tuple[str, ...]) -> None:
        done = self.run(*arguments)
        report = json.loads(done.stdout)
        assert (done.exit_code, report["problems"]) == (0, 0)
        assert report["facts"]["package"]["compiled chips"] == "80-real 90"
        (finding,) = report["findings"]
        assert set(finding) == {"level", "what", "remedy"}

    def test_json_to_a_file(self, machine: Callable[..., Path], tmp_path: Path) -> None:
        machine(code="raise OSError\n")
        done = self.run("--json", str(tmp_path / "report.json"))
        report = json.loads((tmp_path / "report.json").read_text())
        assert (done.exit_code, report["problems"]) == (1, 1)
        assert "doctor: 1 problem" in done.stdout

    def test_json_to_no_folder(self, tmp_path: Path) -> None:
        assert self.run("--json", str(tmp_path / "none" / "report.json")).exit_code == 2

    def test_fold(self) -> None:
        text = "look here or there, then `pip install --no-build-isolation a-package` and go on"
        lines = fold("remedy", text, 50).splitlines()
        assert lines[0].startswith("remedy:  look")
        assert "         `pip install --no-build-isolation a-package`" in lines
        assert all(line.startswith("         ") for line in lines[1:])


@pytest.mark.parametrize(("value", "count"), [(None, 0), ("0", 0), ("1", 0), ("q", 1), ("", 1)])
def test_dlpack_variable(value: str | None, count: int) -> None:
    findings = checks.check_dlpack_variable(value)
    assert len(findings) == count
    assert all(f"TE_OVERLAY_DLPACK is {value!r}" in finding.what for finding in findings)
