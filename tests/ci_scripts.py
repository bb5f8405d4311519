# SPDX-License-Identifier: Apache-2.0
"""The scripts of ci/ as modules, and the tools of the CUDA toolkit that they need."""

from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

CI = Path(__file__).resolve().parents[1] / "ci"


def ci_script(name: str) -> ModuleType:
    """Import ci/NAME.py, which finds its neighbours as it does when it is run."""
    if str(CI) not in sys.path:
        sys.path.append(str(CI))
    return importlib.import_module(name)


def cuda_tools(*names: str) -> dict[str, str]:
    """Where the tools are; skip the test that needs one which is nowhere."""
    find_tool = ci_script("sass").find_tool
    found = {name: shutil.which(name) or find_tool(name) for name in names}
    if missing := [name for name, path in found.items() if path is None]:
        pytest.skip(f"needs {' and '.join(missing)}, on PATH or from NVIDIA's wheels")
    return {name: path for name, path in found.items() if path is not None}
