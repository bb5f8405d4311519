# SPDX-License-Identifier: Apache-2.0
"""Find a CUDA toolkit that really compiles and links; part of the build backend."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# The oldest release that ships every part as a package: it runs on the widest range of drivers.
NVIDIA_PACKAGES = tuple(
    f"nvidia-{name}==13.0.*"
    for name in ("cuda-nvcc", "nvvm", "cuda-crt", "cuda-runtime", "cuda-cccl")
)
CUDA_MAJORS = (12, 13)
ACCEPTED = " and ".join(f"{major}.x" for major in CUDA_MAJORS)
SYSTEM_TOOLKITS = (Path("/usr/local/cuda"),)

_PROBE = "__global__ void probe() {}\nint main() { probe<<<1, 1>>>(); return 0; }\n"


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit.

    Attributes
    ----------
    nvcc : Path
        The compiler itself, not a wrapper around it.
    root : Path
        The folder with ``bin``, ``include`` and the libraries.
    version : tuple of int
        Major and minor release.
    """

    nvcc: Path
    root: Path
    version: tuple[int, int]

    def __str__(self) -> str:
        return f"CUDA {self.version[0]}.{self.version[1]} in {self.root}"


class UnusableError(Exception):
    """A toolkit is of no use.

    Parameters
    ----------
    reason : str
        Why, and what would help.
    output : str
        What the compiler said, for the build log.
    """

    def __init__(self, reason: str, output: str = "") -> None:
        super().__init__(reason)
        self.output = output


def say(text: str) -> None:
    """Write a line into the build log."""
    print(f"transformer-engine-overlay: {text}", file=sys.stderr, flush=True)


def inspect_nvcc(nvcc: Path) -> Toolkit:
    """Ask a compiler which toolkit it belongs to.

    Parameters
    ----------
    nvcc : Path
        A file called ``nvcc``: the compiler, a link to it or a wrapper script.

    Returns
    -------
    Toolkit
        Its toolkit, of an accepted release.
    """
    status, text = _run(nvcc, "--version")
    release = re.search(r"release (\d+)\.(\d+)", text)
    if status != 0 or not release:
        raise UnusableError(f"{nvcc} --version names no release", text)
    version = (int(release[1]), int(release[2]))
    if version[0] not in CUDA_MAJORS:
        raise UnusableError(f"{nvcc} is CUDA {version[0]}.{version[1]}; accepted are {ACCEPTED}")
    # A wrapper's own place says nothing about the toolkit: nvcc prints where it takes files from.
    _, text = _run(nvcc, "--dryrun", "-E", "-x", "cu", os.devnull)
    top = re.search(r"^#\$ TOP=(.+?)\s*$", text, re.MULTILINE)
    root = Path(top[1]).resolve() if top else nvcc.resolve().parent.parent
    real = root / "bin" / "nvcc"
    return Toolkit(real if os.access(real, os.X_OK) else nvcc, root, version)


def environment(toolkit: Toolkit) -> dict[str, str]:
    """Give the variables that a toolkit needs to compile and link.

    Parameters
    ----------
    toolkit : Toolkit
        The toolkit in use.

    Returns
    -------
    dict of str to str
        Variables to set on top of the current ones.
    """
    host = os.environ.get("CUDAHOSTCXX") or os.environ.get("NVCC_CCBIN")
    # nvcc reads one name and CMake the other: both must mean the same host compiler.
    variables = {"CUDAHOSTCXX": host, "NVCC_CCBIN": host} if host else {}
    lib = toolkit.root / "lib"
    if (lib / "libcudart_static.a").is_file() and not (toolkit.root / "lib64").exists():
        # The packages have lib only, and their nvcc searches lib64 only.
        old = os.environ.get("LIBRARY_PATH")
        variables["LIBRARY_PATH"] = f"{lib}{os.pathsep}{old}" if old else str(lib)
    return variables


def check_toolkit(toolkit: Toolkit) -> None:
    """Compile and link a kernel; raise `UnusableError`, with advice, if that fails.

    Parameters
    ----------
    toolkit : Toolkit
        The toolkit to try.
    """
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "probe.cu").write_text(_PROBE)
        status, text = _run(
            *(toolkit.nvcc, "-cudart=static", "-o", "probe", "probe.cu"),
            cwd=folder,
            env={**os.environ, **environment(toolkit), "LC_ALL": "C"},
        )
    if status != 0:
        raise UnusableError(f"{toolkit}: {_advice(toolkit, text)}", text)


def find_toolkit(*, packaged: bool) -> tuple[Toolkit | None, list[str]]:
    """Find the first toolkit that can be used, and log why others cannot.

    Parameters
    ----------
    packaged : bool
        Look among the installed Python packages too, after the machine's toolkits.

    Returns
    -------
    Toolkit or None
        None if there is none.
    list of str
        Why those before it are of no use.
    """
    reasons: list[str] = []
    candidates = [*_system_candidates(), *(_packaged_candidates() if packaged else ())]
    for nvcc in dict.fromkeys(candidates):
        if not os.access(nvcc, os.X_OK):
            continue
        try:
            toolkit = inspect_nvcc(nvcc)
            check_toolkit(toolkit)
        except UnusableError as error:
            say(f"not used: {error}\n{error.output.strip()[-2000:]}")
            reasons.append(str(error))
        else:
            say(f"{toolkit}")
            return toolkit, reasons
    return None, list(dict.fromkeys(reasons))


def _system_candidates() -> Iterator[Path]:
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if folder := os.environ.get(variable):
            yield Path(folder) / "bin" / "nvcc"
    if on_path := shutil.which("nvcc"):
        yield Path(on_path)
    for root in SYSTEM_TOOLKITS:
        yield root / "bin" / "nvcc"


def _packaged_candidates() -> Iterator[Path]:
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        yield Path(folder) / "cu13" / "bin" / "nvcc"


def _advice(toolkit: Toolkit, text: str) -> str:
    if re.search(r"unsupported (GNU|clang) version", text):
        return (
            "the C++ compiler is too new for this nvcc. Install an older one and name it, for "
            "example `apt-get install g++-12` and CUDAHOSTCXX=g++-12"
        )
    if "cudart_static" in text or "cudadevrt" in text:
        major, minor = toolkit.version
        return (
            "libcudart_static.a is missing. Install the toolkit's development files, for example "
            f"`apt-get install cuda-cudart-dev-{major}-{minor}`"
        )
    return "its nvcc cannot build a kernel; what it says is in the build log"


def _run(
    *command: str | Path, cwd: str | None = None, env: dict[str, str] | None = None
) -> tuple[int, str]:
    try:
        done = subprocess.run(
            [str(part) for part in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=300,
            check=False,
            cwd=cwd,
            env=env,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 127, str(error)
    return done.returncode, done.stdout
