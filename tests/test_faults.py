# SPDX-License-Identifier: Apache-2.0
"""The fault record: wrong packing that a kernel meets is reported, once, and changes nothing."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from packed import boundaries, randn, random_table
from programs import run_python

from transformer_engine_overlay import _native, apply_rotary_pos_emb_thd, faults


@pytest.fixture(autouse=True)
def _fresh_record(device: torch.device) -> Iterator[None]:
    index = -1 if device.type == "cpu" else torch.cuda.current_device()
    _native.reset_faults(index)
    yield
    _native.reset_faults(index)


def call(
    device: torch.device,
    cu: list[int],
    *,
    rows: int = 16,
    table_rows: int = 16,
    starts: list[int] | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """Call, and on a GPU call again, soundly: that is when the fault is found."""
    t = randn(rows, 2, 8, device=device)
    freqs = random_table(table_rows, 8, device)
    start_positions = None
    if starts is not None:
        start_positions = torch.tensor(starts, dtype=torch.int32, device=device)
    y = apply_rotary_pos_emb_thd(
        t,
        freqs,
        boundaries(cu, device),
        start_positions=start_positions,
        cp_size=cp_size,
        cp_rank=cp_rank,
    )
    if device.type == "cuda":
        torch.cuda.synchronize()
        apply_rotary_pos_emb_thd(t, random_table(64, 8, device), boundaries([0, rows], device))
    return y


FAULTS = {
    "table too short": (
        {"cu": [0, 4, 16], "table_rows": 10},
        r"sequence 1 has a token at position 1[01], and freqs has 10 rows",
    ),
    "start positions lead beyond the table": (
        {"cu": [0, 4, 16], "starts": [0, 5]},
        r"sequence 1 has a token at position 16, and freqs has 16 rows",
    ),
    "negative start position": (
        {"cu": [0, 16], "starts": [-1]},
        r"sequence 0 has a token at position -1, and freqs has 16 rows",
    ),
    "unpadded boundaries under context parallelism": (
        {"cu": [0, 6, 32], "table_rows": 64, "cp_size": 2, "cp_rank": 1},
        r"boundary 6 of sequence [01] is not divisible by 2 \* cp_size = 4 \(cp_rank 1 of "
        r"cp_size 2\).*unpadded with cp_size=2",
    ),
    "even shares that are still wrong": (
        {"cu": [0, 698], "rows": 175, "table_rows": 698, "cp_size": 4},
        r"boundary 698 of sequence 0 is not divisible by 2 \* cp_size = 8",
    ),
    "first boundary is not 0": (
        {"cu": [3, 16]},
        r"row [012] lies before the first boundary, local row 3",
    ),
}


@pytest.mark.parametrize("path", ["0", "1"], ids=["legacy_grid", "token_linear"])
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_warned_of_once(
    name: str, path: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVTE_FUSED_ROPE_THD_TOKEN_LINEAR", path)
    arguments, message = FAULTS[name]
    with pytest.warns(RuntimeWarning, match=message):
        call(device, **arguments)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(device, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "arguments",
    [
        {"cu": [0, 4, 16]},
        {"cu": [0, 4]},  # tail rows
        {"cu": [0, 0, 0, 16]},
        {"cu": [0]},
        {"cu": [0, 8, 32], "table_rows": 32, "cp_size": 2, "cp_rank": 1},
        {"cu": [0, 16], "starts": [0]},
    ],
)
def test_sound_packing_reports_nothing(device: torch.device, arguments: dict[str, object]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(device, **arguments)  # type: ignore[arg-type]


def test_raise(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faults.VARIABLE, "raise")
    with pytest.raises(faults.PackingError, match="position 10"):
        call(device, [0, 16], table_rows=10)
    call(device, [0, 16])


def test_ignore(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(faults.VARIABLE, "ignore")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(device, [0, 16], table_rows=10)


def test_another_policy_is_refused_by_name(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(faults.VARIABLE, "panic")
    message = r"TE_OVERLAY_ON_FAULT is 'panic'; it must be warn.* It was read because .*position 10"
    with pytest.raises(ValueError, match=message):  # the fault is told once, so here
        call(device, [0, 16], table_rows=10)


def test_where_warnings_are_errors_the_next_call_runs(device: torch.device) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="position 10"):
            call(device, [0, 16], table_rows=10)
        y = call(device, [0, 16], table_rows=10)
    assert y[:10].ne(0).any(-1).all()


def test_a_faulty_row_is_zeros_and_the_others_are_right(device: torch.device) -> None:
    with pytest.warns(RuntimeWarning, match="position 10"):
        y = call(device, [0, 16], table_rows=10)
    assert y[10:].eq(0).all()
    assert y[:10].ne(0).any(-1).all()


def test_the_last_call_of_a_process_is_reported_at_its_exit(device: torch.device) -> None:
    program = (
        "import torch; from transformer_engine_overlay import apply_rotary_pos_emb_thd as rope\n"
        f"d = torch.device({str(device)!r})\n"
        "rope(torch.zeros(4, 1, 8, device=d), torch.zeros(2, 1, 1, 8, device=d),"
        " torch.tensor([0, 4], dtype=torch.int32, device=d))\n"
        "if d.type == 'cuda': torch.cuda.synchronize()\n"
    )
    told = run_python(program).stderr
    assert "met wrong packing: sequence 0 has a token at position" in told


def test_at_exit_an_error_hides_no_other_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The faults of three devices, as report_faults() meets them one after the other."""
    pending = [faults.PackingError("of cuda:0"), RuntimeWarning("of cuda:1"), ValueError("of 2")]

    def report_faults() -> None:
        if pending:
            raise pending.pop(0)

    monkeypatch.setattr(_native, "report_faults", report_faults)
    faults._report_at_exit()
    told = capsys.readouterr().err
    assert all(text in told for text in ("PackingError: of cuda:0", "of cuda:1", "of 2"))


@pytest.mark.parametrize(("cuda_in_use", "reports"), [(True, 1), (False, 2)])
def test_a_forked_child_leaves_the_records_of_devices_alone(
    cuda_in_use: bool, reports: int
) -> None:
    """One without CUDA of its own: it would report anew, from memory that it may not have."""
    program = (
        "import os, sys, torch\n"
        "from transformer_engine_overlay import _native, faults\n"
        f"torch.cuda.is_initialized = lambda: {cuda_in_use}\n"
        "_native.report_faults = lambda: os.write(1, b'report ')\n"
        "child = os.fork()\n"
        "assert child == 0 or os.waitpid(child, 0)[1] == 0\n"
    )
    assert run_python(program).stdout == "report " * reports
