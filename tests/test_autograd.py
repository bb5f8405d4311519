# SPDX-License-Identifier: Apache-2.0
"""What the differentiable function keeps, returns and leaves alone."""

from __future__ import annotations

import threading

import pytest
import torch
from packed import DTYPES, boundaries, randn, random_table

from transformer_engine_overlay import apply_rotary_pos_emb_thd
from transformer_engine_overlay.thd import rotate_thd
from transformer_engine_overlay.verify import same_bits


@pytest.fixture
def arguments(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        randn(16, 2, 8, device=device),
        random_table(16, 8, device),
        boundaries([0, 5, 16], device),
    )


def test_gradient_is_the_transpose(arguments: tuple[torch.Tensor, ...]) -> None:
    t, freqs, cu = arguments
    t.requires_grad_()
    y = apply_rotary_pos_emb_thd(t, freqs, cu)
    g = randn(*t.shape, device=t.device, seed=1)
    (grad,) = torch.autograd.grad(y, t, g)
    assert same_bits(grad, rotate_thd(g, freqs, cu, None, False, 1, 0, True))


def test_second_derivative(arguments: tuple[torch.Tensor, ...]) -> None:
    """The gradient is linear in grad_output; differentiating it gives the rotation back."""
    t, freqs, cu = arguments
    t.requires_grad_()
    y = apply_rotary_pos_emb_thd(t, freqs, cu)
    g = randn(*t.shape, device=t.device, seed=1).requires_grad_()
    (grad,) = torch.autograd.grad(y, t, g, create_graph=True)
    v = randn(*t.shape, device=t.device, seed=2)
    (second,) = torch.autograd.grad(grad, g, v)
    assert same_bits(second, rotate_thd(v, freqs, cu, None, False, 1, 0, False))


@pytest.mark.parametrize(("t_needs", "freqs_needs"), [(1, 0), (0, 1), (1, 1), (0, 0)])
def test_k40_which_inputs_get_gradients(
    arguments: tuple[torch.Tensor, ...], t_needs: int, freqs_needs: int
) -> None:
    t, freqs, cu = arguments
    t.requires_grad_(bool(t_needs))
    freqs.requires_grad_(bool(freqs_needs))
    y = apply_rotary_pos_emb_thd(t, freqs, cu)
    assert y.requires_grad == bool(t_needs or freqs_needs)
    if y.requires_grad:
        y.sum().backward()
    assert (t.grad is not None) == bool(t_needs)
    assert freqs.grad is None


def test_k40_no_graph_without_need(arguments: tuple[torch.Tensor, ...]) -> None:
    t, freqs, cu = arguments
    t.requires_grad_()
    with torch.no_grad():
        assert apply_rotary_pos_emb_thd(t, freqs, cu).grad_fn is None
    with torch.inference_mode():
        assert apply_rotary_pos_emb_thd(t, freqs, cu).is_inference()


def test_k40_inference_tensors_as_table_and_metadata(arguments: tuple[torch.Tensor, ...]) -> None:
    t, freqs, cu = arguments
    expected = rotate_thd(torch.ones_like(t), freqs, cu, None, False, 1, 0, True)
    with torch.inference_mode():
        freqs, cu = freqs.clone(), cu.clone()
    t.requires_grad_()
    apply_rotary_pos_emb_thd(t, freqs, cu).sum().backward()
    assert t.grad is not None
    assert same_bits(t.grad, expected)


def test_boundaries_changed_in_place_before_backward_are_noticed(
    arguments: tuple[torch.Tensor, ...],
) -> None:
    t, freqs, cu = arguments
    y = apply_rotary_pos_emb_thd(t.requires_grad_(), freqs, cu)
    cu[1] = 9
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("dtype", DTYPES)
def test_autocast_changes_nothing(arguments: tuple[torch.Tensor, ...], dtype: torch.dtype) -> None:
    t, freqs, cu = arguments
    t = t.to(dtype)
    expected = apply_rotary_pos_emb_thd(t, freqs, cu)
    with torch.autocast(t.device.type, dtype=torch.bfloat16):
        y = apply_rotary_pos_emb_thd(t, freqs, cu)
    assert y.dtype == dtype
    assert same_bits(y, expected)


def test_activation_checkpoint(arguments: tuple[torch.Tensor, ...]) -> None:
    t, freqs, cu = arguments
    t.requires_grad_()
    y = torch.utils.checkpoint.checkpoint(
        apply_rotary_pos_emb_thd, t, freqs, cu, use_reentrant=False
    )
    y.sum().backward()
    assert t.grad is not None
    expected = rotate_thd(torch.ones_like(t), freqs, cu, None, False, 1, 0, True)
    assert same_bits(t.grad, expected)


def test_k38_compiled_call_gives_the_eager_bits(arguments: tuple[torch.Tensor, ...]) -> None:
    t, freqs, cu = arguments
    expected = apply_rotary_pos_emb_thd(t, freqs, cu)
    compiled = torch.compile(lambda *a: apply_rotary_pos_emb_thd(*a), backend="eager")
    assert same_bits(compiled(t, freqs, cu), expected)
    view = t.transpose(1, 2).contiguous().transpose(1, 2)
    assert same_bits(compiled(view, freqs, cu), expected)
    assert compiled(view, freqs, cu).is_contiguous()


def test_calls_from_many_threads(arguments: tuple[torch.Tensor, ...]) -> None:
    t, freqs, cu = arguments
    expected = apply_rotary_pos_emb_thd(t, freqs, cu)
    wrong: list[int] = []

    def work(worker: int) -> None:
        for _ in range(50):
            if not same_bits(apply_rotary_pos_emb_thd(t, freqs, cu), expected):
                wrong.append(worker)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
