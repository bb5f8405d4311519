# SPDX-License-Identifier: Apache-2.0
"""The checks of `te-overlay doctor`. Each looks at its arguments alone: a test can hand it any."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformer_engine_overlay import gate, patching
from transformer_engine_overlay.environment import cuda_version_text
from transformer_engine_overlay.findings import NOTE, PROBLEM, Finding
from transformer_engine_overlay.te_install import Install
from transformer_engine_overlay.te_probe import Probe
from transformer_engine_overlay.te_versions import (
    FIRST_SUPPORTED,
    LAST_LISTED,
    find_release,
    parse_version,
)

INSTALL_TE = '`pip install --no-build-isolation "transformer-engine[pytorch]"`'
INSTALL_SELF = "pip install --force-reinstall --no-deps ."


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
    switches: tuple[str, ...] = ()


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
        remedy = "look at CUDA_VISIBLE_DEVICES and `nvidia-smi`, and at whether the job has a GPU"
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
            "reinstall the package for it, in a checkout: "
            f"`TE_OVERLAY_CUDA_ARCHS={major}{minor} {INSTALL_SELF}`"
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
    if version and (parsed is None or find_release(parsed) is None):
        what = f"TransformerEngine {version} is not among the listed releases, {first} to {last}"
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
            f"{gate.EXTENSION}.{name} takes {kinds_text(kinds)}; the overlay knows "
            f"({', '.join(gate.SIGNATURE)})",
            "go on without the overlay, and report this TransformerEngine; if you patched it, "
            "take the patch out",
        )
        for name, kinds in probe.signatures.items()
        if kinds is None or tuple(kinds) != gate.SIGNATURE
    ]


def kinds_text(kinds: Sequence[str] | None) -> str:
    """Write the kinds of a function's arguments."""
    return "an unknown list" if kinds is None else f"({', '.join(kinds)})"


def check_refusal(probe: Probe, explained: bool) -> list[Finding]:
    """Pass on why the overlay could not be enabled, if nothing said so far explains it."""
    if not probe.refusal or explained:
        return []
    what, _, remedy = probe.refusal.partition("; ")
    what = f"the overlay cannot be enabled: {what}"
    return [Finding(PROBLEM, what, remedy or "go on without it, and report this")]


def check_library(probe: Probe, version: str) -> list[Finding]:
    """Say that TransformerEngine's core library is a patched one, and whether with these kernels.

    Parameters
    ----------
    probe : Probe
    version : str
        Our own.
    """
    if not probe.library:
        return []
    what = (
        f"TransformerEngine's core library is patched with transformer-engine-overlay "
        f"{probe.library}: its launcher runs the kernels, and nothing is routed"
    )
    remedy = "none is needed"
    if probe.library != version:
        what += f"; installed is {version}"
        remedy = (
            f"to have the kernels of {version}: take the patches out with the version that put "
            "them in, `te-overlay patch apply --te-source DIR`, and build TransformerEngine again"
        )
    return [Finding(NOTE, what, remedy)]


def check_path_variable(complaint: str) -> list[Finding]:
    """Check the value of ``NVTE_FUSED_ROPE_THD_TOKEN_LINEAR``."""
    what, _, remedy = complaint.partition("; ")
    return [Finding(PROBLEM, what, remedy)] if what else []


def check_dlpack_variable(value: str | None) -> list[Finding]:
    """Check the value of ``TE_OVERLAY_DLPACK``."""
    if value in (None, "0", "1"):
        return []
    what = f"TE_OVERLAY_DLPACK is {value!r}; it must be 1, 0 or unset"
    return [Finding(PROBLEM, what, "unset TE_OVERLAY_DLPACK")]


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
    remedy = f"start Python without {' '.join(hook.switches)}; or " if hook.switches else ""
    remedy += (
        "call transformer_engine_overlay.enable() in the program, or reinstall the package, in a "
        f"checkout: `{INSTALL_SELF}`"
    )
    return [Finding(PROBLEM if hook.value == "1" else NOTE, what, remedy)]


def check_status(status: patching.Status) -> list[Finding]:
    """Pass on what stands in the way in this process."""
    if not status.problem:
        return []
    return [Finding(PROBLEM, status.problem, "enable the overlay before other patches")]
