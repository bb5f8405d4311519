# SPDX-License-Identifier: Apache-2.0
"""Which path a call takes, and who decides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from packed import boundaries, randn, random_table

from transformer_engine_overlay import _native, apply_rotary_pos_emb_thd, path_counts

from conftest import PATH_VARIABLE  # isort: skip

LEGACY, LINEAR = _native.LEGACY_GRID, _native.TOKEN_LINEAR
MAX_BLOCKS = 2**31 - 1


def call(device: torch.device, table_rows: int = 64) -> torch.Tensor:
    t = randn(16, 2, 8, device=device)
    return apply_rotary_pos_emb_thd(
        t, random_table(table_rows, 8, device), boundaries([0, 4, 16], device)
    )


@pytest.mark.parametrize("value", ["0", "1"])
def test_forced_path_is_the_one_that_runs(
    device: torch.device, value: str, on_path: Callable[..., object]
) -> None:
    on_path(value, lambda: call(device))


def test_blocks_are_counted(device: torch.device, on_path: Callable[..., object]) -> None:
    before = path_counts()
    on_path("0", lambda: call(device, table_rows=64))
    on_path("1", lambda: call(device, table_rows=64))
    after = path_counts()
    blocks = {path: after[path]["blocks"] - before[path]["blocks"] for path in after}
    # On the GPU a block of the token-linear grid holds four tokens.
    assert blocks == {"legacy_grid": 128, "token_linear": 16 if device.type == "cpu" else 4}


@pytest.mark.parametrize(
    ("table_rows", "num_sequences", "num_tokens", "cp_size", "expected"),
    [
        (32, 1, 16, 1, LEGACY),  # exactly 2 blocks a row
        (33, 1, 16, 1, LINEAR),
        (31, 1, 16, 1, LEGACY),
        (64, 1, 16, 2, LEGACY),  # exactly 2 * cp_size blocks a row
        (65, 1, 16, 2, LINEAR),
        (16, 16, 16, 8, LEGACY),
        (17, 16, 16, 8, LINEAR),
        (1, 1, 1, 1, LEGACY),
        (0, 5, 16, 1, LEGACY),
        (5, 0, 16, 1, LEGACY),
        (65536, 2401, 65536, 1, LINEAR),
        (MAX_BLOCKS, 1, MAX_BLOCKS, 1, LEGACY),
        (MAX_BLOCKS + 1, 1, MAX_BLOCKS, 1, LINEAR),  # more than CUDA launches
        (2**40, 2**30, 2**31, 1, LINEAR),  # the product overflows 64 bits
        (2**31, 1, 2**31, 2**31 - 1, LINEAR),
        (2**20, 1, 2**20, 2**31 - 1, LEGACY),
    ],
)
def test_automatic_rule(
    table_rows: int, num_sequences: int, num_tokens: int, cp_size: int, expected: int
) -> None:
    shape = (table_rows, num_sequences, num_tokens, cp_size)
    assert _native.choose_path(None, *shape) == expected
    assert _native.choose_path("0", *shape) == LEGACY
    assert _native.choose_path("1", *shape) == LINEAR


@pytest.mark.parametrize(("table_rows", "path"), [(16, "legacy_grid"), (17, "token_linear")])
def test_automatic_choice_end_to_end(device: torch.device, table_rows: int, path: str) -> None:
    before = path_counts()
    call(device, table_rows)  # 2 sequences, 16 tokens: the gate is at 32 blocks
    after = path_counts()
    assert after[path]["calls"] == before[path]["calls"] + 1


def test_variable_is_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, path in [("1", "token_linear"), ("0", "legacy_grid"), ("1", "token_linear")]:
        monkeypatch.setenv(PATH_VARIABLE, value)
        before = path_counts()
        call(torch.device("cpu"), table_rows=16)
        assert path_counts()[path]["calls"] == before[path]["calls"] + 1


@pytest.mark.parametrize("value", ["", "2", "true", " 1", "01", "-1"])
def test_other_values_are_refused_by_name(
    device: torch.device, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = path_counts()
    monkeypatch.setenv(PATH_VARIABLE, value)
    with pytest.raises(ValueError, match=rf"{PATH_VARIABLE} is '{value}'; it must be 1"):
        call(device)
    assert path_counts() == before
    monkeypatch.delenv(PATH_VARIABLE)
    call(device)


@pytest.mark.gpu
def test_legacy_grid_too_large_is_refused_with_its_size(on_path: Callable[..., object]) -> None:
    device = torch.device("cuda")
    t = randn(16, 1, 2, device=device)
    freqs = random_table(65536, 2, device)
    cu = torch.zeros(32769 + 1, dtype=torch.int32, device=device)
    cu[-1] = 16
    message = r"the legacy grid would be 2147549184 blocks \(65536 table rows, 32769 sequences"
    with pytest.raises(ValueError, match=message):
        on_path("0", lambda: apply_rotary_pos_emb_thd(t, freqs, cu))
    before = path_counts()
    result = apply_rotary_pos_emb_thd(t, freqs, cu)
    torch.cuda.synchronize()
    assert path_counts()["token_linear"]["calls"] == before["token_linear"]["calls"] + 1
    assert result.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("value", ["0", "1"])
def test_profiler_names_the_kernel(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call(torch.device("cuda"))
    monkeypatch.setenv(PATH_VARIABLE, value)
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call(torch.device("cuda"))
        torch.cuda.synchronize()
    kernels = [event.key for event in profile.key_averages() if "thd_" in event.key]
    name = {"0": "thd_legacy_grid_kernel", "1": "thd_token_linear_kernel"}[value]
    assert len(kernels) == 1
    assert name in kernels[0]
