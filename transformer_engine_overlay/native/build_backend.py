# SPDX-License-Identifier: Apache-2.0
"""PEP 517/660 build backend: scikit-build-core, plus the search for a CUDA toolkit.

``TE_OVERLAY_CUDA`` chooses what is built:

- unset: with CUDA. Without a toolkit on the machine, NVIDIA's compiler packages are asked for as
  build requirements; where NVIDIA publishes none, only the CPU backend is built.
- ``1``: with CUDA, else the build fails.
- ``0``: the CPU backend only.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import cuda_toolkit
from cuda_toolkit import ACCEPTED, NVIDIA_PACKAGES, Toolkit, say
from scikit_build_core import build as _base

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

CXX_NAMES = ("c++", "g++", "clang++")

Settings = dict[str, Any]
_F = TypeVar("_F", bound=Callable[..., Any])

prepare_metadata_for_build_wheel = _base.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = _base.prepare_metadata_for_build_editable
build_sdist = _base.build_sdist
get_requires_for_build_sdist = _base.get_requires_for_build_sdist


class BuildError(Exception):
    """The build cannot go on; the message says what is missing and what brings it."""


def _readable(hook: _F) -> _F:
    """Let a BuildError end the hook as text; a traceback would bury the advice."""

    @functools.wraps(hook)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return hook(*args, **kwargs)
        except BuildError as error:
            raise SystemExit(f"\ntransformer-engine-overlay: {error}") from None

    return wrapper  # type: ignore[return-value]


def cuda_mode() -> str:
    """Read ``TE_OVERLAY_CUDA``.

    Returns
    -------
    str
        ``"auto"``, ``"on"`` or ``"off"``.
    """
    value = os.environ.get("TE_OVERLAY_CUDA", "")
    modes = {"": "auto", "1": "on", "0": "off"}
    if value not in modes:
        raise BuildError(
            f"TE_OVERLAY_CUDA={value!r} is not a choice. Set it to 1 (CUDA required) or 0 (CPU "
            "backend only), or leave it unset."
        )
    return modes[value]


def has_nvidia_packages() -> bool:
    """Tell whether NVIDIA publishes its compiler as packages for this machine.

    Returns
    -------
    bool
        True on Linux with x86-64 or 64-bit Arm.
    """
    return sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")


def check_host() -> None:
    """Fail early, and readably, without a C++ compiler or Python's headers."""
    compiler = os.environ.get("CXX", "").split()
    if not any(map(shutil.which, compiler[:1] or CXX_NAMES)):
        asked = f"CXX={compiler[0]} is not to be found" if compiler else "none is on PATH"
        raise BuildError(
            f"no C++ compiler: {asked}. Install one: `apt-get install g++` or "
            "`dnf install gcc-c++`."
        )
    include = Path(sysconfig.get_path("include"))
    if not (include / "Python.h").is_file():
        raise BuildError(
            f"Python's headers are missing: no Python.h in {include}. Install them: "
            "`apt-get install python3-dev` or `dnf install python3-devel`."
        )


def cuda_requirements() -> list[str]:
    """List the packages that a build with CUDA needs on this machine.

    Returns
    -------
    list of str
        Empty if the machine has a toolkit, or if CUDA is not wanted or not to be had.
    """
    mode = cuda_mode()
    if mode == "off":
        return []
    toolkit, reasons = cuda_toolkit.find_toolkit(packaged=False)
    if toolkit:
        return []
    if has_nvidia_packages():
        say("no usable CUDA toolkit on this machine: asking for NVIDIA's compiler packages")
        return list(NVIDIA_PACKAGES)
    if mode == "on":
        raise _no_toolkit(reasons)
    return []


def choose_toolkit() -> Toolkit | None:
    """Choose the toolkit to build with.

    Returns
    -------
    Toolkit or None
        None for the CPU backend only.
    """
    mode = cuda_mode()
    if mode == "off":
        return None
    toolkit, reasons = cuda_toolkit.find_toolkit(packaged=True)
    # Never a silent build without kernels where they can be had, as without build isolation.
    if toolkit is None and (mode == "on" or has_nvidia_packages()):
        raise _no_toolkit(reasons)
    return toolkit


def _no_toolkit(reasons: list[str]) -> BuildError:
    packages = " ".join(f'"{name}"' for name in NVIDIA_PACKAGES)
    install = f" or run `pip install {packages}`," if has_nvidia_packages() else ""
    found = "".join(f"\n  - {reason}." for reason in reasons)
    return BuildError(
        f"no usable CUDA toolkit ({ACCEPTED} are accepted).{found}\n"
        f"Point CUDA_HOME to one,{install} or set TE_OVERLAY_CUDA=0 for the CPU backend only."
    )


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    saved = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _configured(settings: Settings | None) -> Iterator[Settings]:
    """Check what the build needs and tell CMake what was found."""
    check_host()
    toolkit = choose_toolkit()
    if toolkit is None:
        say("building the CPU backend only")
        yield {**(settings or {}), "cmake.define.TE_OVERLAY_WITH_CUDA": "OFF"}
        return
    with _environment(cuda_toolkit.environment(toolkit)):
        yield {
            **(settings or {}),
            "cmake.define.TE_OVERLAY_WITH_CUDA": "ON",
            "cmake.define.CMAKE_CUDA_COMPILER": str(toolkit.nvcc),
        }


@_readable
def get_requires_for_build_wheel(config_settings: Settings | None = None) -> list[str]:
    """PEP 517 hook: scikit-build-core's requirements, and a CUDA compiler if needed."""
    check_host()
    return [*_base.get_requires_for_build_wheel(config_settings), *cuda_requirements()]


@_readable
def get_requires_for_build_editable(config_settings: Settings | None = None) -> list[str]:
    """PEP 660 hook: as for a wheel."""
    check_host()
    return [*_base.get_requires_for_build_editable(config_settings), *cuda_requirements()]


@_readable
def build_wheel(
    wheel_directory: str,
    config_settings: Settings | None = None,
    metadata_directory: str | None = None,
) -> str:
    """PEP 517 hook: build the wheel."""
    with _configured(config_settings) as settings:
        return _base.build_wheel(wheel_directory, settings, metadata_directory)


@_readable
def build_editable(
    wheel_directory: str,
    config_settings: Settings | None = None,
    metadata_directory: str | None = None,
) -> str:
    """PEP 660 hook: build the editable wheel."""
    with _configured(config_settings) as settings:
        return _base.build_editable(wheel_directory, settings, metadata_directory)
