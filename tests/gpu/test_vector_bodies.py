# SPDX-License-Identifier: Apache-2.0
"""Each body of the token-linear kernel against the legacy grid, which has the scalar body."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from transformer_engine_overlay import _native
from transformer_engine_overlay.environment import forced_path
from transformer_engine_overlay.thd import rotate_thd
from transformer_engine_overlay.verify import same_bits

pytestmark = pytest.mark.gpu

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
TOKENS = 701  # not a multiple of what a block or a warp takes

# (heads, head_dim, rotary_dim) and the body that 16-bit half-split calls have
SHAPES = {
    (1, 64, 64): "narrow2",
    (1, 128, 64): "narrow2",  # with a part that is copied
    (4, 128, 128): "narrow2",
    (2, 96, 96): "narrow2",  # 6 units a head: two of 8 lanes have none
    (1, 32, 16): "narrow2",  # 1 unit a head
    (3, 256, 192): "narrow2",
    (5, 64, 64): "narrow4",
    (7, 128, 64): "narrow4",
    (10, 192, 96): "wide32",  # 6 columns, which do not divide 32
    (8, 128, 128): "wide32",
    (16, 128, 64): "wide32",
    (32, 128, 128): "wide64",
    (33, 128, 112): "wide64",  # 7 units a head
    (1, 1024, 1024): "wide64",  # more than 32 units a head
    (2, 2048, 2048): "wide64",
    (3, 80, 20): "scalar",
    (3, 20, 20): "scalar",
}


def batches() -> Iterator[tuple[str, torch.Tensor, int]]:
    """Name, global boundaries, cp_size."""
    many = torch.cat([torch.zeros(3000), torch.arange(0, 600), torch.full((2000,), 650.0)])
    yield "one", torch.tensor([0, TOKENS]), 1
    yield "empty ones", torch.tensor([0, 0, 3, 3, 3, 40, 41, 41, 640]), 1
    yield "thousands", many, 1
    yield "cp_size 2", torch.tensor([0, 4, 4, 24, 1000, 1004, 1360]), 2
    yield "uneven cp_size 4", torch.tensor([0, 698, 698, 1400, 2000, 2802]), 4


def tables(rotary_dim: int, interleaved: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """Tables of 512 rows, fewer than the longest sequence has tokens."""
    half = torch.randn(512, rotary_dim // 2, device="cuda") * 40
    twice = half.repeat_interleave(2, -1) if interleaved else torch.cat((half, half), -1)
    yield "symmetric", twice
    some = twice.clone()
    some[::3, 1] += 1.0
    some[5, 0] = -0.0
    yield "partly asymmetric", some
    large = twice * torch.where(torch.rand_like(twice[:, :1]) < 0.5, 1.0, 40000.0)
    large[7] = float("inf")
    large[8] = float("nan")
    yield "large angles", large


@pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_body_gives_the_bits_of_the_scalar_one(
    shape: tuple[int, int, int], dtype: torch.dtype, interleaved: bool
) -> None:
    heads, dim, rotary_dim = shape
    before = _native.body_counts()
    t = torch.randn(TOKENS, heads, dim, device="cuda").to(dtype)
    for (name, boundaries, cp_size), (kind, table) in itertools.product(
        batches(), tables(rotary_dim, interleaved)
    ):
        cu = boundaries.to(torch.int32).cuda()
        starts = torch.arange(cu.numel() - 1, dtype=torch.int32, device="cuda") % 5
        for cp_rank, transpose in itertools.product(range(cp_size), (False, True)):
            results = []
            for path in ("0", "1"):
                with forced_path(path):
                    results.append(
                        rotate_thd(
                            t,
                            table[:, None, None],
                            cu,
                            starts,
                            interleaved,
                            cp_size,
                            cp_rank,
                            transpose,
                        )
                    )
            assert same_bits(*results), (name, kind, cp_rank, transpose)
    after = _native.body_counts()
    ran = {name for name in after if after[name] > before[name]}
    assert len(ran) == 1
    if dtype is not torch.float32 and not interleaved:
        assert ran == {SHAPES[shape]}


def test_a_slice_of_a_fused_projection_takes_the_vector_body() -> None:
    fused = torch.randn(64, 8, 3 * 128, device="cuda", dtype=torch.bfloat16)
    freqs = torch.randn(64, 1, 1, 128, device="cuda")
    cu = torch.tensor([0, 64], dtype=torch.int32, device="cuda")
    for offset, body in ((128, "wide32"), (129, "scalar")):
        x = fused[..., offset : offset + 128]
        before = _native.body_counts()[body]
        with forced_path("1"):
            y = rotate_thd(x, freqs, cu, None, False, 1, 0, False)
        assert _native.body_counts()[body] == before + 1
        with forced_path("0"):
            assert same_bits(y, rotate_thd(x, freqs, cu, None, False, 1, 0, False))
