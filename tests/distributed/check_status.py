# SPDX-License-Identifier: Apache-2.0
"""`status_across_ranks` over a stub TransformerEngine, with a rank that differs.

Each rank must see the same, and say so: a rank that raised alone would leave the others waiting.
"""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from world import World, joined_world

import transformer_engine_overlay as overlay
from transformer_engine_overlay import _native

ODD = 1  # the rank that differs


def refusal() -> str:
    with pytest.raises(overlay.OverlayError) as caught:
        overlay.status_across_ranks()
    return str(caught.value)


def check_inactive(world: World) -> None:
    text = refusal()
    assert f"the overlay is not active on all {world.size} ranks" in text, text
    if world.rank != ODD:
        overlay.enable(strict=True)
    text = refusal()
    assert f"the overlay is not active on rank {ODD} (host " in text, text
    assert "TE_OVERLAY_ENABLE is not set: enable() is up to the program" in text, text
    assert "differs" not in text, text
    found = overlay.status_across_ranks(strict=False)
    assert found.problem == text
    assert [r.status.enabled for r in found.ranks] == [r != ODD for r in range(world.size)]
    overlay.enable(strict=True)
    assert overlay.status_across_ranks().problem == ""


def check_versions(world: World) -> None:
    true_version = torch.__version__
    if world.rank == ODD:
        torch.__version__ = "1.2.3"
    text = refusal()
    assert text.startswith("torch differs: "), text
    assert f"1.2.3 on rank {ODD} (host " in text, text
    assert len(text.splitlines()) == 1, text
    torch.__version__ = true_version


def check_group(world: World) -> None:
    """The status of a part of the ranks is for those alone."""
    group = dist.new_group([0])
    if world.rank == 0:
        assert len(overlay.status_across_ranks(group).ranks) == 1
        return
    with pytest.raises(RuntimeError, match=f"rank {world.rank} is not in the group"):
        overlay.status_across_ranks(group)


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    _native.WITH_CUDA = True
    _native.cuda_versions = lambda: (0, 13000)
    with joined_world() as world:
        check_inactive(world)
        check_versions(world)
        check_group(world)


if __name__ == "__main__":
    main()
