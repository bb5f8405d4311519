# SPDX-License-Identifier: Apache-2.0
"""A wrong build must not pass: each mutation of the headers makes named tests fail.

The mutated source is built for the CPU in a folder of its own and put in front of the installed
package. The same tests pass on the true build, which is the rest of this suite.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from mutation import Mutation, check_caught

MUTATIONS = {
    "swapped contraction": Mutation(
        "thd_rotation.h",
        "  const float product = partner * sin;\n  return std::fma(x, cos, product);",
        "  const float product = x * cos;\n  return std::fma(partner, sin, product);",
        ("test_rotation.py::test_contraction_is_the_written_one[cpu-False-False]",),
    ),
    "ignored cp_rank": Mutation(
        "thd_token_map.h",
        "if (row < half) return row + batch.cp_rank * length / 2;",
        "if (row < half) return row;",
        (
            "test_context_parallel.py::test_rank_holds_its_share_of_the_whole_result"
            "[cpu-2-1-False-False-dtype0]",
            "test_context_parallel.py::test_rank_matches_the_oracle[cpu-2-1-0-dtype0]",
            "test_context_parallel.py::test_ranks_reassemble[cpu-2]",
            "distributed/test_worlds.py::test_shares_are_those_of_cp_size_1[2-cpu-gloo]",
            "test_verify.py::TestCommand::test_passes",
        ),
    ),
    "off-by-one owner": Mutation(
        "thd_token_map.h",
        "end >= search.high || boundary > last;",
        "end >= search.high || boundary >= last;",
        (
            "test_index_math.py::test_owner_among_many_sequences",
            "test_behaviour.py::TestEmpty::test_k06_sequences[cpu]",
            "test_verify.py::TestCommand::test_passes",
        ),
    ),
    "warp search that narrows to the wrong part": Mutation(
        "thd_token_map.h",
        "return {search.low + lane * step, end < search.high ? end : search.high};",
        "return lane < 5 ? SequenceSearch{search.low + lane * step, end < search.high ? end : "
        "search.high} : SequenceSearch{search.low + (lane - 1) * step, search.low + lane * step};",
        ("test_index_math.py::test_owner_among_many_sequences",),
    ),
    "sine of the element itself in the transpose": Mutation(
        "thd_rotation.h",
        "rotate_element(x.first, a.cos_first, x.second, a.sin_second),\n"
        "            rotate_element(x.second, a.cos_second, x.first, -a.sin_first)",
        "rotate_element(x.first, a.cos_first, x.second, a.sin_first),\n"
        "            rotate_element(x.second, a.cos_second, x.first, -a.sin_second)",
        ("test_rotation.py::test_k18_backward_is_the_transpose[cpu-1-0-False]",),
    ),
    "table row not checked": Mutation(
        "thd_token_map.h",
        "if (position < 0 || position >= batch.table_rows) return",
        "if (position < 0) return",
        ("test_index_math.py::test_garbage_boundaries_stay_inside_of_the_table",),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_is_caught(name: str, tmp_path: Path) -> None:
    check_caught(MUTATIONS[name], tmp_path, TE_OVERLAY_CUDA="0")
