# SPDX-License-Identifier: Apache-2.0
"""Fixtures around the stub TransformerEngine, and what stands in for one of its functions.

conftest.py makes the fixtures everybody's.
"""

from __future__ import annotations

import enum
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from packed import boundaries, randn, random_table
from te_stub import write_stub

import transformer_engine_overlay as overlay
from transformer_engine_overlay import _native, patching
from transformer_engine_overlay.thd import rotate_thd

NAMES = ("fused_rope_forward", "fused_rope_backward")


class Format(enum.IntEnum):
    SBHD = 0
    THD = 2


class OriginalCalledError(Exception):
    pass


def original(*args: Any, **kwargs: Any) -> Any:
    raise OriginalCalledError(args, kwargs)


def te_modules() -> list[str]:
    roots = {"transformer_engine", "transformer_engine_torch"}
    return [name for name in sys.modules if name.partition(".")[0] in roots]


def forget_te() -> None:
    for name in te_modules():
        del sys.modules[name]
    # torch.compile keeps modules by their names: the next stub has the same.
    tracer = sys.modules.get("torch._dynamo.symbolic_convert")
    if tracer is not None:
        tracer._import_module.cache_clear()


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Put a stub TransformerEngine on the path; each test starts and ends without one imported."""
    saved = {name: sys.modules[name] for name in te_modules()}
    forget_te()
    monkeypatch.setattr(_native, "WITH_CUDA", True)
    monkeypatch.setattr(_native, "cuda_versions", lambda: (0, 13000))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield lambda **options: write_stub(tmp_path, **options) and importlib.invalidate_caches()
    overlay.disable()
    patching._installation = patching._retired = None
    patching._refusal = ""
    forget_te()
    sys.modules.update(saved)


@pytest.fixture
def te(stub: Callable[..., None]) -> ModuleType:
    stub()
    return importlib.import_module("transformer_engine.pytorch")


def thd_arguments() -> tuple[Any, ...]:
    tex = sys.modules["transformer_engine_torch"]
    return (
        randn(8, 2, 8),
        random_table(16, 8),
        None,
        tex.NVTE_QKV_Format.NVTE_THD,
        False,
        boundaries([0, 3, 8]),
        1,
        0,
    )


def expected(transpose: bool = False) -> torch.Tensor:
    t, freqs, starts, _, interleaved, cu, cp_size, cp_rank = thd_arguments()
    return rotate_thd(t, freqs, cu, starts, interleaved, cp_size, cp_rank, transpose)
