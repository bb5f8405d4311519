# SPDX-License-Identifier: Apache-2.0
"""`te-overlay doctor`: what a bug report should hold, and what is wrong, with its remedy.

Facts are collected first; each check then looks at facts alone, so that a test can hand it any.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import site
import sys
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

import transformer_engine_overlay
from transformer_engine_overlay import _native, gate, patching, te_install, te_probe
from transformer_engine_overlay.environment import (
    PATH_VARIABLE,
    cuda_version_text,
    driver_release,
)
from transformer_engine_overlay.findings import NOTE, PROBLEM, Finding
from transformer_engine_overlay.te_install import Install
from transformer_engine_overlay.te_probe import Probe
from transformer_engine_overlay.te_versions import (
    FIRST_SUPPORTED,
    LAST_LISTED,
    find_release,
    parse_version,
)

INSTALL_TE = "`pip install --no-build-isolation transformer-engine[pytorch]`"
REINSTALL_SELF = "`pip install --force-reinstall --no-deps transformer-engine-overlay`"


@dataclass
class Report:
    """Facts by section and name, and findings.

    Attributes
    ----------
    facts : dict
        Section to name to text, in the order to show them in.
    findings : list of Finding
        Problems first.
    """

    facts: dict[str, dict[str, str]]
    findings: list[Finding]

    @property
    def problems(self) -> int:
        """The number of problems."""
        return sum(finding.level == PROBLEM for finding in self.findings)

    def to_json(self) -> dict[str, object]:
        """Return what ``--json`` writes."""
        findings = [vars(finding) for finding in self.findings]
        return {"facts": self.facts, "findings": findings, "problems": self.problems}


@dataclass(frozen=True)
class Build:
    """How this package was built, and what the driver offers; versions as CUDA's integers."""

    with_cuda: bool
    chips: str
    driver: int
    runtime: int


@dataclass(frozen=True)
class Gpu:
    """A GPU that torch sees."""

    index: int
    name: str
    capability: tuple[int, int]


@dataclass(frozen=True)
class Torch:
    """What torch is and sees."""

    version: str
    cuda: str | None
    hip: str | None = None
    available: bool = False
    gpus: tuple[Gpu, ...] = ()
    error: str = ""


@dataclass(frozen=True)
class Activation:
    """What decides whether ``TE_OVERLAY_ENABLE=1`` takes effect at the start of Python."""

    value: str
    ran: bool
    module: bool
    pth: str
    switches: tuple[str, ...] = field(default=())


def examine(timeout: float = te_probe.TIMEOUT) -> Report:
    """Look at everything.

    TransformerEngine is imported in a process of its own, never in this one.

    Parameters
    ----------
    timeout : float
        Seconds that its import may take.
    """
    build, torch_info, activation = read_build(), read_torch(), read_activation()
    cwd, purelib = Path.cwd(), Path(sysconfig.get_paths()["purelib"])
    install = te_install.find_install(sys.path, cwd, purelib)
    probe = te_probe.run_probe(sys.path, timeout) if install.module else None
    status = patching.status()
    path_complaint = read_path_complaint()
    te_version = (probe.version if probe else "") or install.version

    findings = check_package(transformer_engine_overlay.__version__)
    findings += check_build(build, torch_info, install)
    findings += check_driver(build, _native.driver_complaint)
    findings += check_torch(torch_info, build)
    findings += check_gpus(torch_info.gpus, build)
    files = te_install.check_packages(install, torch_info.cuda)
    files += te_install.check_module(install, cwd)
    files += te_install.check_libraries(install, purelib)
    findings += files
    findings += check_te(install, te_version)
    if probe is not None:
        explained = any(finding.level == PROBLEM for finding in files)
        findings += te_probe.check_import(probe, torch_info.version, te_version, explained)
        findings += check_signatures(probe, te_version)
        findings += check_refusal(probe, any(f.level == PROBLEM for f in findings))
    findings += check_path_variable(path_complaint)
    findings += check_activation(activation)
    findings += check_status(status)

    routing = describe_routing(
        te_version, install, probe, build, torch_info, path_complaint, activation
    )
    facts = {
        "package": package_facts(build),
        "Python": python_facts(),
        "torch and GPUs": torch_facts(torch_info, build),
        "TransformerEngine": te_facts(install, probe, te_version),
        "overlay": overlay_facts(status, activation, routing),
    }
    return Report(facts, sorted(findings, key=lambda finding: finding.level != PROBLEM))


# What is there


def read_build() -> Build:
    """Ask the native module."""
    driver, runtime = _native.cuda_versions()
    return Build(_native.WITH_CUDA, _native.CUDA_ARCHS, driver, runtime)


def read_torch() -> Torch:
    """Ask torch, which may fail to start CUDA."""
    version, cuda, hip = torch.__version__, torch.version.cuda, torch.version.hip
    try:
        if not torch.cuda.is_available():
            return Torch(version, cuda, hip)
        gpus = tuple(
            Gpu(i, torch.cuda.get_device_name(i), torch.cuda.get_device_capability(i))
            for i in range(torch.cuda.device_count())
        )
    except Exception as error:  # whatever a broken CUDA raises is a finding
        return Torch(version, cuda, hip, error=f"{type(error).__name__}: {error}")
    return Torch(version, cuda, hip, True, gpus)


def read_path_complaint() -> str:
    """Return what is wrong with the value of ``NVTE_FUSED_ROPE_THD_TOKEN_LINEAR``, "" if nothing."""
    try:
        _native.path_request()
    except ValueError as error:
        return str(error)
    return ""


def read_activation() -> Activation:
    """Look for the start-up hook where this interpreter looks for it."""
    folders = site.getsitepackages()
    if site.ENABLE_USER_SITE:
        folders.append(site.getusersitepackages())
    files = [Path(folder, f"{patching.ACTIVATION_MODULE}.pth") for folder in folders]
    found = [str(file) for file in files if file.is_file()]
    switches = {"-S": sys.flags.no_site, "-I": sys.flags.isolated, "-s": sys.flags.no_user_site}
    return Activation(
        value=os.environ.get(patching.ENABLE_VARIABLE, ""),
        ran=patching.ACTIVATION_MODULE in sys.modules,
        module=importlib.util.find_spec(patching.ACTIVATION_MODULE) is not None,
        pth=found[0] if found else "",
        switches=tuple(switch for switch, on in switches.items() if on),
    )


# What is wrong with it


def check_package(version: str) -> list[Finding]:
    """Check that our own metadata is there."""
    if version != "0+unknown":
        return []
    what = "the metadata of transformer-engine-overlay is missing: it was not installed by pip"
    return [Finding(NOTE, what, "install it with pip, to have its version in reports")]


def check_build(build: Build, info: Torch, install: Install) -> list[Finding]:
    """Check that the package has CUDA code where that is wanted."""
    if build.with_cuda:
        return []
    wanted = (info.available and not info.hip) or install.module is not None
    what = "transformer-engine-overlay was built without CUDA: it runs on the CPU alone"
    remedy = "reinstall it from source without TE_OVERLAY_CUDA=0 if it is to use a GPU"
    return [Finding(PROBLEM if wanted else NOTE, what, remedy)]


def check_driver(build: Build, complaint: Callable[[int, int], str]) -> list[Finding]:
    """Check that there is a driver, and that it is new enough for the runtime built in."""
    if not build.with_cuda:
        return []
    if not build.driver:
        what = "there is no NVIDIA driver here: everything runs on the CPU"
        return [Finding(NOTE, what, "none is needed to run on the CPU")]
    what, _, remedy = complaint(build.driver, build.runtime).partition("; ")
    return [Finding(PROBLEM, what, remedy)] if what else []


def check_torch(info: Torch, build: Build) -> list[Finding]:
    """Check that torch can use the GPU, if there is one."""
    if info.hip:
        what = f"torch {info.version} is for ROCm: its cuda tensors are not for these kernels"
        return [Finding(NOTE, what, "use a torch built with CUDA, or the CPU")]
    if not info.cuda:
        what = f"torch {info.version} was built without CUDA: it sees no GPU"
        return [Finding(NOTE, what, "install a torch built with CUDA if it is to use a GPU")]
    if info.error:
        what = f"torch {info.version} fails to start CUDA: {info.error}"
        return [Finding(PROBLEM, what, "mend torch first: `python -m torch.utils.collect_env`")]
    findings = []
    major = int(info.cuda.split(".")[0])
    if build.driver and build.driver // 1000 < major:
        what = (
            f"torch {info.version} was built with CUDA {info.cuda}, but the driver supports CUDA "
            f"up to {cuda_version_text(build.driver)}"
        )
        remedy = f"update the driver, or install a torch for CUDA {build.driver // 1000}"
        findings.append(Finding(PROBLEM, what, remedy))
    elif build.driver and not info.available:
        what = "torch sees no GPU, though there is a driver"
        remedy = "look at CUDA_VISIBLE_DEVICES and `nvidia-smi`, and whether the job asked for a GPU"
        findings.append(Finding(NOTE, what, remedy))
    if build.with_cuda and build.runtime // 1000 != major:
        what = (
            f"torch was built with CUDA {info.cuda}, this package with CUDA "
            f"{cuda_version_text(build.runtime)}"
        )
        findings.append(Finding(NOTE, what, "none is needed: its runtime is linked statically"))
    return findings


def chip_code(chips: str, capability: tuple[int, int]) -> str:
    """Say what a GPU of this compute capability runs.

    Parameters
    ----------
    chips : str
        As CMake lists them, such as ``"80-real 90"``: ``-real`` is machine code, ``-virtual`` is
        PTX, neither is both.
    capability : tuple of int
        Major and minor.

    Returns
    -------
    str
        "machine code", "PTX" or "".
    """
    found = set()
    for number, suffix, kind in re.findall(r"(\d+)([af]?)(-real|-virtual)?(?:\s|$)", chips):
        chip = divmod(int(number), 10)
        if suffix == "a" and chip != capability:
            continue  # for this very chip
        same_major = chip[0] == capability[0] and chip <= capability
        if kind != "-virtual" and same_major:
            found.add("machine code")
        if kind != "-real" and chip <= capability and (same_major or not suffix):
            found.add("PTX")
    return min(found, default="", key=("machine code", "PTX").index)


def check_gpus(gpus: Sequence[Gpu], build: Build) -> list[Finding]:
    """Check each kind of GPU against the compiled chips."""
    findings: dict[tuple[int, int], Finding] = {}
    for gpu in gpus if build.with_cuda else ():
        code = chip_code(build.chips, gpu.capability)
        major, minor = gpu.capability
        who = f"{gpu.name} (compute capability {major}.{minor})"
        remedy = (
            f"reinstall from source for it: `TE_OVERLAY_CUDA_ARCHS={major}{minor} pip install "
            "--force-reinstall --no-deps --no-binary transformer-engine-overlay "
            "transformer-engine-overlay`"
        )
        if not code:
            what = f"no compiled chip fits {who}; compiled are {build.chips or 'none'}"
            findings[gpu.capability] = Finding(PROBLEM, what, remedy)
        elif code == "PTX" and build.driver < build.runtime:
            # A driver runs machine code of a newer release of its major version, but no such PTX.
            what = (
                f"{who} needs PTX of CUDA {cuda_version_text(build.runtime)}, and the driver "
                f"compiles that of CUDA {cuda_version_text(build.driver)} at most"
            )
            findings[gpu.capability] = Finding(PROBLEM, what, f"update the driver, or {remedy}")
        elif code == "PTX":
            what = f"{who} runs PTX, which the driver compiles at the first call"
            findings[gpu.capability] = Finding(NOTE, what, f"for machine code, {remedy}")
    return list(findings.values())


def check_te(install: Install, version: str) -> list[Finding]:
    """Check that TransformerEngine is there and of a release that can be routed."""
    if install.module is None:
        if install.packages:
            return []  # told in full where the files are looked at
        what = "TransformerEngine is not installed: the torch API works, there is nothing to route"
        return [Finding(NOTE, what, f"if you want it: {INSTALL_TE}")]
    first, last = (".".join(map(str, v)) for v in (FIRST_SUPPORTED, LAST_LISTED))
    parsed = parse_version(version)
    if parsed is not None and parsed < FIRST_SUPPORTED:
        what = (
            f"TransformerEngine {version} is older than {first}, the first release that can be "
            "routed"
        )
        remedy = f'`pip install --no-build-isolation "transformer-engine[pytorch]>={first}"`'
        return [Finding(PROBLEM, what, f"upgrade it, {remedy}, or go on without the overlay")]
    if parsed is None or find_release(parsed) is None:
        what = f"TransformerEngine {version or 'of unknown version'} is not among {first} to {last}"
        return [Finding(NOTE, what, "check it with `te-overlay verify --against te`")]
    return []


def check_signatures(probe: Probe, version: str) -> list[Finding]:
    """Check that the fused RoPE functions take what the overlay passes."""
    parsed = parse_version(version)
    if parsed is not None and parsed < FIRST_SUPPORTED:
        return []  # the version says it all
    return [
        Finding(
            PROBLEM,
            f"{gate.EXTENSION}.{name} takes {_kinds_text(kinds)}; the overlay knows "
            f"({', '.join(gate.SIGNATURE)})",
            "go on without the overlay, and report this TransformerEngine; if you patched it, "
            "take the patch out",
        )
        for name, kinds in probe.signatures.items()
        if kinds is None or tuple(kinds) != gate.SIGNATURE
    ]


def _kinds_text(kinds: Sequence[str] | None) -> str:
    return "an unknown list" if kinds is None else f"({', '.join(kinds)})"


def check_refusal(probe: Probe, explained: bool) -> list[Finding]:
    """Pass on why the overlay could not be enabled, if nothing said so far explains it."""
    if not probe.refusal or explained:
        return []
    what, _, remedy = probe.refusal.partition("; ")
    what = f"the overlay cannot be enabled: {what}"
    return [Finding(PROBLEM, what, remedy or "go on without it, and report this")]


def check_path_variable(complaint: str) -> list[Finding]:
    """Check the value of ``NVTE_FUSED_ROPE_THD_TOKEN_LINEAR``."""
    what, _, remedy = complaint.partition("; ")
    return [Finding(PROBLEM, what, remedy)] if what else []


def check_activation(hook: Activation) -> list[Finding]:
    """Check that ``TE_OVERLAY_ENABLE`` does what it says."""
    name = patching.ENABLE_VARIABLE
    if hook.value not in ("", "0", "1"):
        what = f"{name} is '{hook.value}'"
        return [Finding(PROBLEM, what, "it must be 1 (enable), 0 or unset")]
    if hook.ran:
        return []
    reasons = []
    if not hook.module:
        reasons.append(f"the module {patching.ACTIVATION_MODULE} cannot be imported")
    if not hook.pth:
        reasons.append(f"no site folder has {patching.ACTIVATION_MODULE}.pth")
    if hook.switches:
        reasons.append(f"this Python runs with {' '.join(hook.switches)}")
    if hook.value == "1":
        why = ", ".join(reasons) or "it was set after Python had started"
        what = f"{name}=1, but the start-up hook did not run: {why}"
    elif not hook.module or not hook.pth:
        what = f"{name}=1 would do nothing: {', '.join(reasons)}"
    else:
        return []
    remedy = f"call transformer_engine_overlay.enable() in the program, or {REINSTALL_SELF}"
    return [Finding(PROBLEM if hook.value == "1" else NOTE, what, remedy)]


def check_status(status: patching.Status) -> list[Finding]:
    """Pass on what stands in the way in this process."""
    if not status.problem:
        return []
    return [Finding(PROBLEM, status.problem, "enable the overlay before other patches")]
