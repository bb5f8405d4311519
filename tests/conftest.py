# SPDX-License-Identifier: Apache-2.0
"""Fixtures that every test file shares: the device, and a call through both forced paths."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from stub_fixtures import stub, te  # noqa: F401 (fixtures of all test files)

from transformer_engine_overlay import _native, path_counts
from transformer_engine_overlay.verify import same_bits

PATH_VARIABLE = "NVTE_FUSED_ROPE_THD_TOKEN_LINEAR"
FORCED = {"0": "legacy_grid", "1": "token_linear"}


def missing_gpu() -> str:
    """Why GPU tests cannot run here, or an empty string."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return "" if _native.WITH_CUDA else "the package was built without CUDA"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not any(item.iter_markers("gpu")):
        return
    reason = missing_gpu()
    if reason and os.environ.get("TE_OVERLAY_REQUIRE_GPU") == "1":
        pytest.fail(f"TE_OVERLAY_REQUIRE_GPU=1, but {reason}")
    if reason:
        pytest.skip(f"needs a GPU: {reason}")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def automatic_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests start from the automatic choice, unchecked, whatever the shell has set."""
    monkeypatch.delenv(PATH_VARIABLE, raising=False)
    monkeypatch.delenv("TE_OVERLAY_CHECK", raising=False)


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
    """Run a function with a path forced, and prove by the counters that this path ran."""

    def run(value: str, function: Callable[[], object], *, calls: int = 1) -> object:
        before = path_counts()
        with monkeypatch.context() as patch:
            patch.setenv(PATH_VARIABLE, value)
            result = function()
        after = path_counts()
        ran = {path: after[path]["calls"] - before[path]["calls"] for path in FORCED.values()}
        assert ran == {path: calls if FORCED[value] == path else 0 for path in FORCED.values()}
        return result

    return run


@pytest.fixture
def both_paths(on_path: Callable[..., object]) -> Callable[..., torch.Tensor]:
    """Run a function that returns a tensor through both paths, which must agree bit for bit."""

    def run(function: Callable[[], torch.Tensor], *, calls: int = 1) -> torch.Tensor:
        legacy = on_path("0", function, calls=calls)
        linear = on_path("1", function, calls=calls)
        assert isinstance(legacy, torch.Tensor)
        assert isinstance(linear, torch.Tensor)
        assert same_bits(legacy, linear)
        return linear

    return run


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Iterator[Callable[[str], None]]:
    """Count a call of the kind given; the end of the run has the sum."""
    counts: Counter[str] = Counter()

    def count(kind: str) -> None:
        counts[kind] += 1

    yield count
    request.node.user_properties.append(("fuzz", dict(counts)))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say on how many drawn calls the properties of tests/fuzz held."""
    counts: Counter[str] = Counter()
    reports = [report for kind in terminalreporter.stats.values() for report in kind]
    for report in reports:
        if getattr(report, "when", None) == "teardown":
            for name, value in report.user_properties:
                if name == "fuzz":
                    counts.update(value)
    if counts:
        kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(counts.items()))
        terminalreporter.write_line(f"fuzz: properties held {counts.total()} times ({kinds})")
