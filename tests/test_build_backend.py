# SPDX-License-Identifier: Apache-2.0
"""The search for a CUDA toolkit, what a build asks for, and what it says when it cannot go on."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("scikit_build_core")

NATIVE = Path(__file__).parents[1] / "transformer_engine_overlay" / "native"
PARTS = ["nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime"]
PARTS += ["nvidia-cuda-cccl"]
TOO_NEW = "host_config.h:137:2: error: #error -- unsupported GNU version! gcc versions later than"
NO_STATIC = "/usr/bin/ld: cannot find -lcudart_static: No such file or directory"

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the fake compilers are scripts")


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def fake_toolkit(
    root: Path, release: str = "13.0", *, error: str = "", chips: str = "75 80 86 89 90 100 120"
) -> Path:
    """Write a toolkit whose nvcc builds everything, or nothing and says ``error``."""
    listing = " ".join(f"compute_{chip}" for chip in chips.split())
    script(
        root / "bin" / "nvcc",
        f"""
case "$1" in
  --version) echo "Cuda compilation tools, release {release}, V{release}.1";;
  --dryrun) printf '#$ _HERE_={root}/bin\\n#$ TOP={root}/bin/..\\n';;
  --list-gpu-arch) printf '%s\\n' {listing};;
  *) echo '{error}'; [ -z '{error}' ];;
esac""",
    )
    return root


@pytest.fixture
def toolkits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """Give the module that finds toolkits, on a machine that has none."""
    monkeypatch.syspath_prepend(str(NATIVE))
    module = importlib.import_module("cuda_toolkit")
    for name in ("CUDA_HOME", "CUDA_PATH", "CUDAHOSTCXX", "NVCC_CCBIN", "LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(module, "SYSTEM_TOOLKITS", (tmp_path / "default",))
    monkeypatch.setattr(module, "_packaged_candidates", lambda: iter(()))
    return module


@pytest.fixture
def backend(toolkits: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """Give the build backend, on a Linux machine with a C++ compiler and no toolkit."""
    module = importlib.import_module("build_backend")
    script(tmp_path / "bin" / "g++", "exit 0")
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "Python.h").touch()
    for name in ("CXX", "TE_OVERLAY_CUDA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module.sysconfig, "get_path", lambda _: str(tmp_path / "include"))
    monkeypatch.setattr(module.sys, "platform", "linux")
    monkeypatch.setattr(module.platform, "machine", lambda: "x86_64")
    return module


@pytest.mark.parametrize("where", ["CUDA_HOME", "CUDA_PATH", "PATH", "default"])
def test_toolkit_is_found(
    toolkits: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    root = fake_toolkit(tmp_path / ("default" if where == "default" else "cuda"), "12.4")
    if where != "default":
        monkeypatch.setenv(where, str(root / "bin" if where == "PATH" else root))
    toolkit, reasons = toolkits.find_toolkit(packaged=False)
    assert (toolkit.nvcc, toolkit.root, toolkit.version) == (root / "bin/nvcc", root, (12, 4))
    assert reasons == []


def test_cuda_home_comes_before_path(
    toolkits: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home = fake_toolkit(tmp_path / "home", "12.8")
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.setenv("PATH", str(fake_toolkit(tmp_path / "other") / "bin"))
    assert toolkits.find_toolkit(packaged=False)[0].root == home


def test_wrapper_on_path_leads_to_the_toolkit_behind_it(
    toolkits: ModuleType, tmp_path: Path
) -> None:
    root = fake_toolkit(tmp_path / "cuda-13.0")
    script(tmp_path / "bin" / "nvcc", f'exec {root}/bin/nvcc "$@"')
    toolkit, _ = toolkits.find_toolkit(packaged=False)
    assert (toolkit.nvcc, toolkit.root) == (root / "bin/nvcc", root)


@pytest.mark.parametrize("release", ["11.8", "14.0"])
def test_release_that_is_not_accepted_counts_as_none(
    toolkits: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path, release: str
) -> None:
    fake_toolkit(tmp_path / "default", release)
    toolkit, reasons = toolkits.find_toolkit(packaged=False)
    assert toolkit is None
    assert f"is CUDA {release}; accepted are 12.x and 13.x" in reasons[0]
    assert reasons[0] in capsys.readouterr().err


def test_broken_compiler_counts_as_none(toolkits: ModuleType, tmp_path: Path) -> None:
    script(tmp_path / "bin" / "nvcc", "echo no such driver; exit 3")
    toolkit, reasons = toolkits.find_toolkit(packaged=False)
    assert toolkit is None
    assert reasons == [f"{tmp_path}/bin/nvcc --version names no release"]


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (TOO_NEW, "apt-get install g++-12` and CUDAHOSTCXX=g++-12"),
        (
            NO_STATIC,
            "libcudart_static.a is missing. Install the toolkit's development files, for "
            "example `apt-get install cuda-cudart-dev-12-4`",
        ),
        ("cicc: not found", "cannot build a kernel"),
    ],
)
def test_toolkit_that_cannot_build_gives_way_to_the_next(
    toolkits: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    error: str,
    advice: str,
) -> None:
    broken = fake_toolkit(tmp_path / "broken", "12.4", error=error)
    monkeypatch.setenv("CUDA_HOME", str(broken))
    whole = fake_toolkit(tmp_path / "default")
    toolkit, reasons = toolkits.find_toolkit(packaged=False)
    assert toolkit.root == whole
    assert reasons[0].startswith(f"CUDA 12.4 in {broken}: ")
    assert advice in reasons[0]
    assert error in capsys.readouterr().err


def test_packaged_compiler_is_searched_on_the_import_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(NATIVE))
    toolkits = importlib.import_module("cuda_toolkit")
    (tmp_path / "nvidia" / "cu13").mkdir(parents=True)
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert tmp_path / "nvidia/cu13/bin/nvcc" in list(toolkits._packaged_candidates())


def test_folder_of_the_static_runtime(
    toolkits: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    toolkit = toolkits.Toolkit(tmp_path / "bin/nvcc", tmp_path, (13, 0))
    assert toolkits.environment(toolkit) == {}
    lib = tmp_path / "lib"
    lib.mkdir()
    (lib / "libcudart_static.a").touch()
    assert toolkits.environment(toolkit) == {"LIBRARY_PATH": str(lib)}
    monkeypatch.setenv("LIBRARY_PATH", "/before")
    assert toolkits.environment(toolkit) == {"LIBRARY_PATH": f"{lib}:/before"}
    (tmp_path / "lib64").symlink_to("lib")
    assert toolkits.environment(toolkit) == {}


@pytest.mark.parametrize("name", ["CUDAHOSTCXX", "NVCC_CCBIN"])
def test_host_compiler_is_the_same_for_cmake_and_nvcc(
    toolkits: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setenv(name, "g++-12")
    variables = toolkits.environment(toolkits.Toolkit(tmp_path, tmp_path, (13, 0)))
    assert variables == {"CUDAHOSTCXX": "g++-12", "NVCC_CCBIN": "g++-12"}


@pytest.mark.parametrize("value", ["2", "on", "yes", "true", " 1"])
@pytest.mark.parametrize(
    "hook", ["get_requires_for_build_wheel", "get_requires_for_build_editable"]
)
def test_any_other_value_is_an_error_that_names_it(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, hook: str, value: str
) -> None:
    monkeypatch.setenv("TE_OVERLAY_CUDA", value)
    with pytest.raises(SystemExit, match=f"TE_OVERLAY_CUDA='{value}' is not a choice"):
        getattr(backend, hook)()


@pytest.mark.parametrize("value", [None, "", "1"])
def test_p09_without_a_toolkit_the_compiler_packages_of_one_release_are_asked_for(
    backend: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    value: str | None,
) -> None:
    if value is not None:
        monkeypatch.setenv("TE_OVERLAY_CUDA", value)
    expected = {f"{part}==13.0.*" for part in PARTS}
    assert set(backend.get_requires_for_build_wheel()) >= expected
    assert set(backend.get_requires_for_build_editable()) >= expected
    assert "asking for NVIDIA's compiler packages" in capsys.readouterr().err


@pytest.mark.parametrize(("value", "release"), [("", "13.2"), ("1", "12.0"), ("0", "11.0")])
def test_no_packages_with_a_toolkit_or_without_cuda(
    backend: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    value: str,
    release: str,
) -> None:
    fake_toolkit(tmp_path / "default", release)
    monkeypatch.setenv("TE_OVERLAY_CUDA", value)
    assert not [name for name in backend.get_requires_for_build_wheel() if "nvidia" in name]


def test_p09_cpu_only_runs_no_nvcc(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script(tmp_path / "bin" / "nvcc", f"echo > {tmp_path}/was-run")
    monkeypatch.setenv("TE_OVERLAY_CUDA", "0")
    backend.get_requires_for_build_wheel()
    assert backend.choose_toolkit() is None
    assert not (tmp_path / "was-run").exists()


def test_where_nvidia_has_no_packages(backend: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend.sys, "platform", "darwin")
    assert backend.cuda_requirements() == []
    assert backend.choose_toolkit() is None
    monkeypatch.setenv("TE_OVERLAY_CUDA", "1")
    for ask in (backend.cuda_requirements, backend.choose_toolkit):
        with pytest.raises(backend.BuildError, match="no usable CUDA toolkit") as caught:
            ask()
        assert "pip install" not in str(caught.value)


def test_build_never_drops_cuda_silently(backend: ModuleType, tmp_path: Path) -> None:
    fake_toolkit(tmp_path / "default", "11.8")
    with pytest.raises(SystemExit) as caught:
        backend.build_wheel("wheels")
    text = str(caught.value)
    assert "is CUDA 11.8" in text
    assert "TE_OVERLAY_CUDA=0" in text
    assert all(f'"{part}==13.0.*"' in text for part in PARTS)


def test_packaged_compiler_is_used_after_the_machines(
    backend: ModuleType, toolkits: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    packaged = fake_toolkit(tmp_path / "nvidia" / "cu13")
    monkeypatch.setattr(toolkits, "_packaged_candidates", lambda: iter([packaged / "bin" / "nvcc"]))
    assert backend.choose_toolkit().root == packaged
    machines = fake_toolkit(tmp_path / "default", "12.6")
    assert backend.choose_toolkit().root == machines


@pytest.mark.parametrize("cxx", [None, "/nowhere/g++ -m64"])
def test_no_compiler(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cxx: str | None
) -> None:
    if cxx:
        monkeypatch.setenv("CXX", cxx)
    else:
        (tmp_path / "bin" / "g++").unlink()
    for hook in (backend.get_requires_for_build_wheel, lambda: backend.build_wheel("wheels")):
        with pytest.raises(SystemExit, match=r"no C\+\+ compiler") as caught:
            hook()
        assert "apt-get install g++" in str(caught.value)
        assert "dnf install gcc-c++" in str(caught.value)


def test_no_python_headers(backend: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "include" / "Python.h").unlink()
    with pytest.raises(SystemExit, match=r"Python's headers are missing.*python3-dev"):
        backend.get_requires_for_build_wheel()


@pytest.mark.parametrize("hook", ["build_wheel", "build_editable"])
def test_cmake_is_told_what_was_found(
    backend: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hook: str
) -> None:
    root = fake_toolkit(tmp_path / "default")
    (root / "lib").mkdir()
    (root / "lib" / "libcudart_static.a").touch()
    seen = {}

    def build(directory: str, settings: dict[str, str], metadata: str | None) -> str:
        seen.update(settings, library_path=os.environ.get("LIBRARY_PATH"))
        return "a.whl"

    monkeypatch.setattr(backend._base, hook, build)
    assert getattr(backend, hook)("wheels", {"build-dir": "b"}) == "a.whl"
    assert seen == {
        "build-dir": "b",
        "cmake.define.TE_OVERLAY_WITH_CUDA": "ON",
        "cmake.define.CMAKE_CUDA_COMPILER": str(root / "bin" / "nvcc"),
        "library_path": str(root / "lib"),
    }
    assert "LIBRARY_PATH" not in os.environ

    seen.clear()
    monkeypatch.setenv("TE_OVERLAY_CUDA", "0")
    getattr(backend, hook)("wheels")
    assert seen == {"cmake.define.TE_OVERLAY_WITH_CUDA": "OFF", "library_path": None}


CMAKE = shutil.which("cmake")


def select_chips(
    tmp_path: Path, requested: str, known: str = "75 80 86 87 89 90 100 120"
) -> tuple[int, str]:
    root = fake_toolkit(tmp_path / "cuda", chips=known)
    (tmp_path / "run.cmake").write_text(
        "cmake_minimum_required(VERSION 3.18)\n"
        f'include("{NATIVE}/cuda_chips.cmake")\n'
        f'te_overlay_cuda_chips("{root}/bin/nvcc" "$ENV{{TE_OVERLAY_CUDA_ARCHS}}" result)\n'
        'message(STATUS "result=${result}.")\n'
    )
    done = subprocess.run(
        [str(CMAKE), "-P", str(tmp_path / "run.cmake")],
        env={**os.environ, "TE_OVERLAY_CUDA_ARCHS": requested},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.mark.skipif(CMAKE is None, reason="no cmake")
class TestChips:
    def test_default(self, tmp_path: Path) -> None:
        status, text = select_chips(tmp_path, "")
        assert status == 0
        assert "result=75-real;80-real;86-real;89-real;90;100-real;120-real." in text
        assert "left out" not in text

    def test_default_with_an_older_compiler(self, tmp_path: Path) -> None:
        status, text = select_chips(tmp_path, "", known="50 75 80 86 89 90")
        assert status == 0
        assert "result=75-real;80-real;86-real;89-real;90." in text
        assert "this nvcc does not know, left out: 100-real 120-real" in text

    @pytest.mark.parametrize(
        "requested", ["80-real;90", "80-real,90", "80-real 90", " 80-real, 90;"]
    )
    def test_separators(self, tmp_path: Path, requested: str) -> None:
        assert "result=80-real;90." in select_chips(tmp_path, requested)[1]

    def test_suffixes_and_repeats(self, tmp_path: Path) -> None:
        requested = "90a-real 90a-real 100f 89-virtual"
        assert "result=90a-real;100f;89-virtual." in select_chips(tmp_path, requested)[1]

    def test_requested_chip_that_the_compiler_does_not_know(self, tmp_path: Path) -> None:
        status, text = select_chips(tmp_path, "90 37-real", known="75 80 90")
        assert status != 0
        assert "TE_OVERLAY_CUDA_ARCHS: this nvcc does not know the chip '37-real'." in text
        assert "knows 75 80 90." in text

    @pytest.mark.parametrize("requested", ["hopper", "sm_90", "9.0", "90-ptx"])
    def test_not_a_chip(self, tmp_path: Path, requested: str) -> None:
        status, text = select_chips(tmp_path, requested)
        assert status != 0
        assert f"TE_OVERLAY_CUDA_ARCHS: '{requested}' is not a chip." in text

    def test_compiler_that_lists_none(self, tmp_path: Path) -> None:
        status, text = select_chips(tmp_path, "", known="")
        assert status != 0
        assert "--list-gpu-arch' names no chips" in text
