# SPDX-License-Identifier: Apache-2.0
"""The oracle: rotary position embedding in float64 torch, written to be read.

It shares no formula with the kernels: positions of the whole sequences come first, then the
dual-chunk split picks a rank's rows; gradients come from autograd.
"""

from __future__ import annotations

import torch

from transformer_engine_overlay.packing import local_token_indices


def rope_thd_reference(
    t: torch.Tensor,
    freqs: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """Apply rotary position embedding to a packed batch in float64.

    Parameters are those of `transformer_engine_overlay.apply_rotary_pos_emb_thd`; lengths must be
    divisible by ``2 * cp_size`` if ``cp_size > 1``. Copies `cu_seqlens` to the host.

    Returns
    -------
    torch.Tensor
        ``[t, h, d]`` float64, differentiable in `t`.
    """
    positions = local_positions(cu_seqlens, start_positions, cp_size, cp_rank, t.shape[0])
    table = freqs.float().double().flatten(1)
    has_row = (positions >= 0) & (positions < table.shape[0])
    angles = torch.zeros(t.shape[0], 1, table.shape[1], dtype=torch.float64, device=t.device)
    rows = positions[has_row].to(t.device)
    has_row = has_row.to(t.device)
    angles[has_row, 0] = table[rows]

    x = t.double()
    rotary, rest = x[..., : table.shape[1]], x[..., table.shape[1] :]
    rotated = rotary * angles.cos() + _rotate_pairs(rotary, interleaved) * angles.sin()
    result = torch.cat([rotated, rest], dim=-1)
    return torch.where(has_row[:, None, None], result, 0.0)


def local_positions(
    cu_seqlens: torch.Tensor,
    start_positions: torch.Tensor | None,
    cp_size: int,
    cp_rank: int,
    num_tokens: int,
) -> torch.Tensor:
    """Return the position of each local token in its sequence, -1 outside of all sequences.

    Returns
    -------
    torch.Tensor
        ``[num_tokens]`` int64, on the CPU.
    """
    boundaries = cu_seqlens.tolist()
    starts = [0] * len(boundaries) if start_positions is None else start_positions.tolist()
    whole = torch.full((max(boundaries[-1], 0),), -1, dtype=torch.int64)
    for begin, end, start in zip(boundaries, boundaries[1:], starts, strict=False):
        whole[begin:end] = torch.arange(start, start + end - begin)
    before = torch.full((boundaries[0] // cp_size,), -1, dtype=torch.int64)
    local = whole[local_token_indices(cu_seqlens, cp_size, cp_rank)]
    tail = torch.full((max(num_tokens - len(before) - len(local), 0),), -1, dtype=torch.int64)
    return torch.cat([before, local, tail])[:num_tokens]


def _rotate_pairs(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """Return, for each element, its partner with the sign of a quarter turn."""
    if interleaved:
        pairs = x.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
        return torch.stack([-pairs[..., 1], pairs[..., 0]], dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)
