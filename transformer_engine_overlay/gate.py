# SPDX-License-Identifier: Apache-2.0
"""What must hold before TransformerEngine is touched: the build, its import, version, signature."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import logging
import re
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from transformer_engine_overlay import _native
from transformer_engine_overlay.te_versions import (
    FIRST_SUPPORTED,
    LAST_LISTED,
    find_release,
    parse_version,
)

logger = logging.getLogger("transformer_engine_overlay")

TE_MODULE = "transformer_engine.pytorch"
EXTENSION = "transformer_engine_torch"
# exported by a core library that was built from a patched source tree
PATCHED_SYMBOL = "nvte_fused_rope_thd_overlay_version"
# kinds of the arguments of fused_rope_forward and fused_rope_backward, from release 2.10 on
SIGNATURE = ("tensor", "tensor", "tensor?", "format", "bool", "tensor?", "int", "int")


class OverlayError(RuntimeError):
    """The overlay cannot be enabled; the message says what was found and what would help."""


def check_build() -> None:
    """Raise `OverlayError` if this build cannot run on a GPU of this machine's driver."""
    if not _native.WITH_CUDA:
        raise OverlayError(
            "transformer-engine-overlay was built without CUDA; reinstall it from source without "
            "TE_OVERLAY_CUDA=0"
        )
    driver, runtime = _native.cuda_versions()
    complaint = _native.driver_complaint(driver, runtime)
    if driver and complaint:
        raise OverlayError(complaint)


def import_extension() -> ModuleType:
    """Import TransformerEngine as its users do, and return its extension module."""
    try:
        importlib.import_module(TE_MODULE)
    except ModuleNotFoundError as error:
        raise OverlayError(
            f"TransformerEngine's PyTorch package cannot be imported ({error}); install it with "
            '`pip install --no-build-isolation "transformer-engine[pytorch]"`'
        ) from error
    except Exception as error:  # whatever a broken install raises is its own to explain
        raise OverlayError(
            f"TransformerEngine's PyTorch package cannot be imported: {type(error).__name__}: "
            f"{error}; `te-overlay doctor` looks at the install"
        ) from error
    extension = sys.modules.get(EXTENSION)
    if extension is None:
        raise OverlayError(
            f"{TE_MODULE} was imported, but there is no module {EXTENSION}: its layout is unknown"
        )
    return extension


def patched_library() -> str:
    """Return the version of the overlay that TransformerEngine's core library was patched with.

    Returns
    -------
    str
        Such as ``"0.1.0"``; "" if the library is not patched, or is not loaded.
    """
    # TransformerEngine loads its core library for all to see.
    function = getattr(ctypes.CDLL(None), PATCHED_SYMBOL, None)
    if function is None:
        return ""
    function.restype = ctypes.c_char_p
    return str((function() or b"unknown").decode())


def check_version(text: str) -> None:
    """Raise `OverlayError` for a release before 2.10; warn of one that is not listed."""
    version = parse_version(text)
    first = ".".join(map(str, FIRST_SUPPORTED))
    if version is not None and version < FIRST_SUPPORTED:
        raise OverlayError(
            f"TransformerEngine {text} is older than {first}, the first release whose fused RoPE "
            "functions the overlay knows; upgrade it, or go on without the overlay"
        )
    if version is None or find_release(version) is None:
        last = ".".join(map(str, LAST_LISTED))
        logger.warning(
            "TransformerEngine %s is not among the listed releases, %s to %s; the signature of its "
            "fused RoPE functions decides. Check it with `te-overlay verify --against te`",
            text or "of unknown version",
            first,
            last,
        )


def checked_function(extension: ModuleType, name: str, version: str) -> Callable[..., Any]:
    """Return a function of the extension if it is TransformerEngine's own and takes what we know.

    Raises
    ------
    OverlayError
        If it is missing, somebody else's, or of another signature.
    """
    function: Callable[..., Any] | None = getattr(extension, name, None)
    where = f"{extension.__name__}.{name}"
    if function is None:
        raise OverlayError(f"there is no {where} in TransformerEngine {version}")
    kinds = signature_kinds(function)
    if kinds is None:
        raise OverlayError(
            f"{where} is {describe(function)}, not TransformerEngine's own binding: another patch "
            "seems to be in place. It was left alone; enable the overlay before it"
        )
    if kinds != SIGNATURE:
        raise OverlayError(
            f"{where} of TransformerEngine {version} takes ({', '.join(kinds)}); the overlay knows "
            f"({', '.join(SIGNATURE)})"
        )
    return function


def thd_format(extension: ModuleType) -> object:
    """Return the enumerator of layout THD."""
    try:
        return extension.NVTE_QKV_Format.NVTE_THD
    except AttributeError:
        raise OverlayError(f"there is no {EXTENSION}.NVTE_QKV_Format.NVTE_THD") from None


def te_version() -> str:
    """Return TransformerEngine's version, "" where its metadata is missing."""
    # The package sets __version__ last: within its own import only the metadata has it.
    loaded = getattr(sys.modules.get("transformer_engine"), "__version__", "")
    if loaded:
        return str(loaded)
    try:
        return importlib.metadata.version("transformer_engine")
    except importlib.metadata.PackageNotFoundError:
        return ""


def signature_kinds(function: object) -> tuple[str, ...] | None:
    """Read the kinds of a binding's arguments from the first line of its docstring.

    Returns
    -------
    tuple of str or None
        Such as ``("tensor", "tensor?", "int")``; None if there is no signature.
    """
    lines = (getattr(function, "__doc__", None) or "").strip().splitlines()
    match = re.match(r"\w+\((.*)\)\s*->", lines[0]) if lines else None
    if match is None:
        return None
    return tuple(_kind(argument) for argument in _split_arguments(match[1]))


def _split_arguments(text: str) -> list[str]:
    """Split at the commas that no bracket encloses."""
    arguments, depth, current = [], 0, ""
    for character in text:
        depth += (character in "[(<") - (character in "])>")
        if character == "," and depth == 0:
            arguments.append(current)
            current = ""
        else:
            current += character
    return [*arguments, current] if current.strip() else arguments


def _kind(argument: str) -> str:
    annotation = argument.partition(":")[2].partition("=")[0].strip()
    if "Tensor" in annotation:
        return "tensor?" if "None" in annotation or "Optional" in annotation else "tensor"
    if "QKV_Format" in annotation:
        return "format"
    if annotation.endswith("bool"):
        return "bool"
    if "int" in annotation.lower() and "list" not in annotation.lower():
        return "int"
    return annotation


def describe(function: object) -> str:
    """Name a function by its module."""
    module = getattr(function, "__module__", None)
    name = getattr(function, "__qualname__", None) or type(function).__name__
    return f"{module}.{name}" if module else str(name)
