# SPDX-License-Identifier: Apache-2.0
"""Query and key together, and fused QKV, against a call for each part; errors; gradients."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from fused_cases import FusedCase, outputs_and_grads

from transformer_engine_overlay import (
    apply_fused_qkv_rotary_pos_emb_thd,
    apply_rotary_pos_emb_thd_qk,
    fused,
)
from transformer_engine_overlay.thd import savable
from transformer_engine_overlay.verify import same_bits

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "partial": {"rotary_dim": 4},
    "interleaved": {"interleaved": True},
    "two tables": {"two_tables": True},
    "start positions": {"starts": True},
    "cp": {"cp_size": 4, "cp_rank": 2, "boundaries": (0, 8, 40, 44, 260), "table_rows": 900},
}


def case(**changes: Any) -> FusedCase:
    options: dict[str, Any] = {"device": "cpu", "dtype": torch.bfloat16, "head_dim": 8}
    return FusedCase(**(options | {"rotary_dim": 8} | changes))


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
class TestParity:
    def test_qk(self, changes: dict[str, Any]) -> None:
        batch = case(**changes)
        inputs = batch.random(301, 6, 8), batch.random(301, 2, 8)
        together = outputs_and_grads(batch.qk, inputs)
        apart = outputs_and_grads(batch.qk_apart, inputs)
        assert all(map(same_bits, together, apart))
        assert all(x.is_contiguous() for x in together[:2])

    @pytest.mark.parametrize("split", [[24, 8, 8], [8, 8, 5], [16, 8, 0]], ids=str)
    def test_qkv(self, changes: dict[str, Any], split: list[int]) -> None:
        batch = case(**changes)
        inputs = (batch.random(301, 2, sum(split)),)
        together = outputs_and_grads(batch.qkv, inputs, split)
        apart = outputs_and_grads(batch.qkv_apart, inputs, split)
        assert all(map(same_bits, together, apart))
        assert all(x.is_contiguous() for x in together)
        assert together[0].shape == (301, 2 * split[0] // 8, 8)


def test_tail_rows_are_zeros_but_for_the_value() -> None:
    batch = case()
    q, k, v = batch.qkv(batch.random(301, 2, 24), [8, 8, 8])
    assert not q[260:].any()
    assert not k[260:].any()
    assert v[260:].any()


def test_one_gradient_missing() -> None:
    batch = case()
    q, k = (batch.random(301, 2, 8).requires_grad_() for _ in range(2))
    batch.qk(q, k)[0].float().sum().backward()
    assert q.grad is not None
    assert k.grad is not None
    assert not k.grad.any()


@pytest.mark.parametrize("needed", ["q", "k"])
def test_one_of_both_needs_a_gradient(needed: str) -> None:
    batch = case()
    parts = {name: batch.random(301, 2, 8) for name in "qk"}
    t = parts[needed].requires_grad_()
    index = list(parts).index(needed)
    grads = [
        torch.autograd.grad(function(**parts)[index].sum(), t)[0]
        for function in (batch.qk, batch.qk_apart)
    ]
    assert same_bits(*grads)


def test_gradient_of_the_gradient() -> None:
    batch = case(dtype=torch.float32)
    qkv = batch.random(301, 2, 24).requires_grad_()
    direction = [batch.random(301, 2, 8).requires_grad_() for _ in range(3)]
    (grad,) = torch.autograd.grad(batch.qkv(qkv, [8, 8, 8]), qkv, direction, create_graph=True)
    probe = batch.random(301, 2, 24)
    twice = torch.autograd.grad(grad, direction, probe)
    assert all(map(same_bits, twice, batch.qkv(probe, [8, 8, 8])))


def test_strided_query_of_a_fused_projection() -> None:
    batch = case()
    fused = batch.random(301, 2, 3, 8)
    q, k = fused[:, :, 0], fused[:, :, 1]
    assert all(map(same_bits, batch.qk(q, k), batch.qk_apart(q, k)))


def test_a_value_that_lies_contiguous_is_copied() -> None:
    batch = case()
    qkv = batch.random(1, 1, 24)
    v = batch.qkv(qkv, [8, 8, 8])[2]
    assert v.untyped_storage().data_ptr() != qkv.untyped_storage().data_ptr()


def test_nothing_to_do() -> None:
    batch = case()
    assert [x.shape for x in batch.qk(batch.random(0, 6, 8), batch.random(0, 2, 8))] == [
        (0, 6, 8),
        (0, 2, 8),
    ]
    q, k, v = batch.qkv(batch.random(5, 0, 24), [8, 8, 8])
    assert (q.shape, k.shape, v.shape) == ((5, 0, 8),) * 3


class TestErrors:
    @pytest.mark.parametrize(
        ("split", "message"),
        [
            ([8, 8], "list of three ints"),
            ("888", "list of three ints"),
            ([8, 8, 9], "must sum to the last dimension"),
            ([12, 8, 4], "multiple of the key width"),
            ([16, 0, 8], "multiple of the key width"),
            ([0, 8, 16], "multiple of the key width"),
            ([-8, 16, 16], "multiple of the key width"),
            ([16, 16, -8], "multiple of the key width"),
            ([8, 8.0, 8], "must be an int"),
        ],
    )
    def test_split(self, split: Any, message: str) -> None:
        batch = case()
        with pytest.raises((TypeError, ValueError), match=message):
            batch.qkv(batch.random(301, 2, 24), split)

    def test_qkv_dimensions(self) -> None:
        batch = case()
        with pytest.raises(ValueError, match="must be 3-D"):
            batch.qkv(batch.random(301, 24), [8, 8, 8])
        with pytest.raises(TypeError, match="qkv is of type list"):
            apply_fused_qkv_rotary_pos_emb_thd(
                [1],  # type: ignore[arg-type]
                batch.freqs,
                batch.freqs,
                [8, 8, 8],
                batch.cu_seqlens,
            )

    @pytest.mark.parametrize(
        ("shape", "message"),
        [((300, 2, 8), "h_k"), ((301, 2, 16), "h_k"), ((301, 8), "h_k")],
    )
    def test_qk_shapes(self, shape: tuple[int, ...], message: str) -> None:
        batch = case()
        with pytest.raises(ValueError, match=message):
            batch.qk(batch.random(301, 2, 8), batch.random(*shape))

    def test_qk_dtypes(self) -> None:
        batch = case()
        with pytest.raises(ValueError, match="one dtype"):
            batch.qk(batch.random(301, 2, 8), batch.random(301, 2, 8).float())

    def test_qk_devices(self) -> None:
        q = case().random(301, 2, 8)
        with pytest.raises(ValueError, match=r"q is .* on cpu and k .* on meta; .* one device"):
            case().qk(q, q.to("meta"))

    def test_what_a_plain_call_refuses(self) -> None:
        batch = case()
        q = batch.random(301, 2, 8)
        with pytest.raises(TypeError, match=r"cu_seqlens has dtype torch\.int64"):
            apply_rotary_pos_emb_thd_qk(q, q, batch.freqs, batch.cu_seqlens.long())
        with pytest.raises(ValueError, match="cp_rank is 1"):
            apply_rotary_pos_emb_thd_qk(q, q, batch.freqs, batch.cu_seqlens, cp_rank=1)
        with pytest.raises(TypeError, match="cu_seqlens is of type list"):
            apply_rotary_pos_emb_thd_qk(q, q, batch.freqs, [0, 301])  # type: ignore[arg-type]

    @pytest.mark.parametrize("bad", [None, torch.zeros(300, 1, 1, 10), torch.zeros(300, 8)])
    def test_the_table_that_is_wrong_is_named(self, bad: Any) -> None:
        batch = case()
        q, qkv = batch.random(301, 2, 8), batch.random(301, 2, 24)
        good, cu = batch.freqs, batch.cu_seqlens
        with pytest.raises((TypeError, ValueError), match=r"^freqs "):
            apply_rotary_pos_emb_thd_qk(q, q, bad, cu, k_freqs=good)
        if bad is not None:
            with pytest.raises(ValueError, match=r"^k_freqs "):
                apply_rotary_pos_emb_thd_qk(q, q, good, cu, k_freqs=bad)
            with pytest.raises(ValueError, match=r"^freqs "):
                apply_rotary_pos_emb_thd_qk(q, q, bad, cu)
        with pytest.raises((TypeError, ValueError), match=r"^q_freqs "):
            apply_fused_qkv_rotary_pos_emb_thd(qkv, bad, good, [8, 8, 8], cu)
        with pytest.raises((TypeError, ValueError), match=r"^k_freqs "):
            apply_fused_qkv_rotary_pos_emb_thd(qkv, good, bad, [8, 8, 8], cu)


def test_checked_mode_looks_at_both_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_OVERLAY_CHECK", "1")
    batch = case(two_tables=True)
    batch.k_freqs = batch.k_freqs[:100].contiguous()
    with pytest.raises(ValueError, match="k_freqs has 100 rows"):
        batch.qk(batch.random(301, 2, 8), batch.random(301, 2, 8))
    with pytest.raises(ValueError, match="k_freqs has 100 rows"):
        batch.qkv(batch.random(301, 2, 24), [8, 8, 8])


def test_a_gradient_is_called_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = case()
    q, qkv = batch.random(200, 2, 8), batch.random(200, 2, 24)
    outputs = [
        batch.qk(q.requires_grad_(), q)[0],
        batch.qkv(qkv.requires_grad_(), [8, 8, 8])[1],
    ]
    monkeypatch.setenv("TE_OVERLAY_CHECK", "1")
    for output in outputs:
        with pytest.raises(ValueError, match="but grad_q has 200 rows"):
            output.sum().backward()


class Meddling(torch.Tensor):
    """A subclass that answers torch's functions with nonsense."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return 7


def test_subclasses_are_taken_as_the_tensors_that_they_are() -> None:
    batch = case()
    q, k, qkv = batch.random(301, 4, 8), batch.random(301, 2, 8), batch.random(301, 2, 24)
    outputs = [
        *batch.qk(q.as_subclass(Meddling), k.as_subclass(Meddling)),
        *batch.qkv(qkv.as_subclass(Meddling), [8, 8, 8]),
    ]
    assert all(type(y) is torch.Tensor for y in outputs)
    assert all(map(same_bits, outputs, [*batch.qk(q, k), *batch.qkv(qkv, [8, 8, 8])]))


def copies_of_inference_tensors(monkeypatch: pytest.MonkeyPatch, inputs: list[Any]) -> int:
    """Copies that a call of each kind keeps of its table and boundaries."""
    copies: list[torch.Tensor] = []

    def counted(value: torch.Tensor | None) -> torch.Tensor | None:
        copy = savable(value)
        copies.extend([copy] if copy is not None and copy is not value else [])
        return copy

    monkeypatch.setattr(fused, "savable", counted)
    with torch.inference_mode():
        batch = case()
    q, k, qkv = inputs
    for output in (*batch.qk(q, k), *batch.qkv(qkv, [8, 8, 8])):
        if output.requires_grad:
            output.sum().backward(retain_graph=True)
    return len(copies)


def test_inference_tensors_are_copied_for_a_gradient_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = [case().random(301, 2, width) for width in (8, 8, 24)]
    assert copies_of_inference_tensors(monkeypatch, inputs) == 0
    for t in inputs:
        t.requires_grad_()
    # of each call the one table, once, and the boundaries
    assert copies_of_inference_tensors(monkeypatch, inputs) == 4


def test_outputs_that_were_not_filled_are_gone_before_others_are_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a call that the fused kernels do not take would need twice the memory."""
    unused: list[weakref.ref[torch.Tensor]] = []
    new, rotate = fused._new, fused.rotate_checked

    def remembered(*arguments: Any) -> torch.Tensor:
        unused.append(weakref.ref(output := new(*arguments)))
        return output

    def checked(*arguments: Any, **names: Any) -> torch.Tensor:
        assert not any(reference() is not None for reference in unused)
        return rotate(*arguments, **names)

    monkeypatch.setattr(fused, "_may_fuse", lambda t: True)  # the kernels take none on the CPU
    monkeypatch.setattr(fused, "_new", remembered)
    monkeypatch.setattr(fused, "rotate_checked", checked)
    batch = case()
    batch.qk(batch.random(301, 4, 8), batch.random(301, 2, 8))
    batch.qkv(batch.random(301, 2, 24), [8, 8, 8])
    assert len(unused) == 5


def test_zero_tensors_are_written_out() -> None:
    batch = case()
    zero = torch._efficientzerotensor((301, 2, 25), dtype=batch.dtype)[..., 1:]
    assert not any(y.any() for y in batch.qkv(zero, [8, 8, 8]))
    assert not any(y.any() for y in batch.qk(zero[..., :8], zero[..., 8:16]))
