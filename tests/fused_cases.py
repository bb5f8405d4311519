# SPDX-License-Identifier: Apache-2.0
"""Calls that rotate query and key together, and what they must equal: one call for each part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from transformer_engine_overlay import (
    apply_fused_qkv_rotary_pos_emb_thd,
    apply_rotary_pos_emb_thd,
    apply_rotary_pos_emb_thd_qk,
)

Tensors = tuple[torch.Tensor, ...]


@dataclass
class FusedCase:
    """A packed batch and two tables, the same one twice by default."""

    device: str
    dtype: torch.dtype
    head_dim: int
    rotary_dim: int
    interleaved: bool = False
    two_tables: bool = False
    symmetric: bool = True
    tokens: int = 301
    boundaries: tuple[int, ...] = (0, 7, 7, 40, 44, 260)
    table_rows: int = 300
    starts: bool = False
    cp_size: int = 1
    cp_rank: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.freqs = self._table()
        self.k_freqs = self._table() if self.two_tables else self.freqs
        boundaries = torch.tensor(self.boundaries, dtype=torch.int32, device=self.device)
        self.cu_seqlens = boundaries * self.cp_size
        count = len(self.boundaries) - 1
        self.keywords: dict[str, Any] = {
            "interleaved": self.interleaved,
            "cp_size": self.cp_size,
            "cp_rank": self.cp_rank,
        }
        if self.starts:
            starts = torch.arange(count, dtype=torch.int32, device=self.device) * 3
            self.keywords["start_positions"] = starts

    def _table(self) -> torch.Tensor:
        half = torch.randn(self.table_rows, self.rotary_dim // 2, device=self.device) * 40
        table = half.repeat_interleave(2, -1) if self.interleaved else torch.cat((half, half), -1)
        if not self.symmetric:
            table[::3, :2] += 1.0
        return table[:, None, None, :].contiguous()

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def rotate(self, t: torch.Tensor, freqs: torch.Tensor) -> torch.Tensor:
        return apply_rotary_pos_emb_thd(t, freqs, self.cu_seqlens, **self.keywords)

    def qk(self, q: torch.Tensor, k: torch.Tensor) -> Tensors:
        k_freqs = self.k_freqs if self.two_tables else None
        return apply_rotary_pos_emb_thd_qk(
            q, k, self.freqs, self.cu_seqlens, k_freqs=k_freqs, **self.keywords
        )

    def qk_apart(self, q: torch.Tensor, k: torch.Tensor) -> Tensors:
        return self.rotate(q, self.freqs), self.rotate(k, self.k_freqs)

    def qkv(self, qkv: torch.Tensor, split: list[int]) -> Tensors:
        return apply_fused_qkv_rotary_pos_emb_thd(
            qkv, self.freqs, self.k_freqs, split, self.cu_seqlens, **self.keywords
        )

    def qkv_apart(self, qkv: torch.Tensor, split: list[int]) -> Tensors:
        q, k, v = qkv.split(split, -1)
        t, h = qkv.shape[:2]
        q = q.reshape(t, h * (split[0] // split[1]), split[1])
        return (*self.qk_apart(q, k), v.clone(memory_format=torch.contiguous_format))


def outputs_and_grads(function: Any, inputs: Tensors, *arguments: Any) -> list[torch.Tensor]:
    """Outputs, and gradients of the inputs for random gradients of the outputs."""
    inputs = tuple(x.detach().requires_grad_() for x in inputs)
    outputs = function(*inputs, *arguments)
    torch.manual_seed(1)
    grads = [torch.randn_like(x) for x in outputs]
    return [*outputs, *torch.autograd.grad(outputs, inputs, grads)]
