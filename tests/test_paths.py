# SPDX-License-Identifier: Apache-2.0
"""Which path a call takes, and who decides."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from packed import boundaries, randn, random_table

from transformer_engine_overlay import apply_rotary_pos_emb_thd, path_counts

from conftest import PATH_VARIABLE  # isort: skip


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
    # On the GPU a block of 64 threads holds 16 of these small tokens.
    assert blocks == {"legacy_grid": 128, "token_linear": 16 if device.type == "cpu" else 1}


@pytest.mark.parametrize("table_rows", [1, 16, 17, 4096])
def test_automatic_is_token_linear(
    device: torch.device, table_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PATH_VARIABLE, raising=False)
    before = path_counts()
    call(device, table_rows)
    after = path_counts()
    assert after["token_linear"]["calls"] == before["token_linear"]["calls"] + 1
    assert after["legacy_grid"] == before["legacy_grid"]


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
    name = {"0": "thd_legacy_grid_kernel", "1": "thd_token_linear_narrow_kernel"}[value]
    assert len(kernels) == 1
    assert name in kernels[0]
