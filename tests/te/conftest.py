# SPDX-License-Identifier: Apache-2.0
"""Fixtures for tests against an installed TransformerEngine."""

from __future__ import annotations

import importlib
import os
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import transformer_engine_overlay as overlay
from transformer_engine_overlay import patching, path_counts

PATH_VARIABLE = "NVTE_FUSED_ROPE_THD_TOKEN_LINEAR"


def missing_te() -> str:
    """Why these tests cannot run here, or an empty string."""
    wanted = os.environ.get("TE_OVERLAY_REQUIRE_TE", "")
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # a broken install is a reason like any other
        return f"TransformerEngine cannot be imported: {type(error).__name__}: {error}"
    found = importlib.import_module("transformer_engine").__version__
    if wanted and not found.startswith(wanted):
        return f"TransformerEngine is {found}"
    return ""


def pytest_runtest_setup(item: pytest.Item) -> None:
    reason = missing_te()
    wanted = os.environ.get("TE_OVERLAY_REQUIRE_TE")
    if reason and wanted:
        pytest.fail(f"TE_OVERLAY_REQUIRE_TE={wanted}, but {reason}")
    if reason:
        pytest.skip(f"needs TransformerEngine on a GPU: {reason}")


@pytest.fixture(scope="session")
def tex() -> types.ModuleType:
    importlib.import_module("transformer_engine.pytorch")
    return importlib.import_module("transformer_engine_torch")


@pytest.fixture(scope="session")
def stock(tex: types.ModuleType) -> dict[str, Any]:
    """TransformerEngine's own functions, taken before the overlay was enabled."""
    functions = {name: getattr(tex, name) for name in patching.FUNCTIONS}
    assert all(isinstance(f, types.BuiltinFunctionType) for f in functions.values())
    return functions


@pytest.fixture
def compare(
    tex: types.ModuleType, stock: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[Any, Any]]]:
    """Run a function once on stock TransformerEngine and once with its calls routed.

    That the first ran on the stock objects and the second on our kernels is proved each time.
    """

    def run(
        function: Callable[[], Any], *, value: str | None, calls: int, path: str | None = None
    ) -> tuple[Any, Any]:
        overlay.disable()
        assert all(getattr(tex, name) is f for name, f in stock.items())
        monkeypatch.delenv(PATH_VARIABLE, raising=False)
        before = path_counts()
        expected = function()
        assert path_counts() == before
        if value is not None:
            monkeypatch.setenv(PATH_VARIABLE, value)
        with overlay.patched():
            assert all(patching.original(name) is f for name, f in stock.items())
            routed = function()
        after = path_counts()
        rose = {p: after[p]["routed"] - before[p]["routed"] for p in after}
        assert sum(rose.values()) == calls
        assert path is None or rose[path] == calls
        return expected, routed

    yield run
    overlay.disable()
