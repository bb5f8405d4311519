# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of a pair: its contraction, rounding, transpose, and accuracy."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from packed import DTYPES, PAIRINGS, boundaries, randn, random_table

from transformer_engine_overlay import apply_rotary_pos_emb_thd
from transformer_engine_overlay.reference import rope_thd_reference
from transformer_engine_overlay.thd import rotate_thd
from transformer_engine_overlay.verify import TOLERANCES, same_bits

BothPaths = Callable[..., torch.Tensor]
SHAPES = [(4, 8, 8), (3, 80, 20), (2, 66, 66), (1, 64, 64), (5, 72, 36), (2, 300, 290), (3, 7, 6)]


def fma32(x: np.float32, y: np.float32, z: np.float32) -> np.float32:
    """x * y + z with one rounding, by exact arithmetic."""
    exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
    near = np.float32(float(exact))
    candidates = [
        near,
        np.nextafter(near, np.float32("-inf")),
        np.nextafter(near, np.float32("inf")),
    ]
    return min(
        candidates,
        key=lambda c: (abs(Fraction(float(c)) - exact), int(c.view(np.uint32)) & 1),
    )


def pair_columns(rotary_dim: int, interleaved: bool) -> list[tuple[int, int]]:
    if interleaved:
        return [(2 * j, 2 * j + 1) for j in range(rotary_dim // 2)]
    return [(j, j + rotary_dim // 2) for j in range(rotary_dim // 2)]


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("interleaved", PAIRINGS)
def test_contraction_is_the_written_one(
    device: torch.device, interleaved: bool, transpose: bool, both_paths: BothPaths
) -> None:
    """The product with the sine is rounded, then fused into the product with the cosine."""
    tokens, d2 = 24, 16
    freqs = random_table(tokens, d2, device)
    cu = boundaries([0, tokens], device)
    columns = pair_columns(d2, interleaved)

    def rotate(t: torch.Tensor) -> np.ndarray:
        return (
            both_paths(lambda: rotate_thd(t, freqs, cu, None, interleaved, 1, 0, transpose))[:, 0]
            .cpu()
            .numpy()
        )

    # Unit vectors read the cosine and the sine of each table entry out of the kernel itself.
    first = torch.zeros(tokens, 1, d2, device=device)
    first[..., [i for i, _ in columns]] = 1.0
    second = 1.0 - first
    image_of_first, image_of_second = rotate(first), rotate(second)

    x = randn(tokens, 1, d2, device=device)
    y, x = rotate(x), x[:, 0].cpu().numpy()
    other_order_differs = 0
    for token in range(tokens):
        for i, j in columns:
            for own, partner, image, cross in (
                (i, j, image_of_first, image_of_second),
                (j, i, image_of_second, image_of_first),
            ):
                cos, signed_sin = image[token, own], cross[token, own]
                product = np.float32(x[token, partner] * signed_sin)
                expected = fma32(x[token, own], cos, product)
                assert y[token, own] == expected
                other = fma32(x[token, partner], signed_sin, np.float32(x[token, own] * cos))
                other_order_differs += other != expected
    assert other_order_differs > 20  # the test can tell the two orders apart


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("interleaved", PAIRINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_the_oracle(
    device: torch.device,
    dtype: torch.dtype,
    interleaved: bool,
    shape: tuple[int, int, int],
    both_paths: BothPaths,
) -> None:
    heads, head_dim, rotary_dim = shape
    freqs = random_table(64, rotary_dim, device)
    cu = boundaries([0, 5, 5, 37], device)
    starts = boundaries([3, 9, 0], device)
    t = randn(37, heads, head_dim, dtype=dtype, device=device)
    grad = randn(37, heads, head_dim, dtype=dtype, device=device, seed=1)
    rtol, atol = TOLERANCES[dtype]

    exact = t.double().requires_grad_()
    expected = rope_thd_reference(exact, freqs, cu, start_positions=starts, interleaved=interleaved)
    (expected_grad,) = torch.autograd.grad(expected, exact, grad.double())
    for x, transpose, target in ((t, False, expected.detach()), (grad, True, expected_grad)):
        y = both_paths(
            lambda x=x, transpose=transpose: rotate_thd(
                x, freqs, cu, starts, interleaved, 1, 0, transpose
            )
        )
        assert y.dtype == dtype
        torch.testing.assert_close(y.double(), target, rtol=rtol, atol=atol)
        # what is not rotated is the same bits
        assert same_bits(y[..., rotary_dim:], x[..., rotary_dim:])


@pytest.mark.parametrize("interleaved", PAIRINGS)
@pytest.mark.parametrize(("cp_size", "cp_rank"), [(1, 0), (2, 0), (2, 1), (4, 2)])
def test_k18_backward_is_the_transpose(
    device: torch.device, interleaved: bool, cp_size: int, cp_rank: int, both_paths: BothPaths
) -> None:
    """<g, R x> = <R^T g, x> with a table whose halves differ."""
    cu = boundaries([0, 16, 48], device)
    tokens = 48 // cp_size
    freqs = random_table(48, 12, device)
    x = randn(tokens, 3, 16, device=device)
    g = randn(tokens, 3, 16, device=device, seed=1)
    arguments = (freqs, cu, None, interleaved, cp_size, cp_rank)
    forward = both_paths(lambda: rotate_thd(x, *arguments, False))
    backward = both_paths(lambda: rotate_thd(g, *arguments, True))
    left = (g.double() * forward.double()).sum()
    right = (backward.double() * x.double()).sum()
    scale = (g.double() * forward.double()).abs().sum()
    assert abs(left - right) / scale < 1e-7


def test_not_an_inverse_when_halves_differ(device: torch.device) -> None:
    """Guards the test above: with such tables the transpose is not the inverse."""
    cu, freqs = boundaries([0, 4], device), random_table(4, 8, device)
    x = randn(4, 1, 8, device=device)
    y = rotate_thd(x, freqs, cu, None, False, 1, 0, False)
    back = rotate_thd(y, freqs, cu, None, False, 1, 0, True)
    assert not torch.allclose(back, x, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_half_precision_value_survives_a_turn_by_zero(
    device: torch.device, dtype: torch.dtype
) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).to(device)
    t = every.reshape(-1, 1, 256)
    freqs = torch.zeros(256, 1, 1, 256, device=device)
    y = apply_rotary_pos_emb_thd(t, freqs, boundaries([0, 256], device))
    # x * 1 + (-y) * 0 is x, but where a partner is infinite, or x is a zero whose sign may go
    partner = t.roll(128, dims=-1)
    clean = t.isfinite() & partner.isfinite() & (t != 0)
    assert clean.sum() > 50_000
    assert torch.equal(y[clean].view(torch.int16), t[clean].view(torch.int16))
    assert (y[t == 0].nan_to_num() == 0).all()
    # a NaN comes out as the one that the GPU writes, on the CPU too
    assert (y[t.isnan()].view(torch.int16) == 0x7FFF).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounds_once_to_nearest_even(device: torch.device, dtype: torch.dtype) -> None:
    """The result equals the float32 result rounded by torch, subnormals and overflow included."""
    scales = torch.logspace(-30, 20, 4096, base=2.0)
    t = (randn(4096, 1, 8) * scales[:, None, None]).clamp(-6e4, 6e4).to(dtype).to(device)
    freqs, cu = random_table(4096, 8, device), boundaries([0, 4096], device)
    low = apply_rotary_pos_emb_thd(t, freqs, cu)
    full = apply_rotary_pos_emb_thd(t.float(), freqs, cu)
    assert same_bits(low, full.to(dtype))
    assert low.isinf().any() == (dtype == torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rest_of_a_row_is_raw_bits(device: torch.device, dtype: torch.dtype) -> None:
    words = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    info = torch.iinfo(words)
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(info.min, info.max, (64, 3, 72), generator=generator, dtype=words)
    t = bits.view(dtype).to(device)  # NaN with all kinds of payloads among it
    y = apply_rotary_pos_emb_thd(t, random_table(64, 4, device), boundaries([0, 64], device))
    assert torch.equal(y[..., 4:].contiguous().view(words).cpu(), bits[..., 4:])


@pytest.mark.parametrize("position", [40, 16_000, 131_071, 1_048_575])
@pytest.mark.parametrize("via_start", [False, True])
def test_k30_long_positions_keep_their_precision(
    device: torch.device, position: int, via_start: bool
) -> None:
    """Within 2 ulp of the double cosine and sine of the float32 angle: no fast intrinsics."""
    table = torch.arange(2**20, dtype=torch.float32, device=device).reshape(-1, 1, 1, 1)
    freqs = table.repeat(1, 1, 1, 2) * 0.9999
    starts = boundaries([position], device) if via_start else None
    tokens = 1 if via_start else position + 1
    t = torch.zeros(tokens, 1, 2, device=device)
    t[..., 0] = 1.0
    y = apply_rotary_pos_emb_thd(t, freqs, boundaries([0, tokens], device), start_positions=starts)
    angle = freqs[position, 0, 0, 0].double()
    expected = torch.stack([angle.cos(), angle.sin()])
    error = (y[-1, 0].double() - expected).abs()
    assert (error <= 2 * torch.finfo(torch.float32).eps * expected.abs()).all()


def test_k31_runs_are_the_same_bits(device: torch.device) -> None:
    t, freqs = randn(512, 4, 64, device=device), random_table(512, 64, device)
    cu = boundaries(range(0, 513, 16), device)
    first = apply_rotary_pos_emb_thd(t, freqs, cu)
    assert all(same_bits(apply_rotary_pos_emb_thd(t, freqs, cu), first) for _ in range(3))
