# SPDX-License-Identifier: Apache-2.0
"""The fault record where only a GPU shows it: bodies, capture, no synchronisation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from programs import run_python

from transformer_engine_overlay import _native, apply_rotary_pos_emb_thd

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _fresh_record() -> Iterator[None]:
    _native.reset_faults(torch.cuda.current_device())
    yield
    _native.reset_faults(torch.cuda.current_device())


def batch(heads: int, dim: int, table_rows: int) -> tuple[torch.Tensor, ...]:
    t = torch.randn(64, heads, dim, device="cuda", dtype=torch.bfloat16)
    freqs = torch.randn(table_rows, 1, 1, dim, device="cuda")
    return t, freqs, torch.tensor([0, 64], dtype=torch.int32, device="cuda")


@pytest.mark.parametrize(
    ("heads", "dim"), [(1, 64), (6, 64), (8, 128), (32, 128), (3, 20)], ids=str
)
def test_each_body_reports(heads: int, dim: int) -> None:
    apply_rotary_pos_emb_thd(*batch(heads, dim, 60))
    torch.cuda.synchronize()
    with pytest.warns(RuntimeWarning, match=r"position 6[0-3], and freqs has 60 rows"):
        apply_rotary_pos_emb_thd(*batch(heads, dim, 64))


def test_a_fault_is_found_without_a_synchronisation() -> None:
    faulty, sound = batch(8, 128, 60), batch(8, 128, 64)
    apply_rotary_pos_emb_thd(*faulty)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.warns(RuntimeWarning, match="freqs has 60 rows"):
            apply_rotary_pos_emb_thd(*sound)
    finally:
        torch.cuda.set_sync_debug_mode("default")


PROGRAM = """
import torch, warnings
from transformer_engine_overlay import apply_rotary_pos_emb_thd as rope
t = torch.randn(64, 8, 128, device="cuda", dtype=torch.bfloat16)
freqs = torch.randn(60, 1, 1, 128, device="cuda")
cu = torch.tensor([0, 60], dtype=torch.int32, device="cuda")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = rope(t, freqs, cu)
graph.replay()
torch.cuda.synchronize()
cu.fill_(64)
cu[0] = 0
graph.replay()
torch.cuda.synchronize()
assert y[60:].eq(0).all() and y[:60].ne(0).any()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    rope(t, freqs, torch.tensor([0, 60], dtype=torch.int32, device="cuda"))
assert any("freqs has 60 rows" in str(w.message) for w in caught), caught
print("reported")
"""


def test_first_call_in_a_capture_reports_what_a_replay_meets() -> None:
    assert "reported" in run_python(PROGRAM).stdout


def test_many_faults_at_once_leave_one_whole_record() -> None:
    t = torch.randn(4096, 8, 128, device="cuda", dtype=torch.bfloat16)
    freqs = torch.randn(8, 1, 1, 128, device="cuda")
    cu = torch.arange(0, 4097, 64, dtype=torch.int32, device="cuda")
    y = apply_rotary_pos_emb_thd(t, freqs, cu)
    torch.cuda.synchronize()
    with pytest.warns(RuntimeWarning, match=r"position (\d+), and freqs has 8 rows") as caught:
        apply_rotary_pos_emb_thd(*batch(8, 128, 64))
    assert len(caught) == 1
    assert y.view(-1, 64, 8, 128)[:, 8:].eq(0).all()


FORK = """
import os, torch
from transformer_engine_overlay import apply_rotary_pos_emb_thd as rope
t = torch.randn(64, 8, 128, device="cuda", dtype=torch.bfloat16)
freqs = torch.randn(60, 1, 1, 128, device="cuda")
rope(t, freqs, torch.tensor([0, 64], dtype=torch.int32, device="cuda"))
torch.cuda.synchronize()
child = os.fork()
if child:
    print("child", os.waitpid(child, 0)[1])
"""


def test_a_forked_child_ends_well_and_leaves_the_fault_to_its_parent() -> None:
    done = run_python(FORK)
    assert "child 0" in done.stdout
    assert done.stderr.count("freqs has 60 rows") == 1
