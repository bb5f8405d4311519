# SPDX-License-Identifier: Apache-2.0
"""Put the router in place of TransformerEngine's fused RoPE functions, and take it out again.

The seam is the pair ``fused_rope_forward`` / ``fused_rope_backward`` of the extension module
``transformer_engine_torch``, which TransformerEngine looks up at each call, and the aliases that
its ``cpp_extensions`` package star-imports.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from transformer_engine_overlay import _native, gate
from transformer_engine_overlay.dynamo import keep_in_graph
from transformer_engine_overlay.gate import OverlayError
from transformer_engine_overlay.router import RouterState, make_routed
from transformer_engine_overlay.thd import path_counts

logger = logging.getLogger("transformer_engine_overlay")

SITE_MODULES = (gate.EXTENSION, "transformer_engine.pytorch.cpp_extensions")
# name of the function, whether it is the transpose
FUNCTIONS = {"fused_rope_forward": False, "fused_rope_backward": True}

ENABLE_VARIABLE = "TE_OVERLAY_ENABLE"
ACTIVATION_MODULE = "te_overlay_activate"


@dataclass
class Installation:
    """TransformerEngine's functions, ours, and the switch between them."""

    extension: ModuleType
    te_version: str
    originals: dict[str, Callable[..., torch.Tensor]]
    replacements: dict[str, Callable[..., torch.Tensor]]
    state: RouterState


@dataclass
class Status:
    """What is in place in this process.

    Attributes
    ----------
    enabled : bool
        Whether THD calls of TransformerEngine reach the router, and it routes.
    te_version : str
        TransformerEngine's version, "" if it was not looked at.
    sites : dict
        Dotted path of each place to "routed", "original", or what else is there.
    library : str
        The version of the overlay that TransformerEngine's core library was patched with, "" if it
        was not: its own launcher then runs the kernels, and the router stays out of the way.
    problem : str
        Why it is not enabled, or what stands in the way; "" if nothing does.
    activation : str
        Whether ``TE_OVERLAY_ENABLE`` is set, and whether the start-up hook ran here.
    path_rule : str
        What ``NVTE_FUSED_ROPE_THD_TOKEN_LINEAR`` asks for.
    routed : dict
        Routed calls by path.
    passed_through : int
        Calls that went on to TransformerEngine's own function.
    """

    enabled: bool
    te_version: str = ""
    sites: dict[str, str] = field(default_factory=dict)
    library: str = ""
    problem: str = ""
    activation: str = ""
    path_rule: str = ""
    routed: dict[str, int] = field(default_factory=dict)
    passed_through: int = 0


_lock = threading.RLock()
_installation: Installation | None = None
_retired: Installation | None = None  # the one that was disabled last
_refusal = ""


def enable(*, strict: bool = False) -> bool:
    """Route TransformerEngine's THD RoPE through the token-linear kernels, in this process.

    Imports ``transformer_engine.pytorch``. To enable twice is to enable once. Code that imported
    TransformerEngine or its functions before is reached too. Where TransformerEngine's core library
    was built from a patched source tree, nothing is routed: its launcher runs the same kernels.

    Parameters
    ----------
    strict : bool
        Raise where the default logs a warning and leaves TransformerEngine as it is.

    Returns
    -------
    bool
        Whether THD calls reach the kernels now, routed or in a patched library.

    Raises
    ------
    OverlayError
        With `strict`: TransformerEngine is missing, broken, older than 2.10 or of an unknown
        signature, another patch is in place, or this build has no CUDA or needs a newer driver.
    """
    global _installation, _refusal
    with _lock:
        try:
            loaded = sys.modules.get(gate.EXTENSION)
            if _installation is None or _installation.extension is not loaded:
                extension = gate.import_extension()
                if library := gate.patched_library():
                    _refusal = ""
                    logger.info(
                        "nothing routed: the core library of TransformerEngine %s is patched with "
                        "transformer-engine-overlay %s and runs the kernels by itself",
                        gate.te_version(),
                        library,
                    )
                    return True
                _installation = _install(extension)
            else:
                _reactivate(_installation)
            _refusal = ""
        except OverlayError as error:
            _refusal = str(error)
            if strict:
                raise
            logger.warning("overlay not enabled, TransformerEngine is as it was: %s", error)
            return False
        _warn_of_foreign_patches(_installation)
        return True


def disable() -> None:
    """Put TransformerEngine's own functions back, the identical objects.

    Where somebody else has patched over ours since, their function stays; ours, which they may
    still call, then passes all calls on.
    """
    global _installation, _retired
    with _lock:
        if _installation is None:
            return
        _warn_of_foreign_patches(_installation)
        for module, name in _sites():
            if getattr(module, name, None) is _installation.replacements[name]:
                setattr(module, name, _installation.originals[name])
        _installation.state.active = False
        if not _foreign_sites(_installation):
            _installation, _retired = None, _installation


@contextmanager
def patched(*, strict: bool = True) -> Iterator[bool]:
    """Enable the overlay within a block; on leaving, restore the state from before.

    Yields
    ------
    bool
        Whether the overlay is enabled.
    """
    was_enabled = status().enabled
    enabled = enable(strict=strict)
    try:
        yield enabled
    finally:
        if enabled and not was_enabled:
            disable()


def original(name: str) -> Callable[..., Any]:
    """Return TransformerEngine's own ``fused_rope_forward`` or ``fused_rope_backward``.

    Raises
    ------
    OverlayError
        If the overlay is not enabled, and so nothing was saved.
    """
    if _installation is None:
        raise OverlayError(f"no original of {name} is saved: enable the overlay first")
    return _installation.originals[name]


def status() -> Status:
    """Describe what is in place in this process; imports nothing and starts nothing."""
    counts = path_counts()
    found = Status(
        enabled=False,
        activation=_describe_activation(),
        path_rule=describe_path_rule(),
        routed={path: count["routed"] for path, count in counts.items()},
        passed_through=_native.passed_through(),
        library=gate.patched_library(),
        problem=_refusal,
    )
    installation = _installation
    if installation is None:
        found.te_version = gate.te_version() if found.library else ""
        return found
    found.te_version = installation.te_version
    found.sites = {_dotted(m, n): _site_state(installation, m, n) for m, n in _sites()}
    found.problem = installation.state.unsupported or "; ".join(
        f"{site} is {state}" for site, state in found.sites.items() if state != "routed"
    )
    found.enabled = installation.state.active and all(
        getattr(installation.extension, name, None) is not installation.originals[name]
        for name in FUNCTIONS
    )
    return found


def describe_path_rule() -> str:
    """Say what ``NVTE_FUSED_ROPE_THD_TOKEN_LINEAR`` asks for now."""
    rules = {
        _native.LEGACY_GRID: "0: TransformerEngine's own dispatch",
        _native.TOKEN_LINEAR: "1: token-linear always",
        _native.AUTOMATIC: "unset: automatic",
    }
    try:
        return rules[_native.path_request()]
    except ValueError as error:
        return str(error)


def _install(extension: ModuleType) -> Installation:
    """Check everything, then rebind; nothing is changed before all is known to fit."""
    gate.check_build()
    version = gate.te_version()
    gate.check_version(version)
    originals = {name: gate.checked_function(extension, name, version) for name in FUNCTIONS}
    thd_format = gate.thd_format(extension)
    installation = _take_retired(extension, originals)
    if installation is None:
        installation = _make(extension, version, originals, thd_format)
    replacements = installation.replacements
    places = []
    for module, name in _sites():
        if getattr(module, name) is originals[name]:
            setattr(module, name, replacements[name])
            places.append(_dotted(module, name))
    logger.info(
        "overlay enabled: %s routed; TransformerEngine %s, %s, path rule %s",
        ", ".join(places),
        version or "of unknown version",
        _describe_device(),
        describe_path_rule(),
    )
    return installation


def _make(
    extension: ModuleType,
    version: str,
    originals: dict[str, Callable[..., torch.Tensor]],
    thd_format: object,
) -> Installation:
    """Make our functions, for calls in graphs of torch.compile as well."""
    state = RouterState()
    replacements = {}
    for name, transpose in FUNCTIONS.items():
        replacements[name] = make_routed(originals[name], transpose, thd_format, state)
        keep_in_graph(replacements[name], transpose, thd_format)
    return Installation(extension, version, originals, replacements, state)


def _take_retired(
    extension: ModuleType, originals: dict[str, Callable[..., torch.Tensor]]
) -> Installation | None:
    """Return the one that was disabled, if the same is to be made again.

    torch.compile, which knows functions by their identity, then has the graphs already.
    """
    retired = _retired
    if (
        retired is None
        or retired.extension is not extension
        or any(retired.originals[name] is not function for name, function in originals.items())
    ):
        return None
    retired.state.unsupported = ""
    retired.state.active = True
    return retired


def _reactivate(installation: Installation) -> None:
    """Put ours back where the original is, and switch it on; refuse if it gave up before."""
    if installation.state.unsupported:
        raise OverlayError(installation.state.unsupported)
    installation.state.active = True
    for module, name in _sites():
        if getattr(module, name, None) is installation.originals[name]:
            setattr(module, name, installation.replacements[name])


def _sites() -> Iterator[tuple[ModuleType, str]]:
    for module_name in SITE_MODULES:
        module = sys.modules.get(module_name)
        if module is not None:
            for name in FUNCTIONS:
                if hasattr(module, name):
                    yield module, name


def _site_state(installation: Installation, module: ModuleType, name: str) -> str:
    current = getattr(module, name)
    if current is installation.replacements[name]:
        return "routed" if installation.state.active else "passed through"
    if current is installation.originals[name]:
        return "original"
    return f"patched by others ({gate.describe(current)})"


def _foreign_sites(installation: Installation) -> dict[str, str]:
    states = {_dotted(m, n): _site_state(installation, m, n) for m, n in _sites()}
    return {site: state for site, state in states.items() if state.startswith("patched")}


def _warn_of_foreign_patches(installation: Installation) -> None:
    for site, state in _foreign_sites(installation).items():
        logger.warning("%s is %s, on top of the overlay; it was left alone", site, state)


def _dotted(module: ModuleType, name: str) -> str:
    return f"{module.__name__}.{name}"


def _describe_device() -> str:
    """Name the device without starting CUDA, which would break a later fork."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        index = torch.cuda.current_device()
        return f"cuda:{index} {torch.cuda.get_device_name(index)}"
    rank = os.environ.get("LOCAL_RANK")
    return "CUDA not started" + (f", LOCAL_RANK {rank}" if rank else "")


def _describe_activation() -> str:
    value = os.environ.get(ENABLE_VARIABLE, "")
    if value in ("", "0"):
        return f"{ENABLE_VARIABLE} is not set: enable() is up to the program"
    if value != "1":
        return f"{ENABLE_VARIABLE} is {value!r}; it must be 1 (enable), 0 or unset"
    if ACTIVATION_MODULE in sys.modules:
        return f"{ENABLE_VARIABLE}={value}, and the start-up hook ran"
    return (
        f"{ENABLE_VARIABLE}={value}, but the start-up hook did not run in this process (python -S "
        "or -I, or the package is not in a site folder): call transformer_engine_overlay.enable()"
    )
