# SPDX-License-Identifier: Apache-2.0
"""What the scripts that run under torchrun share: the process group, and gathering on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class World:
    """This process among the others."""

    rank: int
    size: int
    device: torch.device
    backend: str

    def all_reduce(self, t: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks."""
        carried = self._carried(t).clone()
        dist.all_reduce(carried)
        return carried.to(t.device)

    def all_gather(self, t: torch.Tensor) -> list[torch.Tensor]:
        """The tensors of all ranks, bit for bit; all have the shape of `t`."""
        carried = self._carried(t)
        gathered = [torch.empty_like(carried) for _ in range(self.size)]
        dist.all_gather(gathered, carried)
        return [each.to(t.device) for each in gathered]

    def all_gather_differentiably(self, t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The same, with a backward that sums the gradients of a share over the ranks."""
        gathered: tuple[torch.Tensor, ...] = _AllGather.apply(t, self)
        return gathered

    def _carried(self, t: torch.Tensor) -> torch.Tensor:
        """`t` where the backend takes it from: gloo carries what lies on the host."""
        return t.detach().contiguous().to("cpu" if self.backend == "gloo" else t.device)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, world: World) -> tuple[torch.Tensor, ...]:
        ctx.world = world
        return tuple(world.all_gather(t))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.world.all_reduce(torch.stack(grads))[ctx.world.rank], None


@contextmanager
def joined_world() -> Iterator[World]:
    """Join the group that torchrun's environment and PLACE, such as ``cpu-gloo``, describe."""
    kind, _, backend = os.environ["PLACE"].partition("-")
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group(backend)
    world = World(dist.get_rank(), dist.get_world_size(), device, backend)
    try:
        yield world
        dist.barrier()
    finally:
        dist.destroy_process_group()
    print(f"rank {world.rank} of {world.size} done", flush=True)
