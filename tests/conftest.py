# SPDX-License-Identifier: Apache-2.0
"""What every test file shares: selection by rank, the device, a call through both forced paths."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cells import coordinates
from stub_fixtures import stub, te  # noqa: F401 (fixtures of all test files)

from transformer_engine_overlay import _native, path_counts
from transformer_engine_overlay.verify import same_bits

PATH_VARIABLE = "NVTE_FUSED_ROPE_THD_TOKEN_LINEAR"
FORCED = {"0": "legacy_grid", "1": "token_linear"}
# options that select a cell of ci/matrix.toml, by axis
CELL_OPTIONS = {
    "cp_size": {"type": int, "help": "cases of this context-parallel size only"},
    "cp_rank": {"type": int, "help": "cases of this rank only"},
    "dtype": {
        "choices": ["float32", "float16", "bfloat16"],
        "help": "cases of this element type only; those without one are float32",
    },
    "device": {"choices": ["cpu", "cuda"], "help": "cases on this device only"},
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("context-parallel matrix")
    for axis, how in CELL_OPTIONS.items():
        group.addoption(f"--cp-{axis.removeprefix('cp_')}", dest=f"cell_{axis}", **how)


def pytest_configure(config: pytest.Config) -> None:
    cp_size, cp_rank = (config.getoption(f"cell_{axis}") for axis in ("cp_size", "cp_rank"))
    if cp_size is not None and cp_rank is not None and not 0 <= cp_rank < cp_size:
        raise pytest.UsageError(f"--cp-rank is {cp_rank}; it must be in [0, {cp_size})")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file that has no case of a rank: a cell is small, and there are many."""
    if config.getoption("cell_cp_rank") is None or collection_path.suffix != ".py":
        return None
    return "cp_rank" not in collection_path.read_text(encoding="utf-8") or None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    options = {axis: config.getoption(f"cell_{axis}") for axis in CELL_OPTIONS}
    wanted = {axis: str(value) for axis, value in options.items() if value is not None}
    if not wanted:
        return
    chosen = [wanted.items() <= coordinates(item).items() for item in items]
    left_out = [item for item, kept in zip(items, chosen, strict=True) if not kept]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item, kept in zip(items, chosen, strict=True) if kept]


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
