# SPDX-License-Identifier: Apache-2.0
"""The examples of the user's guide that need TransformerEngine, against the installed one."""

from __future__ import annotations

from collections.abc import Iterator

import guide
import pytest
import torch
import torch._dynamo

import transformer_engine_overlay as overlay


@pytest.fixture(autouse=True)
def _disabled_afterwards() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    overlay.disable()
    torch._dynamo.reset()


@pytest.mark.parametrize("section", ["TransformerEngine", "Megatron-LM", "torch.compile"])
def test_examples(section: str, monkeypatch: pytest.MonkeyPatch) -> None:
    guide.put_megatron_in_place(monkeypatch)
    guide.run(section)
    assert overlay.status().enabled
