# SPDX-License-Identifier: Apache-2.0
"""Every example of the user's guide runs; those of TransformerEngine against its stub here."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from types import ModuleType

import guide
import pytest
import torch
import torch._dynamo

import transformer_engine_overlay as overlay

ROOT = guide.PAGE.parents[1]
TORCH_ALONE = [
    "A packed batch",
    "Plain torch",
    "Query, key and value together",
    "Context parallelism",
]
WITH_TE = ["TransformerEngine", "Megatron-LM", "torch.compile"]
ON_A_GPU = ["CUDA graphs"]


def test_every_section_is_run() -> None:
    assert sorted(guide.EXAMPLES) == sorted(TORCH_ALONE + WITH_TE + ON_A_GPU)
    assert all(guide.EXAMPLES.values())


def test_no_other_kind_of_example_is_written() -> None:
    languages = re.findall(r"^```(\w+)$", guide.PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(languages) == {"python"}


def test_readme_links_it() -> None:
    assert "(docs/user-guide.md)" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("section", TORCH_ALONE)
def test_torch_alone(section: str) -> None:
    guide.run(section)


def test_numbers_in_comments() -> None:
    assert guide.run("Context parallelism")["padded_boundaries"].tolist() == [0, 304, 328, 1032]


@pytest.mark.parametrize("section", WITH_TE)
def test_with_te(section: str, te: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    guide.put_megatron_in_place(monkeypatch)
    # Code generation needs a compiler of its own, which is not what the example is about.
    compile_it: Callable[..., object] = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compile_it)
    guide.run(section)  # the stub's own functions would raise
    assert overlay.status().enabled
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("section", ON_A_GPU)
def test_on_a_gpu(section: str) -> None:
    guide.run(section)
