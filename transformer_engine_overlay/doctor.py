# SPDX-License-Identifier: Apache-2.0
"""`te-overlay doctor`: what a bug report should hold, and what is wrong, with its remedy.

This module collects the facts; `doctor_checks` judges them.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import site
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

import transformer_engine_overlay
from transformer_engine_overlay import _native, doctor_checks, gate, patching, te_install, te_probe
from transformer_engine_overlay.doctor_checks import Activation, Build, Gpu, Torch, chip_code
from transformer_engine_overlay.environment import PATH_VARIABLE, cuda_version_text, driver_release
from transformer_engine_overlay.findings import PROBLEM, Finding
from transformer_engine_overlay.te_install import Install, Package
from transformer_engine_overlay.te_probe import Probe
from transformer_engine_overlay.te_versions import find_release, parse_version

# What libraries and GPUs are found depends on them.
LOOKUP_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "LD_LIBRARY_PATH")


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


def examine(timeout: float = te_probe.TIMEOUT) -> Report:
    """Look at everything.

    TransformerEngine is imported in a process of its own, never in this one.

    Parameters
    ----------
    timeout : float
        Seconds that its import may take.
    """
    build, info, activation = read_build(), read_torch(), read_activation()
    cwd, purelib = Path.cwd(), Path(sysconfig.get_paths()["purelib"])
    install = te_install.find_install(sys.path, cwd, purelib)
    probe = te_probe.run_probe(sys.path, timeout) if install.module else None
    version = (probe.version if probe else "") or install.version
    status = patching.status()
    complaint = read_path_complaint()

    files = te_install.check_packages(install, info.cuda)
    place = te_install.check_module(install, cwd)
    files += place
    if not (has_problem(place) or (probe and probe.imported)):  # of a wrong place, that is enough
        files += te_install.check_libraries(install, purelib)
    gated = doctor_checks.check_build(build, info, install)
    gated += doctor_checks.check_driver(build, _native.driver_complaint)
    gated += doctor_checks.check_te(install, version)
    findings = doctor_checks.check_package(transformer_engine_overlay.__version__)
    findings += doctor_checks.check_torch(info, build)
    findings += doctor_checks.check_gpus(info.gpus, build)
    if probe is not None:
        findings += te_probe.check_import(probe, info.version, version, has_problem(files))
        gated += doctor_checks.check_signatures(probe, version)
        gated += doctor_checks.check_refusal(probe, has_problem(gated))
        findings += doctor_checks.check_library(probe, transformer_engine_overlay.__version__)
    findings += doctor_checks.check_path_variable(complaint)
    findings += doctor_checks.check_dlpack_variable(os.environ.get("TE_OVERLAY_DLPACK"))
    findings += doctor_checks.check_activation(activation)
    findings += doctor_checks.check_status(status)

    obstacle = complaint or find_obstacle(install, probe, build, info.gpus)
    routing = describe_routing(version, obstacle, status.path_rule, activation)
    facts = {
        "package": package_facts(build),
        "Python": python_facts(),
        "torch and GPUs": torch_facts(info, build),
        "TransformerEngine": te_facts(install, probe, version),
        "overlay": overlay_facts(status, activation, routing),
    }
    everything = [*gated, *files, *findings]
    return Report(facts, sorted(everything, key=lambda finding: finding.level != PROBLEM))


def has_problem(findings: Sequence[Finding]) -> bool:
    """Tell whether there is more than notes."""
    return any(finding.level == PROBLEM for finding in findings)


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
    """Say what is wrong with the value of ``NVTE_FUSED_ROPE_THD_TOKEN_LINEAR``, "" if nothing."""
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


def find_obstacle(install: Install, probe: Probe | None, build: Build, gpus: Sequence[Gpu]) -> str:
    """Say why nothing would be routed, "" if something would."""
    if probe is None:
        return "TransformerEngine is not installed"
    if not probe.imported:
        return "TransformerEngine cannot be imported"
    if not probe.enabled:
        return probe.refusal or f"a process that enabled the overlay {probe.outcome()}"
    if probe.library:
        return f"the core library is patched with {probe.library} and runs the kernels by itself"
    if gpus and not any(chip_code(build.chips, gpu.capability) for gpu in gpus):
        return "no compiled chip fits a GPU of this machine"
    return ""


def describe_routing(version: str, obstacle: str, path_rule: str, hook: Activation) -> str:
    """Say in a sentence what the overlay would route, and when."""
    if obstacle:
        return f"nothing: {obstacle}"
    if path_rule.startswith("0"):
        return f"nothing: {PATH_VARIABLE}=0 leaves THD calls to TransformerEngine's own dispatch"
    path = "token-linear always" if path_rule.startswith("1") else "automatic path"
    calls = f"THD calls of TransformerEngine {version}, forward and backward; {path}"
    if hook.value == "1" and (hook.ran or hook.pth):
        return f"{calls}; in each program, as {patching.ENABLE_VARIABLE}=1 is set"
    return (
        f"{calls}; in programs that call transformer_engine_overlay.enable() or are started with "
        f"{patching.ENABLE_VARIABLE}=1"
    )


def package_facts(build: Build) -> dict[str, str]:
    """Describe this package."""
    return {
        "transformer-engine-overlay": transformer_engine_overlay.__version__,
        "folder": str(Path(transformer_engine_overlay.__file__).parent),
        "built with CUDA": "yes" if build.with_cuda else "no",
        "compiled chips": build.chips or "none",
        "CUDA runtime built in": cuda_version_text(build.runtime),
    }


def python_facts() -> dict[str, str]:
    """Describe the interpreter and the system."""
    return {
        "version": platform.python_version(),
        "executable": sys.executable,
        "system": platform.platform(),
    }


def torch_facts(info: Torch, build: Build) -> dict[str, str]:
    """Describe torch, the driver, the GPUs, and where their libraries are looked for."""
    facts = {
        "torch": info.version,
        "CUDA of torch": info.cuda or (f"none, ROCm {info.hip}" if info.hip else "none"),
        "C++ ABI of torch": "new" if torch.compiled_with_cxx11_abi() else "old",
        "driver": driver_release() if build.driver or info.available else "none",
        "CUDA of the driver": cuda_version_text(build.driver),
        "GPUs": str(len(info.gpus)) if not info.error else info.error,
    }
    for gpu in info.gpus:
        code = chip_code(build.chips, gpu.capability) or "nothing that was compiled"
        capability = ".".join(map(str, gpu.capability))
        facts[f"cuda:{gpu.index}"] = f"{gpu.name}, compute capability {capability}, runs {code}"
    facts |= {name: os.environ[name] for name in LOOKUP_VARIABLES if name in os.environ}
    return facts


def te_facts(install: Install, probe: Probe | None, version: str) -> dict[str, str]:
    """Describe what there is of TransformerEngine and what came of its import."""
    facts = {
        name: ", then ".join(map(_describe_package, copies))
        for name, copies in install.packages.items()
    }
    facts["module"] = str(install.module or "none")
    if probe is None:
        return facts
    for prefix, title in te_install.LIBRARIES.items():
        facts[title] = ", ".join(map(str, install.libraries.get(prefix, []))) or "not found"
    facts["can be imported"] = probe.outcome()
    facts["version"] = version or "unknown"
    parsed = parse_version(version)
    release = find_release(parsed) if parsed else None
    facts["its THD launch"] = release.launch if release else "not known"
    for name, kinds in probe.signatures.items():
        known = kinds is not None and tuple(kinds) == gate.SIGNATURE
        facts[name] = "as known" if known else doctor_checks.kinds_text(kinds)
    refusal = probe.refusal or "the process did not come to that"
    facts["patched with the overlay"] = probe.library or "no"
    facts["overlay can be enabled"] = "yes" if probe.enabled else f"no: {refusal}"
    if not probe.succeeded and probe.output:
        facts["last lines of the import"] = probe.tail()
    return facts


def _describe_package(package: Package) -> str:
    origin = {True: "wheel", False: "built from source", None: "no WHEEL file"}[package.pure]
    if package.name != te_install.META:  # a core is never pure
        return f"{package.version}, in {package.folder}"
    return f"{package.version}, {origin}, in {package.folder}"


def overlay_facts(status: patching.Status, hook: Activation, routing: str) -> dict[str, str]:
    """Describe the overlay in this process, and what it would do in others."""
    return {
        "in this process": "enabled" if status.enabled else "not enabled",
        **status.sites,
        "activation": status.activation,
        "start-up hook": hook.pth or "not in a site folder",
        "path rule": status.path_rule,
        "would be routed": routing,
    }
