# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/user-guide.md, by their sections."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

PAGE = Path(__file__).resolve().parents[1] / "docs" / "user-guide.md"
COMMON, PLAIN = "A packed batch", "Plain torch"


def read_examples() -> dict[str, list[str]]:
    """The Python blocks under each heading."""
    parts = re.split(r"^## (.*)\n", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    fence = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
    return {name: fence.findall(text) for name, text in zip(parts[1::2], parts[2::2], strict=True)}


EXAMPLES = read_examples()


def run(section: str) -> dict[str, Any]:
    """Run a section's blocks after those that it continues from; each asserts by itself."""
    namespace: dict[str, Any] = {"__name__": "guide"}
    for name in dict.fromkeys((COMMON, PLAIN, section)):
        for i, example in enumerate(EXAMPLES[name]):
            exec(compile(example, f"{PAGE.name}, {name}, {i}", "exec"), namespace)
    return namespace


def put_megatron_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for Megatron-LM's module, whose function passes a call on to TransformerEngine."""
    from transformer_engine.pytorch.attention.rope import apply_rotary_pos_emb

    module = ModuleType("megatron.core.extensions.transformer_engine")

    def fused_apply_rotary_pos_emb_thd(
        t: Any, cu_seqlens: Any, freqs: Any, cp_size: int, cp_rank: int
    ) -> Any:
        named = {"cu_seqlens": cu_seqlens, "cp_size": cp_size, "cp_rank": cp_rank}
        return apply_rotary_pos_emb(t, freqs, tensor_format="thd", fused=True, **named)

    module.fused_apply_rotary_pos_emb_thd = fused_apply_rotary_pos_emb_thd  # type: ignore[attr-defined]
    name = ""
    for part in module.__name__.split("."):
        name = f"{name}.{part}".removeprefix(".")
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, name, module)
