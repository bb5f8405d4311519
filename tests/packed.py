# SPDX-License-Identifier: Apache-2.0
"""Small packed batches for tests."""

from __future__ import annotations

from collections.abc import Sequence

import torch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
PAIRINGS = [False, True]


def boundaries(values: Sequence[int], device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def randn(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> torch.Tensor:
    """Random values that are the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)


def random_table(rows: int, rotary_dim: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """An angle table all of whose entries differ, so that nothing hides behind equal halves."""
    return randn(rows, 1, 1, rotary_dim, device=device, seed=rows) * 30.0
