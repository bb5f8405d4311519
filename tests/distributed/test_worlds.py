# SPDX-License-Identifier: Apache-2.0
"""Context parallelism with real processes: torch.distributed worlds of 2 and 4 ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from te_stub import write_stub
from worlds import PLACES, run_world


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_shares_are_those_of_cp_size_1(place: str, ranks: int) -> None:
    run_world("check_rope.py", ranks, place=place)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_loss_and_gradients_of_an_attention(place: str, ranks: int) -> None:
    run_world("check_attention.py", ranks, place=place)


def test_status_across_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TE_OVERLAY_ENABLE", raising=False)
    write_stub(tmp_path)
    run_world("check_status.py", 2, str(tmp_path))
