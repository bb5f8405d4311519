# SPDX-License-Identifier: Apache-2.0
"""A stand-in for an installed TransformerEngine: its module layout, and functions that raise.

A patch that misses a call is then a loud failure, on any machine.
"""

from __future__ import annotations

from pathlib import Path

FORWARD = (
    "(arg0: torch.Tensor, arg1: torch.Tensor, arg2: Optional[torch.Tensor], "
    "arg3: transformer_engine_torch.NVTE_QKV_Format, arg4: bool, "
    "arg5: Optional[torch.Tensor], arg6: int, arg7: int) -> torch.Tensor"
)
# as newer versions of the binding generator write it
FORWARD_NEW = (
    "(arg0: torch.Tensor, arg1: torch.Tensor, arg2: torch.Tensor | None, "
    "arg3: transformer_engine_torch.NVTE_QKV_Format, arg4: bool, arg5: torch.Tensor | None, "
    "arg6: typing.SupportsInt | typing.SupportsIndex, arg7: typing.SupportsInt) -> torch.Tensor"
)
# backward before 2.10 has no start_positions
BACKWARD_OLD = FORWARD.replace("arg2: Optional[torch.Tensor], ", "")

_EXTENSION = """
import enum

class NVTE_QKV_Format(enum.IntEnum):
    NVTE_SBHD = 0
    NVTE_BSHD = 1
    NVTE_THD = 2

class OriginalCalled(Exception):
    pass

def fused_rope_forward(*args, **kwargs):
    raise OriginalCalled("forward", args, kwargs)

def fused_rope_backward(*args, **kwargs):
    raise OriginalCalled("backward", args, kwargs)

fused_rope_forward.__doc__ = "fused_rope_forward" + {forward!r} + "\\n\\nForward"
fused_rope_backward.__doc__ = "fused_rope_backward" + {backward!r} + "\\n\\nBackward"
"""

_PYTORCH = """
import importlib.util, pathlib, sys
file = pathlib.Path(__file__).parent.parent / "extension.py"
spec = importlib.util.spec_from_file_location("transformer_engine_torch", file)
module = importlib.util.module_from_spec(spec)
sys.modules["transformer_engine_torch"] = module
spec.loader.exec_module(module)
from . import cpp_extensions
from .rope import forward
"""

_ROPE = """
import transformer_engine_torch as tex

def forward(*args):
    return tex.fused_rope_forward(*args)

def backward(*args):
    return tex.fused_rope_backward(*args)
"""


def write_stub(
    folder: Path, *, version: str = "2.18.0", forward: str = FORWARD, backward: str = FORWARD
) -> Path:
    """Write the stub package into `folder`, which is to be on ``sys.path``."""
    files = {
        # as in TransformerEngine, the version comes last
        "__init__.py": f"from . import pytorch\n__version__ = {version!r}\n",
        "extension.py": _EXTENSION.format(forward=forward, backward=backward),
        "pytorch/__init__.py": _PYTORCH,
        "pytorch/rope.py": _ROPE,
        "pytorch/cpp_extensions/__init__.py": "from transformer_engine_torch import *\n",
    }
    for name, text in files.items():
        file = folder / "transformer_engine" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    metadata = folder / f"transformer_engine-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Name: transformer_engine\nVersion: {version}\n", encoding="utf-8")
    return folder
