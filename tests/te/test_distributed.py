# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's own function under the overlay, in each rank of a torch.distributed world."""

from __future__ import annotations

import pytest
from worlds import PLACES, run_world


@pytest.mark.parametrize("place", PLACES[1:])
@pytest.mark.parametrize("ranks", [2, 4])
def test_shares_are_those_of_cp_size_1(place: str, ranks: int) -> None:
    run_world("check_rope.py", ranks, "te", place=place)
