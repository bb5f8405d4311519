# SPDX-License-Identifier: Apache-2.0
"""A stand-in for an installed TransformerEngine: its module layout, and functions that raise.

A patch that misses a call is then a loud failure, on any machine. What torch.compile does with a
call takes functions that return something, and that are opaque as a binding's are: `COMPUTING`.
"""

from __future__ import annotations

import shutil
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

# Of its functions torch.compile sees what it sees of TransformerEngine's: builtins of an extension.
COMPUTING = """
import enum
from transformer_engine.rotation import rotate
from transformer_engine_overlay import router

class NVTE_QKV_Format(enum.IntEnum):
    NVTE_SBHD = 0
    NVTE_BSHD = 1
    NVTE_THD = 2

def binding(name, sign, doc):
    def function(*args):
        return rotate(sign, *args)
    function.__name__, function.__doc__, function.__module__ = name, name + doc, __name__
    off = router.RouterState()
    off.active = False
    return router.make_routed(function, sign < 0, NVTE_QKV_Format.NVTE_THD, off)

fused_rope_forward = binding("fused_rope_forward", 1, {forward!r})
fused_rope_backward = binding("fused_rope_backward", -1, {backward!r})
"""

# By plain torch, without context parallelism; counts its calls.
_ROTATION = """
import torch

calls = []

def rotate(sign, t, freqs, start_positions, qkv_format, interleaved, cu_seqlens, cp_size, cp_rank):
    layout = ("sbhd", "bshd", "thd")[int(qkv_format)]
    calls.append(layout)
    assert cp_size == 1 and cp_rank == 0 and start_positions is None and not interleaved
    if layout == "thd":
        lengths = cu_seqlens.diff()
        angles = freqs[torch.arange(len(t)) - cu_seqlens[:-1].repeat_interleave(lengths)][:, 0]
    else:
        angles = freqs[:len(t)] if layout == "sbhd" else freqs[:t.shape[1]].transpose(0, 1)
    x, rest = t.split([freqs.shape[-1], t.shape[-1] - freqs.shape[-1]], -1)
    first, second = x.chunk(2, -1)
    turned = x * angles.cos() + torch.cat([-second, first], -1) * angles.sin() * sign
    return torch.cat([turned.to(t.dtype), rest], -1).contiguous()
"""

_PYTORCH = """
import importlib.util, pathlib, sys
file = next(pathlib.Path(__file__).parent.parent.glob("extension.*"))
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


_FUSED_ATTN = """
from transformer_engine_torch import NVTE_QKV_Format

QKVFormat = {
    name: getattr(NVTE_QKV_Format, "NVTE_" + name.upper()) for name in ("sbhd", "bshd", "thd")
}
"""

# What torch.compile meets between a caller and the extension.
_ATTENTION_ROPE = """
import torch
import transformer_engine_torch as tex
from transformer_engine.pytorch.cpp_extensions.fused_attn import QKVFormat

class Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, freqs, starts=None, layout="sbhd", interleaved=False, cu_seqlens=None,
                cp_size=1, cp_rank=0):
        if freqs.dtype != torch.float32:
            freqs = freqs.float()
        assert layout in QKVFormat, f"no layout {layout}"
        y = tex.fused_rope_forward(
            t, freqs, starts, QKVFormat[layout], interleaved, cu_seqlens, cp_size, cp_rank
        )
        ctx.save_for_backward(freqs, cu_seqlens, starts)
        ctx.layout, ctx.interleaved, ctx.ranks = layout, interleaved, (cp_size, cp_rank)
        return y

    @staticmethod
    def backward(ctx, grad):
        freqs, cu_seqlens, starts = ctx.saved_tensors
        grad = tex.fused_rope_backward(
            grad, freqs, starts, QKVFormat[ctx.layout], ctx.interleaved, cu_seqlens, *ctx.ranks
        )
        return grad, None, None, None, None, None, None, None, None  # one more than forward takes

def apply_rotary_pos_emb(t, freqs, tensor_format="sbhd", start_positions=None, interleaved=False,
                         fused=False, cu_seqlens=None, cp_size=1, cp_rank=0):
    assert fused
    return Rotation.apply(
        t, freqs, start_positions, tensor_format, interleaved, cu_seqlens, cp_size, cp_rank
    )
"""


def write_stub(
    folder: Path,
    *,
    version: str = "2.18.0",
    forward: str = FORWARD,
    backward: str = FORWARD,
    extension: str | Path = _EXTENSION,
) -> Path:
    """Write the stub package into `folder`, which is to be on ``sys.path``.

    `extension` is the text of the extension module, or the file of a compiled one.
    """
    files = {
        # as in TransformerEngine, the version comes last
        "__init__.py": f"from . import pytorch\n__version__ = {version!r}\n",
        "rotation.py": _ROTATION,
        "pytorch/__init__.py": _PYTORCH,
        "pytorch/rope.py": _ROPE,
        "pytorch/attention/__init__.py": "",
        "pytorch/attention/rope.py": _ATTENTION_ROPE,
        "pytorch/cpp_extensions/__init__.py": "from transformer_engine_torch import *\n",
        "pytorch/cpp_extensions/fused_attn.py": _FUSED_ATTN,
    }
    if isinstance(extension, str):
        files["extension.py"] = extension.format(forward=forward, backward=backward)
    for name, text in files.items():
        file = folder / "transformer_engine" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    if isinstance(extension, Path):
        shutil.copy(extension, folder / "transformer_engine" / "extension.so")
    metadata = folder / f"transformer_engine-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Name: transformer_engine\nVersion: {version}\n", encoding="utf-8")
    return folder
