# SPDX-License-Identifier: Apache-2.0
"""Import TransformerEngine in a process of its own, and tell from the outcome what is wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field

from transformer_engine_overlay.findings import NOTE, PROBLEM, Finding
from transformer_engine_overlay.te_install import reinstall_command

TIMEOUT = 120.0  # seconds
TAIL_LINES = 12

_MARK = "te-overlay-probe "

# TransformerEngine comes first, as in a program: what it finds must not depend on our imports.
# sys.path is that of the parent, so that the current folder counts as much here as it does there.
_PROGRAM = """
import importlib, json, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
mark, path = sys.argv[1:]
sys.path[:] = json.loads(path)
def tell(**facts):
    print("\\n" + mark + json.dumps(facts), flush=True)
importlib.import_module("transformer_engine.pytorch")
tell(imported=True)
from transformer_engine_overlay import OverlayError, enable, gate
extension = sys.modules.get(gate.EXTENSION)
names = ("fused_rope_forward", "fused_rope_backward")
functions = {name: getattr(extension, name, None) for name in names}
kinds = {name: gate.signature_kinds(function) for name, function in functions.items()}
tell(version=gate.te_version(), signatures=kinds, library=gate.patched_library())
try:
    tell(enabled=enable(strict=True))
except OverlayError as error:
    tell(refusal=str(error))
"""


@dataclass
class Probe:
    """What came of an import.

    Attributes
    ----------
    returncode : int or None
        Exit status, minus the signal's number after a crash, None if time ran out.
    output : str
        What the process printed, both streams.
    imported : bool
        Whether the import went through.
    version : str
        TransformerEngine's version as the overlay's gate sees it.
    signatures : dict
        Name of a fused RoPE function to the kinds of its arguments, None if it has no signature.
    enabled : bool
        Whether the overlay could be enabled, or needs not be, with a patched library.
    refusal : str
        Why not.
    library : str
        The version of the overlay that the core library was patched with, "" if it was not.
    """

    returncode: int | None
    output: str = ""
    imported: bool = False
    version: str = ""
    signatures: dict[str, list[str] | None] = field(default_factory=dict)
    enabled: bool = False
    refusal: str = ""
    library: str = ""

    @property
    def succeeded(self) -> bool:
        """Whether the process did all that it was to do."""
        return self.returncode == 0 and self.imported

    def tail(self) -> str:
        """Return the last lines of the output; of a crash, the innermost frames."""
        lines = self.output.splitlines()
        crash = next((i for i, line in enumerate(lines) if line.startswith("Fatal Python")), None)
        start = max(len(lines) - TAIL_LINES, 0) if crash is None else crash
        return "\n".join(lines[start : start + TAIL_LINES])

    def outcome(self) -> str:
        """Say how the process ended."""
        if self.returncode is None:
            return "did not end in time"
        if self.returncode < 0:
            return f"crashed with {_signal_name(-self.returncode)}"
        return "yes" if self.imported else f"no, exit status {self.returncode}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def run_probe(path: Sequence[str], timeout: float = TIMEOUT) -> Probe:
    """Import TransformerEngine and enable the overlay in a process of its own.

    A crash, an endless wait or an exit in there costs this process nothing.

    Parameters
    ----------
    path : sequence of str
        ``sys.path`` to use.
    timeout : float
        Seconds.
    """
    command = [sys.executable, "-X", "faulthandler", "-c", _PROGRAM, _MARK, json.dumps(list(path))]
    # The start-up hook would enable the overlay before the functions were looked at.
    environment = {k: v for k, v in os.environ.items() if k != "TE_OVERLAY_ENABLE"}
    # A file and not a pipe: a grandchild that lives on would hold a pipe open.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        returncode: int | None = None
        try:
            returncode = process.wait(timeout)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return read_probe(returncode, output.read())


def read_probe(returncode: int | None, text: str) -> Probe:
    """Take apart what the process reported and what else it printed."""
    probe = Probe(returncode)
    lines = []
    for line in text.splitlines():
        if line.startswith(_MARK):
            for name, value in json.loads(line[len(_MARK) :]).items():
                setattr(probe, name, value)
        elif line.strip():
            lines.append(line)
    probe.output = "\n".join(lines)
    return probe


@dataclass(frozen=True)
class Cause:
    """A known cause of a failing import.

    Attributes
    ----------
    pattern : str
        Regular expression, looked for in each line of the output.
    what, remedy : str
        For the finding; ``{reinstall}``, ``{torch}`` and ``{version}`` are filled in.
    of_install : bool
        Whether `te_install` may have said the same from the files alone.
    level : str
        Level of the finding.
    """

    pattern: str
    what: str
    remedy: str
    of_install: bool = False
    level: str = PROBLEM


_CUDA_LIBRARY = r"(?:cublas|cudnn|cudart|nvrtc|curand|cusolver|cusparse|cufft|nccl|nvJitLink)"

# The first that matches a line counts.
CAUSES = (
    Cause(
        r"libcuda\.so\S*: cannot open",
        "TransformerEngine cannot be imported without an NVIDIA driver",
        "run `te-overlay doctor` on a machine with a GPU",
        level=NOTE,
    ),
    Cause(
        r"undefined symbol: nvte_",
        "TransformerEngine's PyTorch extension needs a function that its core library lacks: they "
        "are of different versions, or the extension was loaded before the core",
        "import transformer_engine.pytorch, never transformer_engine_torch by itself; if it "
        "persists: {reinstall}",
    ),
    Cause(
        r"lib(?:c10|torch)_cuda\.so\S*: cannot open",
        "TransformerEngine needs a torch built with CUDA, and this one, {torch}, is not",
        "install a torch with CUDA, of the version that TransformerEngine was built for",
    ),
    # mangled names of torch: namespaces c10, torch, at
    Cause(
        r"undefined symbol: _Z\S*(?:3c10|5torch|2at[0-9N])|lib(?:c10|torch)\S*: cannot open",
        "TransformerEngine's PyTorch extension was built for another torch, or with the other C++ "
        "ABI, than the one installed, {torch}",
        "build the extension against this torch, past pip's cache: `pip install "
        "--no-build-isolation --no-cache-dir --force-reinstall --no-deps "
        "transformer-engine-torch{version}`; or install the torch that it was built for",
    ),
    Cause(
        rf"undefined symbol: {_CUDA_LIBRARY}|version `lib{_CUDA_LIBRARY}\S*' not found"
        rf"|lib{_CUDA_LIBRARY}\S*: (?:cannot open|undefined symbol)"
        rf"|{_CUDA_LIBRARY}\S* shared object not found",
        "a CUDA library that TransformerEngine needs is missing or too old; the overlay has no "
        "part in it",
        "look for a stale copy ahead of the one that torch installed (LD_LIBRARY_PATH, CUDA_HOME, "
        "/usr/local/cuda), and for nvidia-* packages of another CUDA version: `pip list`",
    ),
    Cause(
        r"version `(?:GLIBC|GLIBCXX|CXXABI)_\S*' not found",
        "TransformerEngine was built on a newer system: the C or C++ library here is too old",
        "build it from source here: `pip install --no-build-isolation --no-cache-dir --no-binary "
        "transformer-engine-torch transformer-engine-torch{version}`",
    ),
    Cause(
        r"Could not find shared object file|FileNotFoundError: .*\.so",
        "TransformerEngine does not find one of its libraries",
        "work in another folder than its source tree, or install it anew: {reinstall}",
        of_install=True,
    ),
    Cause(
        r"Multiple files found",
        "TransformerEngine finds one of its libraries more than once",
        "{reinstall}",
        of_install=True,
    ),
    Cause(
        r"package version mismatch|Could not find (?:TE core package|.transformer.engine)",
        "TransformerEngine's own check of its packages fails",
        "{reinstall}",
        of_install=True,
    ),
    Cause(
        r"empty .transformer.engine. meta ?package",
        "only the empty metapackage of TransformerEngine is installed",
        "{reinstall}",
        of_install=True,
    ),
    Cause(
        r"^ModuleNotFoundError: No module named .transformer_engine",
        "TransformerEngine's PyTorch package is not there",
        "{reinstall}",
        of_install=True,
    ),
    Cause(
        r"^ModuleNotFoundError: No module named",
        "a Python package that TransformerEngine needs is missing",
        "install it with pip",
    ),
)


def check_import(
    probe: Probe, torch_version: str, te_version: str, explained: bool
) -> list[Finding]:
    """Say why the import failed.

    Parameters
    ----------
    probe : Probe
    torch_version : str
    te_version : str
        From the metadata; "" if unknown.
    explained : bool
        Whether the look at the files has found a problem already.
    """
    if probe.succeeded:
        return []
    if probe.imported:
        what = f"a process that imported TransformerEngine {probe.outcome()} after that"
        if probe.returncode is not None and probe.returncode > 0:
            what = f"TransformerEngine was imported, but then {_last_error(probe.output)}"
        return [Finding(PROBLEM, what, "report it, with the last lines of the import")]
    remedy = "see the last lines of the import; TransformerEngine fails by itself"
    if probe.returncode is None:
        what = "the import of TransformerEngine did not end in time"
        return [Finding(PROBLEM, what, "look for a slow or hanging file system, or a waiting GPU")]
    fill = {
        "reinstall": reinstall_command(te_version),
        "torch": torch_version,
        "version": f"=={te_version.partition('+')[0]}" if te_version else "",
    }
    # The last error first: earlier ones may have been caught and merely logged.
    for line in (_last_error(probe.output), *probe.output.splitlines()):
        cause = next((cause for cause in CAUSES if re.search(cause.pattern, line)), None)
        if cause is not None:
            if explained and cause.of_install:
                return []
            what = f"{cause.what.format(**fill)} ({line.strip()})"
            return [Finding(cause.level, what, cause.remedy.format(**fill))]
    if probe.returncode < 0:
        what = f"the import of TransformerEngine {probe.outcome()}"
        remedy = f"if torch itself works: {fill['reinstall']}"
    else:
        what = f"TransformerEngine cannot be imported: {_last_error(probe.output)}"
    return [Finding(PROBLEM, what, remedy)]


def _last_error(output: str) -> str:
    """Return the last line that begins a message, else the last line."""
    lines = output.splitlines()
    errors = [line for line in lines if re.match(r"[\w.]*(?:Error|Exception|Interrupt)\b", line)]
    return (errors or lines or ["it printed nothing"])[-1]
