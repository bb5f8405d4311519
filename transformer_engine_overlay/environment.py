# SPDX-License-Identifier: Apache-2.0
"""What a result was made with: versions, machine, compiled chips, and the variables we read."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import transformer_engine_overlay
from transformer_engine_overlay import _native, gate

PATH_VARIABLE = "NVTE_FUSED_ROPE_THD_TOKEN_LINEAR"


@contextmanager
def forced_path(value: str | None) -> Iterator[None]:
    """Set ``NVTE_FUSED_ROPE_THD_TOKEN_LINEAR`` within the block, for the whole process.

    None unsets it, which asks for the automatic choice.
    """
    before = os.environ.get(PATH_VARIABLE)
    _set_path(value)
    try:
        yield
    finally:
        _set_path(before)


def _set_path(value: str | None) -> None:
    if value is None:
        os.environ.pop(PATH_VARIABLE, None)
    else:
        os.environ[PATH_VARIABLE] = value


def cuda_version_text(version: int) -> str:
    """Write CUDA's integer version as people do: 13000 is 13.0, 0 is none."""
    return f"{version // 1000}.{version % 1000 // 10}" if version else "none"


def driver_release() -> str:
    """Return the release of the NVIDIA driver, such as 580.159.04, or "unknown"."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.split("\n", 1)[0].strip() or "unknown"


def describe(device: torch.device) -> dict[str, str]:
    """Describe what results on `device` were made with.

    Returns
    -------
    dict
        Name to text, in the order to show it in.
    """
    driver, runtime = _native.cuda_versions()
    facts = {
        "transformer-engine-overlay": transformer_engine_overlay.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "TransformerEngine": gate.te_version() or "not installed",
        "CUDA runtime built in": cuda_version_text(runtime),
        "CUDA of the driver": cuda_version_text(driver),
        "compiled chips": _native.CUDA_ARCHS or "none",
    }
    if device.type == "cuda":
        facts["driver"] = driver_release()
        facts["device"] = torch.cuda.get_device_name(device)
    else:
        facts["device"] = f"CPU, {torch.get_num_threads()} threads"
    return facts
