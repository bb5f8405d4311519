# SPDX-License-Identifier: Apache-2.0
"""Long contexts, a million sequences, and tables shorter than the sequences of a large batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from packed import boundaries, randn, random_table

from transformer_engine_overlay.thd import rotate_thd
from transformer_engine_overlay.verify import same_bits

BothPaths = Callable[..., torch.Tensor]
NUM_POSITIONS = 2**20


def ulp(expected: torch.Tensor) -> torch.Tensor:
    """The distance of float32 numbers around each of `expected`, which is float64."""
    exponent = torch.frexp(expected).exponent.masked_fill(expected == 0, -125).clamp(min=-125)
    return torch.ldexp(torch.ones_like(expected), exponent - 24)


def test_ulp() -> None:
    """Guards the tests below."""
    x = torch.tensor([1.0, 0.75, 1.5, 3e-9, 0.0], dtype=torch.float64)
    above = torch.nextafter(x.float(), torch.tensor(9.0)).double() - x.float().double()
    assert torch.equal(ulp(x.float().double())[:4], above[:4])
    assert ulp(x)[4] == 2.0**-149


@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
@pytest.mark.parametrize("transpose", [False, True])
def test_k30_every_position_to_a_million_within_2_ulp(
    device: torch.device, base: float, transpose: bool, both_paths: BothPaths
) -> None:
    """Of the float64 cosine and sine of the float32 angle, the fastest frequency included."""
    inv_freq = base ** (-torch.arange(4, dtype=torch.float64) / 4)
    positions = torch.arange(NUM_POSITIONS, dtype=torch.float32)
    angles = torch.outer(positions, inv_freq.float()).to(device)
    freqs = torch.cat([angles, angles], dim=-1)[:, None, None, :]
    x = torch.zeros(NUM_POSITIONS, 1, 8, device=device)
    x[..., :4] = 1.0  # each pair is (1, 0), which turns to (cos, sin)
    cu = boundaries([0, NUM_POSITIONS], device)
    y = both_paths(lambda: rotate_thd(x, freqs, cu, None, False, 1, 0, transpose))
    exact = angles.double()
    sine = -exact.sin() if transpose else exact.sin()
    for actual, expected in ((y[:, 0, :4], exact.cos()), (y[:, 0, 4:], sine)):
        error = (actual.double() - expected).abs() / ulp(expected)
        assert error.max() <= 2.0


@pytest.mark.parametrize("position", [131_071, 1_048_575])
def test_k30_position_reached_by_its_start(device: torch.device, position: int) -> None:
    freqs = torch.arange(NUM_POSITIONS, dtype=torch.float32, device=device).view(-1, 1, 1, 1)
    x = torch.tensor([[[1.0, 0.0]]], device=device)
    starts = boundaries([position], device)
    y = rotate_thd(
        x, freqs.repeat(1, 1, 1, 2), boundaries([0, 1], device), starts, False, 1, 0, False
    )
    angle = torch.tensor(float(position), dtype=torch.float64, device=device)
    expected = torch.stack([angle.cos(), angle.sin()])
    assert ((y[0, 0].double() - expected).abs() <= 2 * ulp(expected)).all()


def turned_rows(freqs: torch.Tensor, transpose: bool) -> torch.Tensor:
    """A row of ones turned by each row of a table, and a row of zeros behind them."""
    count = freqs.shape[0]
    ones = torch.ones(count, 1, freqs.shape[3], device=freqs.device)
    cu = boundaries([0, count], freqs.device)
    y = rotate_thd(ones, freqs, cu, None, False, 1, 0, transpose)
    return torch.cat([y, torch.zeros_like(y[:1])])


@pytest.mark.parametrize("transpose", [False, True])
def test_a_million_sequences(device: torch.device, transpose: bool, both_paths: BothPaths) -> None:
    lengths = torch.arange(1_000_000) * 7 % 4  # 0 to 3, empty ones among them
    cu = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    tokens = int(cu[-1])
    freqs = random_table(3, 2, device)
    ones = torch.ones(tokens, 1, 2, device=device)
    cu32 = cu.int().to(device)
    y = both_paths(lambda: rotate_thd(ones, freqs, cu32, None, False, 1, 0, transpose))
    positions = torch.arange(tokens) - cu[:-1].repeat_interleave(lengths)
    assert same_bits(y, turned_rows(freqs, transpose)[positions.to(device)])


@pytest.mark.parametrize(("cp_size", "cp_rank"), [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("table_rows", [1, 3, 6])
def test_k07_many_sequences_with_a_table_shorter_than_they_are(
    device: torch.device,
    cp_size: int,
    cp_rank: int,
    transpose: bool,
    table_rows: int,
    both_paths: BothPaths,
) -> None:
    """More sequences than a dimension of a grid holds, with rows that have no table row."""
    count, length = 70_000, 8
    rows = length // cp_size
    freqs = random_table(table_rows, 2, device)
    starts = torch.arange(count, dtype=torch.int32) % 3
    cu = torch.arange(count + 1, dtype=torch.int32, device=device) * length
    ones = torch.ones(count * rows, 1, 2, device=device)
    y = both_paths(
        lambda: rotate_thd(ones, freqs, cu, starts.to(device), False, cp_size, cp_rank, transpose)
    )
    chunk = list(range(length)) if cp_size == 1 else [[0, 1, 6, 7], [2, 3, 4, 5]][cp_rank]
    positions = (starts[:, None].long() + torch.tensor(chunk)).flatten()
    expected = turned_rows(freqs, transpose)[positions.clamp(max=table_rows).to(device)]
    assert same_bits(y, expected)


def test_many_sequences_of_one_row_each(device: torch.device, both_paths: BothPaths) -> None:
    """With a table of one row, the smallest there is."""
    t = randn(80_000, 1, 4, device=device)
    freqs = random_table(1, 4, device)
    cu = torch.arange(80_001, dtype=torch.int32, device=device)
    y = both_paths(lambda: rotate_thd(t, freqs, cu, None, False, 1, 0, False))
    whole = rotate_thd(
        t.transpose(0, 1), freqs, boundaries([0, 1], device), None, False, 1, 0, False
    )
    assert same_bits(y, whole.transpose(0, 1))
