# SPDX-License-Identifier: Apache-2.0
"""A stub TransformerEngine that looks like an install of wheels, for the tests of the doctor."""

from __future__ import annotations

from pathlib import Path

from te_stub import write_stub

from transformer_engine_overlay.findings import PROBLEM, Finding

WHEELS = {"transformer_engine": True, "transformer_engine_cu13": False}
ALL_WHEELS = {**WHEELS, "transformer_engine_torch": False}
LIBRARIES = ("transformer_engine/wheel_lib/libtransformer_engine.so", "transformer_engine_torch.so")
# what the loader says of an extension built for another torch
TORCH_SYMBOL = (
    "transformer_engine_torch.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationESs"
)
# The process that imports the stub may have a build without CUDA, on a machine without a driver.
PRETEND = """
from transformer_engine_overlay import _native
_native.WITH_CUDA = True
_native.cuda_versions = lambda: (0, 13000)
"""


def add_package(folder: Path, name: str, version: str = "2.18.0", pure: bool | None = None) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    if pure is not None:
        (info / "WHEEL").write_text(f"Wheel-Version: 1.0\nRoot-Is-Purelib: {str(pure).lower()}\n")


def add_libraries(folder: Path, names: tuple[str, ...] = LIBRARIES) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def write_te(folder: Path, code: str = "", after: str = "", **options: str) -> Path:
    """Write a stub that looks like an install of wheels; `code` runs first in its import."""
    write_stub(folder, **options)
    for name, pure in ALL_WHEELS.items():
        add_package(folder, name, options.get("version", "2.18.0"), pure)
    add_libraries(folder)
    init = folder / "transformer_engine" / "pytorch" / "__init__.py"
    init.write_text(code + init.read_text() + after)
    return folder


def texts(findings: list[Finding], level: str = PROBLEM) -> str:
    """Join what is said at a level; every finding must have a remedy."""
    assert all(finding.what and finding.remedy for finding in findings)
    return "\n".join(f.what + " -> " + f.remedy for f in findings if f.level == level)
