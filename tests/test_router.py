# SPDX-License-Identifier: Apache-2.0
"""Which calls are routed, which go on to the original untouched, and whose error is raised."""

from __future__ import annotations

import gc
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from packed import DTYPES, boundaries, randn, random_table
from stub_fixtures import Format, OriginalCalledError, original

from transformer_engine_overlay import _native, path_counts, router
from transformer_engine_overlay.thd import rotate_thd
from transformer_engine_overlay.verify import same_bits

PATH_VARIABLE = "NVTE_FUSED_ROPE_THD_TOKEN_LINEAR"


@pytest.fixture
def state() -> router.RouterState:
    return router.RouterState()


@pytest.fixture
def routed(state: router.RouterState) -> Callable[..., torch.Tensor]:
    return router.make_routed(original, False, Format.THD, state)


def arguments(**changes: Any) -> tuple[Any, ...]:
    values = {
        "t": randn(8, 2, 8),
        "freqs": random_table(16, 8),
        "start_positions": boundaries([1, 2]),
        "qkv_format": Format.THD,
        "interleaved": False,
        "cu_seqlens": boundaries([0, 3, 8]),
        "cp_size": 1,
        "cp_rank": 0,
    }
    return tuple({**values, **changes}.values())


def passed_to(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Whether the call reached the original with the identical arguments; the counter agrees."""
    before = _native.passed_through(), path_counts()
    try:
        function(*args, **kwargs)
    except OriginalCalledError as error:
        raised = error
    else:
        return False
    assert raised.__context__ is None  # the original's error stands alone
    seen, named = raised.args
    assert all(a is b for a, b in zip(seen, args, strict=True))
    assert named == kwargs
    assert (_native.passed_through(), path_counts()) == (before[0] + 1, before[1])
    return True


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("value", [None, "1"])
def test_thd_is_routed(
    transpose: bool,
    value: str | None,
    state: router.RouterState,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if value:
        monkeypatch.setenv(PATH_VARIABLE, value)
    function = router.make_routed(original, transpose, Format.THD, state)
    args = arguments()
    t, freqs, starts, _, interleaved, cu, cp_size, cp_rank = args
    before = path_counts()["token_linear"]["routed"]
    y = function(*args)
    assert path_counts()["token_linear"]["routed"] == before + 1
    assert same_bits(y, rotate_thd(t, freqs, cu, starts, interleaved, cp_size, cp_rank, transpose))


def test_zero_means_the_dispatch_of_te(
    routed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PATH_VARIABLE, "0")
    assert passed_to(routed, *arguments())


def test_a_bad_variable_is_an_error_for_thd_alone(
    routed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PATH_VARIABLE, "on")
    with pytest.raises(ValueError, match=f"{PATH_VARIABLE} is 'on'"):
        routed(*arguments())
    assert passed_to(routed, *arguments(qkv_format=Format.SBHD))


def test_other_layouts_pass(routed: Callable[..., Any]) -> None:
    assert passed_to(routed, *arguments(qkv_format=Format.SBHD, t=randn(8, 1, 2, 8)))


def test_switched_off_passes(routed: Callable[..., Any], state: router.RouterState) -> None:
    state.active = False
    assert passed_to(routed, *arguments())


@pytest.mark.parametrize("call", [(), (1, 2), tuple(range(9))])
def test_wrong_number_of_arguments_passes(routed: Callable[..., Any], call: tuple[int]) -> None:
    assert passed_to(routed, *call)


def test_k19_keywords_pass(routed: Callable[..., Any]) -> None:
    assert passed_to(routed, *arguments()[:7], cp_rank=0)


LEFT_TO_STOCK = {
    "float64": {"t": randn(8, 2, 8, dtype=torch.float64)},
    "float8": {"t": randn(8, 2, 8).to(torch.float8_e4m3fn)},
    "4-D input": {"t": randn(8, 1, 2, 8)},
    "no tensor": {"t": None},
    "2-D table": {"freqs": random_table(16, 8)[:, 0, 0]},
    "table of samples": {"freqs": random_table(16, 8).expand(-1, 2, -1, -1)},
    "table of heads": {"freqs": random_table(16, 8).expand(-1, -1, 2, -1)},
    "bfloat16 table": {"freqs": random_table(16, 8).bfloat16()},
    "wide table": {"freqs": random_table(16, 10)},
    "no boundaries": {"cu_seqlens": None},
    "2-D boundaries": {"cu_seqlens": boundaries([0, 3, 8])[None]},
    "0-D start": {"start_positions": boundaries([1])[0]},
    "start as a list": {"start_positions": [1, 2]},
    "cp_size as a float": {"cp_size": 1.0},
    "cp_size past 32 bits": {"cp_size": 2**40},
    "rank without ranks": {"cp_size": 1, "cp_rank": 3},
    "row past 32-bit indices": {"t": torch.zeros(1).expand(1, 2**24 + 1, 8)},
    "interleaved as a word": {"interleaved": "no"},
}


@pytest.mark.parametrize("name", LEFT_TO_STOCK)
def test_what_te_refuses_or_alone_covers_passes(routed: Callable[..., Any], name: str) -> None:
    assert passed_to(routed, *arguments(**LEFT_TO_STOCK[name]))


OURS = {
    "int64 boundaries": (
        {"cu_seqlens": torch.tensor([0, 3, 8])},
        TypeError,
        "cu_seqlens has dtype",
    ),
    "int64 starts": ({"start_positions": torch.tensor([1, 2])}, TypeError, "start_positions has"),
    "short starts": ({"start_positions": boundaries([1])}, ValueError, "start_positions has shape"),
    "no entry in boundaries": ({"cu_seqlens": boundaries([])}, ValueError, "cu_seqlens has shape"),
    "odd d2": ({"freqs": random_table(16, 8)[..., :5]}, ValueError, "freqs has d2 = 5"),
    "rank out of range": ({"cp_size": 2, "cp_rank": 2}, ValueError, "cp_rank is 2"),
    "no ranks": ({"cp_size": 0}, ValueError, "cp_size is 0"),
    "table elsewhere": ({"freqs": random_table(16, 8).to("meta")}, ValueError, "freqs is on meta"),
    "boundaries elsewhere": (
        {"cu_seqlens": boundaries([0, 3, 8]).to("meta")},
        ValueError,
        "cu_seqlens is on meta",
    ),
}


@pytest.mark.parametrize("name", OURS)
def test_k32_k33_where_te_would_read_wild_our_error_is_raised(
    routed: Callable[..., Any], name: str
) -> None:
    changes, error, message = OURS[name]
    with pytest.raises(error, match=message):
        routed(*arguments(**changes))


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_table_is_routed(
    state: router.RouterState, dtype: torch.dtype, transpose: bool
) -> None:
    function = router.make_routed(original, transpose, Format.THD, state)
    freqs = random_table(16, 16)[..., ::2]
    args = arguments(t=randn(8, 2, 8, dtype=dtype), freqs=freqs, interleaved=1)
    t, _, starts, _, _, cu, cp_size, cp_rank = args
    before = path_counts()["token_linear"]["routed"]
    y = function(*args)
    assert path_counts()["token_linear"]["routed"] == before + 1
    expected = rotate_thd(t, freqs.contiguous(), cu, starts, True, cp_size, cp_rank, transpose)
    assert same_bits(y, expected)


@pytest.mark.parametrize(("transpose", "name"), [(False, "input"), (True, "output_grads")])
def test_messages_use_the_words_of_te(
    state: router.RouterState, transpose: bool, name: str
) -> None:
    function = router.make_routed(original, transpose, Format.THD, state)
    with pytest.raises(ValueError, match=f"^{name} is on device meta"):
        function(*arguments(t=randn(8, 2, 8).to("meta")))


def test_unsupported_gpu_falls_back_for_calls_that_are_not_plain(
    routed: Callable[..., Any], state: router.RouterState, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise _native.UnsupportedDeviceError("cuda:0 has compute capability 7.0")

    monkeypatch.setattr(router, "rotate_checked", refuse)
    with pytest.warns(RuntimeWarning, match="cuda:0 has compute capability 7.0"):
        assert passed_to(routed, *arguments(freqs=random_table(16, 16)[..., ::2]))
    assert not state.active


class EqualsAll:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("qkv_format", [2, EqualsAll(), "thd", None])
def test_what_only_equals_the_format_passes(routed: Callable[..., Any], qkv_format: Any) -> None:
    """TransformerEngine's binding takes its own enumerators alone."""
    assert passed_to(routed, *arguments(qkv_format=qkv_format))


def test_p09_unsupported_gpu_falls_back_with_one_warning(state: router.RouterState) -> None:
    with pytest.warns(RuntimeWarning, match="stays with TransformerEngine's own kernels: cuda:0"):
        state.give_up("cuda:0 has compute capability 7.0")
    assert state.unsupported == "cuda:0 has compute capability 7.0"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert passed_to(router.make_routed(original, False, Format.THD, state), *arguments())
        state.give_up("cuda:1 has compute capability 7.0")  # a call of another thread, under way
    assert state.unsupported == "cuda:0 has compute capability 7.0"


@pytest.mark.parametrize("error", [RuntimeError("cudaErrorIllegalAddress"), KeyError("x")])
def test_other_errors_are_not_swallowed(
    routed: Callable[..., Any], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(torch, "empty_like", fail)
    with pytest.raises(type(error)) as raised:
        routed(*arguments())
    assert raised.value is error


def test_no_reference_is_kept_or_lost(routed: Callable[..., Any]) -> None:
    args = arguments()
    tensors = [a for a in args if isinstance(a, torch.Tensor)]
    before = [sys.getrefcount(a) for a in tensors]
    for _ in range(100):
        routed(*args)
        passed_to(routed, *args[:7])
    gc.collect()  # the errors of the original, and the frames that they hold
    assert [sys.getrefcount(a) for a in tensors] == before


def test_it_is_a_builtin_as_the_original_is(routed: Callable[..., Any]) -> None:
    assert isinstance(routed, types.BuiltinFunctionType)
    assert routed.__name__ == original.__name__
