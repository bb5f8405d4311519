# SPDX-License-Identifier: Apache-2.0
"""What `status_across_ranks` says; tests/distributed has it with real processes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist

import transformer_engine_overlay as overlay
from transformer_engine_overlay import ranks
from transformer_engine_overlay.patching import Status
from transformer_engine_overlay.ranks import RankStatus

NVTE_VARIABLE = "NVTE_FUSED_ROPE_THD_TOKEN_LINEAR"


def problems(*some: RankStatus) -> list[str]:
    return ranks._problems(some)


def rank(
    number: int, *, enabled: bool = True, host: str = "a", torch: str = "2.13.0", **status: str
) -> RankStatus:
    return RankStatus(number, host, Status(enabled, **status), {"torch": torch})


class TestMessages:
    def test_nothing_to_say(self) -> None:
        assert problems(rank(0), rank(1, host="b"), rank(2)) == []

    def test_inactive_ranks_are_named_with_the_reason(self) -> None:
        off = {"enabled": False, "activation": "TE_OVERLAY_ENABLE is not set"}
        refused = {"enabled": False, "problem": "built without CUDA", "host": "b"}
        first, second = problems(
            rank(0), *(rank(i, **off) for i in (1, 2, 3, 5)), rank(4), rank(6, **refused)
        )
        assert first.startswith(
            "the overlay is not active on ranks 1-3, 5 (host a): TE_OVERLAY_ENABLE is not set. "
            "Start every rank with TE_OVERLAY_ENABLE=1"
        )
        assert second.startswith("the overlay is not active on rank 6 (host b): built without CUDA")

    def test_patched_library_is_active(self) -> None:
        some = [rank(number, enabled=False, library="0.1.0") for number in range(2)]
        assert problems(*some) == []
        (line,) = problems(some[0], rank(1))
        assert line == (
            "patched core library differs: 0.1.0 on rank 0 (host a); as TransformerEngine ships it "
            "on rank 1 (host a). Install the same on every rank"
        )

    def test_all_inactive(self) -> None:
        (line,) = problems(rank(0, enabled=False), rank(1, enabled=False))
        assert "not active on all 2 ranks" in line
        (line,) = problems(rank(0, enabled=False))
        assert "not active on the only rank" in line

    def test_another_patch_on_top(self) -> None:
        (line,) = problems(rank(0), rank(1, problem="tex.fused_rope_forward is patched by others"))
        assert line.startswith("the overlay is active but incomplete on rank 1 (host a): tex.fused")

    def test_versions(self) -> None:
        (line,) = problems(rank(0), rank(1, torch="2.12.0", host="b"), rank(2))
        assert line == (
            "torch differs: 2.13.0 on ranks 0, 2 (host a); 2.12.0 on rank 1 (host b). "
            "Install the same on every rank"
        )

    def test_a_version_that_one_rank_does_not_tell(self) -> None:
        silent = RankStatus(1, "a", Status(True), {})
        (line,) = problems(rank(0), silent)
        assert "torch differs: 2.13.0 on rank 0 (host a); unknown on rank 1" in line

    def test_path_rule(self) -> None:
        (line,) = problems(rank(0, path_rule="unset"), rank(1, path_rule="1: token-linear always"))
        assert line.startswith(f"{NVTE_VARIABLE} differs: unset on rank 0 (host a); 1: token-lin")

    def test_many_hosts_are_counted(self) -> None:
        off = [rank(i, enabled=False, host=f"h{i}") for i in range(6)]
        (line,) = problems(*off, rank(6))
        assert "ranks 0-5 (hosts h0, h1, h2, h3 and 2 more)" in line


def test_without_a_group_it_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"not initialised: call .*init_process_group first"):
        overlay.status_across_ranks()


@pytest.fixture
def world_of_one(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world_of_one")
class TestCall:
    def test_active(self, te: ModuleType) -> None:
        overlay.enable(strict=True)
        found = overlay.status_across_ranks()
        assert found.problem == ""
        (only,) = found.ranks
        assert only.status == overlay.status()
        assert only.versions["TransformerEngine"] == "2.18.0"
        assert only.versions["transformer-engine-overlay"] == overlay.__version__

    def test_inactive(self, te: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
        with pytest.raises(overlay.OverlayError, match="not active on the only rank"):
            overlay.status_across_ranks()
        assert not caplog.records
        with caplog.at_level(logging.WARNING, "transformer_engine_overlay"):
            found = overlay.status_across_ranks(strict=False)
        assert [record.getMessage() for record in caplog.records] == [found.problem]
