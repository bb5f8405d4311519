# SPDX-License-Identifier: Apache-2.0
"""Which body the token-linear kernel has for a call: the rule, without a GPU."""

from __future__ import annotations

import pytest

from transformer_engine_overlay import _native

SCALAR, NARROW2, NARROW4, WIDE32, WIDE64 = range(5)
FP32, FP16, BF16 = range(3)
CLEAN = (4096, 8192, 12288)


def body(
    heads: int,
    dim: int,
    rotary_dim: int,
    *,
    dtype: int = BF16,
    interleaved: bool = False,
    strides: tuple[int, int, int] | None = None,
    addresses: tuple[int, int, int] = CLEAN,
) -> int:
    strides = strides or (heads * dim, dim, 1)
    return _native.choose_body(dtype, interleaved, heads, dim, rotary_dim, strides, addresses)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((1, 64, 64), NARROW2),
        ((4, 128, 128), NARROW2),
        ((5, 64, 64), NARROW4),
        ((7, 128, 128), NARROW4),  # 112 vectors, but few heads
        ((8, 64, 64), NARROW4),  # 64 vectors
        ((12, 64, 64), WIDE32),  # 96 vectors
        ((4, 256, 256), NARROW2),  # 128 vectors, but few heads
        ((5, 256, 256), WIDE32),  # 160 vectors
        ((15, 128, 128), WIDE32),
        ((16, 128, 128), WIDE64),  # 256 vectors
        ((64, 64, 32), WIDE64),
        ((1, 576, 64), NARROW2),
        ((1, 1024, 1024), WIDE64),  # 64 columns: more than a warp has lanes
        ((1, 8, 8), SCALAR),  # half of d2 is no whole vector
        ((1, 16, 16), NARROW2),
        ((8, 128, 24), SCALAR),
        ((8, 100, 64), SCALAR),  # heads begin off a vector
        ((8, 128, 0), SCALAR),
        ((1, 16384, 16384), SCALAR),  # its angles do not fit a block's shared memory
        ((2**24, 128, 128), SCALAR),  # a row of 2^31 elements
    ],
)
def test_by_shape(shape: tuple[int, int, int], expected: int) -> None:
    assert body(*shape) == expected
    assert body(*shape, dtype=FP16) == expected


@pytest.mark.parametrize(
    ("shape", "dtype", "interleaved", "expected"),
    [
        ((4, 128, 128), FP32, False, NARROW2),
        ((5, 128, 128), FP32, False, WIDE32),
        ((8, 128, 128), FP32, False, WIDE64),
        ((1, 8, 8), FP32, False, NARROW2),
        ((1, 12, 12), FP32, False, SCALAR),
        ((1, 12, 12), FP32, True, NARROW2),
        ((1, 8, 8), BF16, True, NARROW2),
        ((8, 128, 128), BF16, True, NARROW4),
        ((16, 128, 128), BF16, True, WIDE64),
        ((1, 256, 256), FP32, True, WIDE64),  # 64 columns
    ],
)
def test_by_dtype_and_pairing(
    shape: tuple[int, int, int], dtype: int, interleaved: bool, expected: int
) -> None:
    assert body(*shape, dtype=dtype, interleaved=interleaved) == expected


@pytest.mark.parametrize(
    ("strides", "fits"),
    [
        ((3 * 1024, 384, 1), True),  # a slice of a fused projection
        ((576, 64, 1), True),
        ((0, 0, 1), True),  # an expanded gradient, of one row
        ((2**40, 2**36, 1), True),
        ((-1024, 128, 1), True),
        ((1028, 128, 1), False),
        ((1024, 132, 1), False),
        ((1024, 128, 2), False),
        ((0, 0, 0), False),
    ],
)
def test_by_strides(strides: tuple[int, int, int], fits: bool) -> None:
    assert (body(8, 128, 128, strides=strides) != SCALAR) == fits


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("offset", [2, 4, 8])
def test_by_address(which: int, offset: int) -> None:
    addresses = list(CLEAN)
    addresses[which] += offset
    assert body(8, 128, 128, addresses=(addresses[0], addresses[1], addresses[2])) == SCALAR


NONE = -1


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ((BF16, False, 1, 1, 64, 64, 64), NARROW2),
        ((BF16, False, 4, 1, 128, 128, 128), NARROW2),  # 80 vectors
        ((BF16, False, 6, 1, 128, 128, 128), WIDE32),  # 112
        ((BF16, True, 6, 1, 128, 128, 128), WIDE32),
        ((BF16, False, 16, 2, 128, 128, 128), WIDE32),  # 288
        ((BF16, False, 16, 4, 128, 128, 128), WIDE64),  # 320
        ((FP32, False, 8, 2, 128, 128, 128), WIDE64),
        ((FP16, False, 1, 1, 1024, 1024, 8), WIDE64),  # more columns than a warp has lanes
        ((BF16, False, 2, 2, 64, 64, 0), NARROW2),
        ((BF16, False, 2, 2, 64, 64, 20), NONE),  # the value is no whole vectors
        ((BF16, False, 2, 2, 100, 64, 64), NONE),  # nor are the heads
        ((BF16, False, 2, 2, 64, 8, 64), NONE),  # nor is half of d2
        ((BF16, True, 2, 2, 64, 8, 64), NARROW2),
        ((BF16, False, 2, 2, 64, 0, 64), NONE),
        ((BF16, False, 1, 1, 16384, 16384, 8), NONE),  # too many angles
        ((BF16, False, 2**14, 2**14, 128, 128, 128), NONE),  # rows of 2^22 elements and more
    ],
)
def test_fused_calls(call: tuple[int, bool, int, int, int, int, int], expected: int) -> None:
    assert _native.choose_fused_body(*call) == expected
