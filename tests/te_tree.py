# SPDX-License-Identifier: Apache-2.0
"""A stand-in for TransformerEngine's source tree: its layout, and files of our own making."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "ci" / "refresh_patches.py"

FUSED_ROPE = "transformer_engine/common/fused_rope/fused_rope.cu"
VARIABLES = "docs/envvars.rst"
TEST_LIST = "qa/L0_pytorch_unittest/test.sh"

# Trees of the real TransformerEngine, clean checkouts, separated as in PATH.
TREES_VARIABLE = "TE_OVERLAY_TE_SOURCE"

_FILES = {
    FUSED_ROPE: """\
#include "../common.h"
#include "../utils.cuh"

void fused_rope_forward_launcher(const float *input) { launch(input); }

void fused_rope_forward(const Tensor &input, Tensor *output,
                        cudaStream_t stream) {
  fused_rope_forward_launcher(input);
}

void fused_rope_backward(const Tensor &output_grads,
                         cudaStream_t stream) {
  if (stream) {
    launch(output_grads);
  }
}
""",
    VARIABLES: "General\n^^^^^^^\n\nAttention Backend Selection\n^^^^^^^^^^^\n",
    TEST_LIST: "pytest a.py\npytest $TE_PATH/tests/pytorch/test_fused_rope.py\npytest b.py\n",
    "tests/pytorch/test_sanity.py": "",
    "benchmarks/README": "",
}


def write_tree(folder: Path, note: str = "") -> Path:
    """Write a tree; `note` makes a release of its own of it."""
    for name, text in _FILES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + (f"// {note}\n" if note and name == FUSED_ROPE else ""))
    return folder


def snapshot(folder: Path) -> dict[str, str]:
    """Return the mode and the content's hash of each file."""
    return {
        str(file.relative_to(folder)): f"{file.stat().st_mode:o} "
        + hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def real_trees() -> list[Path]:
    """The trees that the environment names."""
    return [Path(path) for path in os.environ.get(TREES_VARIABLE, "").split(os.pathsep) if path]


def copy_touched(tree: Path, folder: Path) -> Path:
    """Copy the folders of a real tree that the patches write to."""
    for name in (FUSED_ROPE, VARIABLES, TEST_LIST):
        if (tree / name).exists():
            shutil.copytree((tree / name).parent, (folder / name).parent)
    for name in ("tests/pytorch", "benchmarks"):
        (folder / name).mkdir(parents=True)
    return folder


def load_refresh() -> ModuleType:
    """Import ci/refresh_patches.py."""
    name = "refresh_patches"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, SCRIPT)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]
