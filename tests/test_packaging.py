# SPDX-License-Identifier: Apache-2.0
"""What the sdist and the wheel hold, and that the wheel works where it is installed."""

from __future__ import annotations

import email.message
import email.parser
import importlib.metadata
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("build")

ROOT = Path(__file__).parents[1]
PACKAGE = "transformer_engine_overlay"
SIZE_LIMIT = 20 * 1024 * 1024

pytestmark = pytest.mark.slow


def call(*command: str | Path, cwd: Path, **variables: str) -> str:
    """Run a command away from the source tree; show what it printed if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**environment, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command} exited {done.returncode}:\n{done.stdout}"
    return done.stdout


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    call(sys.executable, "-m", "build", "--sdist", "--outdir", folder, ROOT, cwd=folder)
    (path,) = folder.glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, sdist]
    call(*command, cwd=folder, TE_OVERLAY_CUDA="0")
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.parser.Parser().parsestr(archive.read(name).decode())


@pytest.fixture(scope="module")
def scripts(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel in a fresh environment that borrows only its dependencies."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("venv")
    venv.create(folder, with_pip=True, symlinks=True)
    scripts = folder / "bin"
    call(scripts / "python", "-m", "pip", "install", "--no-deps", wheel, cwd=folder)
    own = call(
        *(scripts / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"),
        cwd=folder,
    )
    # A plain path entry: searched last, and the .pth files in it (editable installs) stay unread.
    borrowed = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    (Path(own.strip()) / "borrowed.pth").write_text("".join(f"{path}\n" for path in borrowed))
    return scripts


def test_sdist_has_all_that_a_build_and_the_tests_need(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("patches", "tests", "ci", "docs", f"{PACKAGE}/common", f"{PACKAGE}/native"):
        expected = {
            str(path.relative_to(ROOT))
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        assert expected <= inside
    assert f"{PACKAGE}/native/CMakeLists.txt" in inside
    assert {"pyproject.toml", "README.md", "LICENSE", "PKG-INFO"} <= inside
    assert not [name for name in inside if "__pycache__" in name or name.startswith(".git/")]


def test_wheel_ships_the_package_the_headers_and_the_patches(names: list[str]) -> None:
    expected = {f"{PACKAGE}/py.typed", f"{PACKAGE}/__init__.py", f"{PACKAGE}/patches/README.md"}
    for path in (ROOT / PACKAGE / "common").rglob("*"):
        if path.is_file():
            expected.add(str(path.relative_to(ROOT)))
    for path in (ROOT / PACKAGE).glob("*.py"):
        expected.add(str(path.relative_to(ROOT)))
    for path in (ROOT / "patches").rglob("*"):
        if path.is_file():
            expected.add(f"{PACKAGE}/{path.relative_to(ROOT)}")
    assert expected <= set(names)
    assert any(re.fullmatch(rf"{PACKAGE}/_native\..*(so|pyd)", name) for name in names)


def test_p06_wheel_ships_nothing_else(names: list[str]) -> None:
    ours = (f"{PACKAGE}/", f"{PACKAGE}-", "te_overlay_activate.")
    assert not [name for name in names if not name.startswith(ours)]
    assert not [name for name in names if name.startswith("transformer_engine/")]
    assert not [name for name in names if name.startswith(f"{PACKAGE}/native/")]
    assert not [name for name in names if re.search(r"(^|/)(tests|ci|docs|__pycache__)/", name)]
    # TransformerEngine searches for libraries by this prefix.
    assert not [name for name in names if "libtransformer_engine" in name]


def test_wheel_is_small(wheel: Path) -> None:
    assert wheel.stat().st_size < SIZE_LIMIT


def test_installed_package_is_small() -> None:
    """The one that these tests run on, which may hold the code of all chips."""
    files = importlib.metadata.files("transformer-engine-overlay") or []
    assert sum(Path(f.locate()).stat().st_size for f in files if f.locate().exists()) < SIZE_LIMIT


def test_start_up_hook_lies_beside_the_package(names: list[str]) -> None:
    assert {"te_overlay_activate.py", "te_overlay_activate.pth"} <= set(names)
    assert not [name for name in names if name.startswith(f"{PACKAGE}/activation/")]


def test_p03_dependencies(metadata: email.message.Message) -> None:
    requirements = metadata.get_all("Requires-Dist") or []
    assert "torch" in requirements
    assert not [
        line for line in requirements if re.match(r"transformer[-_]engine(?![-_]overlay)", line)
    ]
    needed = [line for line in requirements if "extra ==" not in line]
    assert not [line for line in needed if line.startswith("nvidia")]
    assert metadata["Name"] == "transformer-engine-overlay"
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"


def test_installed_package_comes_from_the_wheel(
    scripts: Path, metadata: email.message.Message, tmp_path: Path
) -> None:
    code = f"import {PACKAGE} as package; print(package.__file__); print(package.__version__)"
    file, version = call(scripts / "python", "-c", code, cwd=tmp_path).splitlines()[-2:]
    assert Path(file).is_relative_to(scripts.parent)
    assert version == metadata["Version"]


def test_installed_command_verifies(scripts: Path, tmp_path: Path) -> None:
    call(scripts / "te-overlay", "verify", "--quick", "--device", "cpu", cwd=tmp_path)


def test_installed_module_shows_its_help(scripts: Path, tmp_path: Path) -> None:
    text = call(scripts / "python", "-m", PACKAGE, "--help", cwd=tmp_path)
    assert "verify" in text


def test_installed_command_finds_its_patches(scripts: Path, tmp_path: Path) -> None:
    code = (
        f"from {PACKAGE}.patch_series import patches_folder, read_series\n"
        "print(patches_folder())\nprint(len(read_series()))"
    )
    folder, count = call(scripts / "python", "-c", code, cwd=tmp_path).splitlines()[-2:]
    assert Path(folder).is_relative_to(scripts.parent)
    assert int(count) == len(list((ROOT / "patches").glob("*.patch")))
    text = call(scripts / "te-overlay", "patch", "apply", "--help", cwd=tmp_path)
    assert "--te-source" in text
