# SPDX-License-Identifier: Apache-2.0
"""Bad arguments: an error that names the argument, what it is and what it must be, no launch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from packed import boundaries, randn, random_table
from programs import run_python

from transformer_engine_overlay import _native, apply_rotary_pos_emb_thd, path_counts
from transformer_engine_overlay.thd import rotate_thd


def good(device: torch.device) -> dict[str, Any]:
    return {
        "t": randn(8, 2, 8, device=device),
        "freqs": random_table(16, 8, device),
        "cu_seqlens": boundaries([0, 3, 8], device),
        "start_positions": boundaries([1, 2], device),
        "interleaved": False,
        "cp_size": 1,
        "cp_rank": 0,
    }


def call(arguments: dict[str, Any]) -> torch.Tensor:
    arguments = dict(arguments)
    positional = [arguments.pop(name) for name in ("t", "freqs", "cu_seqlens")]
    return apply_rotary_pos_emb_thd(*positional, **arguments)


def nested(x: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor([x[0], x[1]])


BAD = [
    ("t", lambda x: None, TypeError, "t is of type NoneType; it must be a torch.Tensor"),
    ("t", lambda x: x.tolist(), TypeError, "t is of type list"),
    (
        "t",
        lambda x: x.double(),
        TypeError,
        "t has dtype torch.float64; it must be float32, float16",
    ),
    ("t", lambda x: x.to(torch.float8_e4m3fn), TypeError, "t has dtype torch.float8_e4m3fn"),
    ("t", lambda x: x.int(), TypeError, "t has dtype torch.int32"),
    ("t", lambda x: x[0], ValueError, r"t has shape \[2, 8\]; it must be 3-D, \[t, h, d\]"),
    ("t", lambda x: x[None], ValueError, r"t has shape \[1, 8, 2, 8\]; it must be 3-D"),
    ("t", lambda x: x.to("meta"), ValueError, "t is on device meta; it must be on a CUDA device"),
    ("t", lambda x: x.to_sparse(), TypeError, "t is torch.sparse_coo; it must be a dense"),
    ("t", nested, TypeError, "t is nested; it must be a dense"),
    ("freqs", lambda x: x.to_sparse(), TypeError, "freqs is torch.sparse_coo; it must be"),
    ("cu_seqlens", lambda x: x.to_sparse(), TypeError, "cu_seqlens is torch.sparse_coo"),
    ("start_positions", lambda x: x.to_sparse(), TypeError, "start_positions is torch.sparse"),
    ("interleaved", lambda x: "no", TypeError, "interleaved is of type str; it must be a bool"),
    ("interleaved", lambda x: None, TypeError, "interleaved is of type NoneType; it must be"),
    ("freqs", lambda x: None, TypeError, "freqs is of type NoneType"),
    ("freqs", lambda x: x[:, 0, 0], ValueError, r"freqs has shape \[16, 8\]; it must be \[s, 1, 1"),
    ("freqs", lambda x: x.expand(-1, 2, -1, -1), ValueError, r"freqs has shape \[16, 2, 1, 8\]"),
    ("freqs", lambda x: x.expand(-1, -1, 2, -1), ValueError, r"freqs has shape \[16, 1, 2, 8\]"),
    (
        "freqs",
        lambda x: x[..., :5],
        ValueError,
        r"freqs has d2 = 5 .* must be even and at most d = 8",
    ),
    ("freqs", lambda x: x.repeat(1, 1, 1, 2), ValueError, "freqs has d2 = 16"),
    ("freqs", lambda x: x.long(), TypeError, "freqs has dtype torch.int64; it must be a floating"),
    ("freqs", lambda x: x.to("meta"), ValueError, "freqs is on meta; it must be on"),
    ("cu_seqlens", lambda x: None, TypeError, "cu_seqlens is of type NoneType"),
    ("cu_seqlens", lambda x: [0, 3, 8], TypeError, "cu_seqlens is of type list"),
    (
        "cu_seqlens",
        lambda x: x.long(),
        TypeError,
        r"cu_seqlens has dtype torch.int64; .* torch.int32: pass cu_seqlens.to\(torch.int32\)",
    ),
    ("cu_seqlens", lambda x: x.float(), TypeError, "cu_seqlens has dtype torch.float32"),
    ("cu_seqlens", lambda x: x[None], ValueError, r"cu_seqlens has shape \[1, 3\]; it must be 1-D"),
    ("cu_seqlens", lambda x: x[0], ValueError, r"cu_seqlens has shape \[\]; it must be 1-D"),
    ("cu_seqlens", lambda x: x[:0], ValueError, r"cu_seqlens has shape \[0\].* b \+ 1 entries"),
    ("cu_seqlens", lambda x: x.to("meta"), ValueError, "cu_seqlens is on meta; it must be on"),
    ("start_positions", lambda x: 3, TypeError, "start_positions is of type int"),
    ("start_positions", lambda x: x.long(), TypeError, "start_positions has dtype torch.int64"),
    ("start_positions", lambda x: x[0], ValueError, r"start_positions has shape \[\]"),
    (
        "start_positions",
        lambda x: x[:1],
        ValueError,
        r"start_positions has shape \[1\]; .*an entry for each sequence, at least 2",
    ),
    ("start_positions", lambda x: x.to("meta"), ValueError, "start_positions is on meta"),
    ("cp_size", lambda x: 0, ValueError, "cp_size is 0; it must be at least 1"),
    ("cp_size", lambda x: -2, ValueError, "cp_size is -2"),
    ("cp_size", lambda x: 2**31, ValueError, "cp_size is 2147483648"),
    ("cp_size", lambda x: 2.0, TypeError, "cp_size is of type float; it must be an int"),
    ("cp_size", lambda x: None, TypeError, "cp_size is of type NoneType"),
    ("cp_rank", lambda x: 1, ValueError, r"cp_rank is 1; it must be in \[0, cp_size\) = \[0, 1\)"),
    ("cp_rank", lambda x: -1, ValueError, "cp_rank is -1"),
    ("cp_rank", lambda x: "0", TypeError, "cp_rank is of type str"),
]


@pytest.mark.parametrize(("argument", "spoil", "error", "message"), BAD)
def test_bad_argument_is_named(
    device: torch.device, argument: str, spoil: Any, error: type[Exception], message: str
) -> None:
    arguments = good(device)
    arguments[argument] = spoil(arguments[argument])
    before = path_counts()
    with pytest.raises(error, match=message):
        call(arguments)
    assert path_counts() == before
    assert call(good(device)).isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("argument", ["freqs", "cu_seqlens", "start_positions"])
def test_k33_cpu_metadata_with_a_gpu_tensor(argument: str) -> None:
    arguments = good(torch.device("cuda"))
    arguments[argument] = arguments[argument].cpu()
    with pytest.raises(ValueError, match=f"{argument} is on cpu; it must be on cuda:0"):
        call(arguments)
    assert call(good(torch.device("cuda"))).isfinite().all()
    torch.cuda.synchronize()


@pytest.mark.parametrize("shape", [(1, 2**24 + 1, 2), (1, 1, 2**24 + 2)])
def test_rows_too_long_for_32_bit_indices(shape: tuple[int, int, int]) -> None:
    t = torch.zeros(1, 1, 1).expand(shape)
    with pytest.raises(ValueError, match=r"t has shape .* h and d must each be at most 16777216"):
        apply_rotary_pos_emb_thd(t, random_table(1, 2), boundaries([0, 1]))


class Wrapper(torch.Tensor):
    """A wrapper subclass, such as those of quantised tensors: it has no memory of its own."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...]) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32)

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return torch.empty(args[0].shape)


def test_wrapper_without_memory_is_refused() -> None:
    with pytest.raises((TypeError, RuntimeError), match=r"without memory|data pointer|storage"):
        rotate_thd(
            Wrapper((8, 2, 8)), random_table(16, 8), boundaries([0, 8]), None, False, 1, 0, False
        )


@pytest.mark.parametrize("argument", ["t", "freqs", "cu_seqlens", "start_positions"])
def test_tensor_whose_memory_was_taken_is_refused(device: torch.device, argument: str) -> None:
    arguments = good(device)
    arguments[argument].untyped_storage().resize_(0)
    with pytest.raises(TypeError, match=f"{argument} is a Tensor without memory of its own"):
        call(arguments)
    call(good(device))


@pytest.mark.parametrize("argument", ["t", "freqs", "cu_seqlens", "start_positions"])
def test_slice_whose_memory_was_taken_is_refused(device: torch.device, argument: str) -> None:
    """Its address is not zero, but its offset into nothing."""
    arguments = good(device)
    whole = torch.cat([arguments[argument]] * 2)
    arguments[argument] = whole[len(whole) // 2 :]
    whole.untyped_storage().resize_(0)
    with pytest.raises(TypeError, match=f"{argument} is a Tensor without memory of its own"):
        call(arguments)
    call(good(device))


class Meddling(torch.Tensor):
    """A subclass that answers torch's functions with nonsense."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return 7


def test_subclass_is_taken_as_the_tensor_that_it_is(device: torch.device) -> None:
    arguments = good(device)
    expected = call(arguments)
    t = arguments["t"].as_subclass(Meddling)
    starts, cu = arguments["start_positions"], arguments["cu_seqlens"]
    y = rotate_thd(t, arguments["freqs"], cu, starts, False, 1, 0, False)
    assert type(y) is torch.Tensor
    assert torch.equal(y, expected)


@pytest.mark.parametrize(
    "nonsense",
    [
        lambda t: 7,
        lambda t: t[:1].clone(),
        lambda t: t.double(),
        lambda t: torch.empty(t.shape, device="meta"),
        lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    ],
)
def test_output_is_checked_before_it_is_written(
    device: torch.device, nonsense: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "empty_like", lambda t, **kwargs: nonsense(t))
    with pytest.raises(RuntimeError, match=r"torch.empty_like gave no plain tensor"):
        call(good(device))


def test_real_tensors_under_fake_mode_are_refused() -> None:
    from torch._subclasses import FakeTensorMode

    arguments = good(torch.device("cpu"))
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises((RuntimeError, TypeError)):
        call(arguments)


def test_interleaved_may_be_an_int(device: torch.device) -> None:
    for value in (0, 1):
        expected = call({**good(device), "interleaved": bool(value)})
        assert torch.equal(call({**good(device), "interleaved": value}), expected)


def test_fake_tensors_are_refused() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(), pytest.raises((TypeError, RuntimeError), match=r"FakeTensor|data_ptr"):
        apply_rotary_pos_emb_thd(
            torch.empty(8, 2, 8), torch.empty(16, 1, 1, 8), torch.empty(3, dtype=torch.int32)
        )


def test_lazily_negated_tensors_are_written_out(device: torch.device) -> None:
    arguments = good(device)
    expected = call(arguments)
    negated = torch.complex(torch.zeros_like(arguments["t"]), -arguments["t"]).conj().imag
    assert negated.is_neg()
    assert torch.equal(call({**arguments, "t": negated}), expected)
    table = torch._neg_view(-arguments["freqs"])
    assert table.is_neg()
    assert torch.equal(call({**arguments, "freqs": table}), expected)


def test_zero_tensors_are_written_out(device: torch.device) -> None:
    zero = torch._efficientzerotensor((8, 2, 8), device=device)
    assert (call({**good(device), "t": zero}) == 0).all()
    part = torch._efficientzerotensor((8, 2, 16), device=device)[..., 8:]
    assert (call({**good(device), "t": part}) == 0).all()


def test_cu_seqlens_is_required() -> None:
    arguments = good(torch.device("cpu"))
    with pytest.raises(TypeError, match="cu_seqlens"):
        apply_rotary_pos_emb_thd(arguments["t"], arguments["freqs"])  # type: ignore[call-arg]


def test_a_gradient_is_called_by_its_name() -> None:
    with pytest.raises(ValueError, match=r"grad_output has shape \[8\]"):
        rotate_thd(torch.zeros(8), random_table(16, 8), boundaries([0, 8]), None, False, 1, 0, True)


@pytest.mark.parametrize(
    ("driver", "runtime", "message"),
    [
        (13000, 13000, ""),
        (13000, 13020, ""),  # a minor version older: CUDA runs it
        (14000, 13000, ""),
        (12080, 13000, "supports CUDA up to 12.8, but .* CUDA 13.0 runtime.*a CUDA 12 toolkit"),
        (11040, 12090, "supports CUDA up to 11.4, but .* CUDA 12.9 runtime"),
        (0, 13000, "no NVIDIA driver was found"),
    ],
)
def test_driver_older_than_the_runtime_is_refused_by_name(
    driver: int, runtime: int, message: str
) -> None:
    complaint = _native.driver_complaint(driver, runtime)
    if not message:
        assert complaint == ""
    else:
        with pytest.raises(ValueError, match=message):
            raise ValueError(complaint)


@pytest.mark.parametrize("value", ["0", "1"])
def test_both_ways_to_read_a_tensor(value: str) -> None:
    """The checks above again, and layouts, with tensors read the other way too."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x"),
            "-k",
            "cpu and (bad_argument or any_strides or expanded or negated or zero_tensors or taken)",
            *(__file__, str(Path(__file__).with_name("test_behaviour.py"))),
        ],
        env={**os.environ, "TE_OVERLAY_DLPACK": value},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_no_third_way_to_read_a_tensor() -> None:
    code = (
        "import torch\nfrom transformer_engine_overlay import apply_rotary_pos_emb_thd as f\n"
        "f(torch.zeros(1, 1, 2), torch.zeros(1, 1, 1, 2), torch.zeros(2, dtype=torch.int32))\n"
    )
    done = run_python(code, status=1, TE_OVERLAY_DLPACK="no")
    assert done.stderr.endswith("TE_OVERLAY_DLPACK is 'no'; it must be 1, 0 or unset\n")


@pytest.mark.parametrize("variable", ["TE_OVERLAY_DLPACK", "NVTE_FUSED_ROPE_THD_TOKEN_LINEAR"])
def test_a_value_that_is_no_text_is_named(variable: str) -> None:
    code = (
        "import os, torch\nfrom transformer_engine_overlay import apply_rotary_pos_emb_thd as f\n"
        f"os.environb[b{variable!r}] = b'\\xffon'\n"
        "f(torch.zeros(1, 1, 2), torch.zeros(1, 1, 1, 2), torch.zeros(2, dtype=torch.int32))\n"
    )
    assert f"ValueError: {variable} is '\\xffon'; it must be 1" in run_python(code, status=1).stderr
