# SPDX-License-Identifier: Apache-2.0
"""Token-linear THD RoPE against the launch without it, bit for bit.

Each path is forced through the environment, and the profiler proves which kernel ran.
"""

import ctypes

import pytest
import torch
import transformer_engine.pytorch  # noqa: F401  # loads the common library
import transformer_engine_torch as tex
from torch.profiler import ProfilerActivity, profile

PATH_VARIABLE = "NVTE_FUSED_ROPE_THD_TOKEN_LINEAR"
TOKEN_LINEAR_KERNEL = "thd_token_linear"
THD = tex.NVTE_QKV_Format.NVTE_THD
DIRECTIONS = {"forward": tex.fused_rope_forward, "backward": tex.fused_rope_backward}
BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def padded_batch(lengths, cp_size):
    """Return boundaries that every rank can halve, on the device."""
    multiple = 2 * cp_size
    padded = [0] + [-(-length // multiple) * multiple for length in lengths]
    return torch.tensor(padded).cumsum(0).to("cuda", torch.int32)


def call(direction, t, freqs, cu_seqlens, cp_size=1, cp_rank=0, starts=None, interleaved=False):
    """Call the binding, as the autograd function does."""
    function = DIRECTIONS[direction]
    return function(t, freqs, starts, THD, interleaved, cu_seqlens, cp_size, cp_rank)


@pytest.fixture(name="on_path")
def fixture_on_path(monkeypatch):
    """Run a function with a path forced; prove that this path ran."""

    def run(value, function):
        with monkeypatch.context() as patch:
            patch.setenv(PATH_VARIABLE, value)
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
                result = function()
                torch.cuda.synchronize()
        kernels = [event.key for event in record.key_averages() if "rope" in event.key.lower()]
        kernels = [name for name in kernels if "kernel" in name]
        assert kernels, "the profiler saw no RoPE kernel"
        assert all((TOKEN_LINEAR_KERNEL in name) == (value == "1") for name in kernels), kernels
        return result

    return run


@pytest.fixture(name="same_on_both_paths")
def fixture_same_on_both_paths(on_path):
    """Run a call through both paths; compare the bits of the rows that a sequence owns."""

    def run(direction, t, freqs, cu_seqlens, cp_size=1, **arguments):
        results = []
        for value in ("0", "1"):
            case = (direction, t, freqs, cu_seqlens, cp_size)
            results.append(on_path(value, lambda case=case: call(*case, **arguments)))
        legacy, linear = (result.view(BITS[t.dtype]) for result in results)
        rows = int(cu_seqlens[-1]) // cp_size
        assert torch.equal(legacy[:rows], linear[:rows])
        assert not linear[rows:].any(), "rows behind the last sequence must be zeros"

    return run


def test_library_is_the_patched_one():
    """A build from before the patch would pass nothing below, and should say why."""
    version = ctypes.CDLL(None).nvte_fused_rope_thd_overlay_version
    version.restype = ctypes.c_char_p
    assert version().decode()


@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("direction", sorted(DIRECTIONS))
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", sorted(BITS, key=str))
@pytest.mark.parametrize(("heads", "dim", "rotary"), [(32, 128, 128), (5, 96, 64), (1, 64, 64)])
def test_every_rank(same_on_both_paths, cp_size, direction, interleaved, dtype, heads, dim, rotary):
    """Every rank, with asymmetric tables, start positions, and rows behind the last sequence."""
    generator = torch.Generator("cuda").manual_seed(cp_size)
    lengths = [1, 700, 0, 33, 2000, 64, 5]
    cu_seqlens = padded_batch(lengths, cp_size)
    rows = int(cu_seqlens[-1]) // cp_size + 3
    t = torch.randn(rows, heads, dim, device="cuda", generator=generator).to(dtype)
    freqs = torch.randn(4096, 1, 1, rotary, device="cuda", generator=generator) * 100
    starts = torch.arange(len(lengths), device="cuda", dtype=torch.int32) * 7
    for cp_rank in range(cp_size):
        same_on_both_paths(
            direction,
            t,
            freqs,
            cu_seqlens,
            cp_size,
            cp_rank=cp_rank,
            starts=starts,
            interleaved=interleaved,
        )


# Shapes of which a gate on wasted blocks would take some and leave others.
@pytest.mark.parametrize(
    ("table", "lengths"), [(512, [512]), (8192, [1024] * 8), (65536, [16] * 300)]
)
@pytest.mark.parametrize("direction", sorted(DIRECTIONS))
def test_sizes(same_on_both_paths, direction, table, lengths):
    """One sequence, a few, and many short ones under a long table."""
    cu_seqlens = padded_batch(lengths, 1)
    t = torch.randn(int(cu_seqlens[-1]), 8, 128, device="cuda", dtype=torch.bfloat16)
    freqs = torch.randn(table, 1, 1, 128, device="cuda")
    same_on_both_paths(direction, t, freqs, cu_seqlens)


@pytest.mark.parametrize("direction", sorted(DIRECTIONS))
def test_strides(same_on_both_paths, direction):
    """A slice of a fused QKV tensor, a misaligned one, and an expanded gradient."""
    cu_seqlens = padded_batch([100, 27], 1)
    freqs = torch.randn(128, 1, 1, 64, device="cuda")
    qkv = torch.randn(128, 3, 4, 65, device="cuda", dtype=torch.float16)
    for t in (qkv[:, 1, :, :64], qkv[:, 2, :, 1:], qkv[:1, 0, :1, :1].expand(128, 4, 64)):
        same_on_both_paths(direction, t, freqs, cu_seqlens)


def test_no_rank_reads_the_global_row_count(on_path):
    """The grid follows the rows of the local tensor: a rank has no row of the others."""
    cp_size = 8
    cu_seqlens = padded_batch([4096] * 4, cp_size)
    t = torch.randn(int(cu_seqlens[-1]) // cp_size, 2, 64, device="cuda")
    freqs = torch.randn(4096, 1, 1, 64, device="cuda")
    out = on_path("1", lambda: call("forward", t, freqs, cu_seqlens, cp_size, cp_size - 1))
    assert out.shape == t.shape
    assert torch.isfinite(out).all()


def test_more_sequences_than_a_grid_dimension(on_path):
    """70,000 sequences, which the legacy grid cannot launch."""
    cu_seqlens = torch.arange(70001, device="cuda", dtype=torch.int32)
    t = torch.randn(70000, 1, 64, device="cuda")
    freqs = torch.zeros(4, 1, 1, 64, device="cuda")
    out = on_path("1", lambda: call("forward", t, freqs, cu_seqlens))
    assert torch.equal(out, t)


def test_automatic_launches_what_the_legacy_grid_cannot(monkeypatch):
    """Unset, the variable leaves no launch that fails: too many sequences, no rows."""
    monkeypatch.delenv(PATH_VARIABLE, raising=False)
    freqs = torch.zeros(1, 1, 1, 64, device="cuda")
    many = torch.randn(70000, 1, 64, device="cuda")
    cu_seqlens = torch.arange(70001, device="cuda", dtype=torch.int32)
    assert torch.equal(call("forward", many, freqs, cu_seqlens), many)
    assert call("forward", many[:0], freqs, cu_seqlens[:1]).numel() == 0
    torch.cuda.synchronize()


def test_other_value_is_refused(monkeypatch):
    """The error names the variable and its value."""
    monkeypatch.setenv(PATH_VARIABLE, "yes")
    t = torch.randn(8, 1, 64, device="cuda")
    freqs = torch.zeros(8, 1, 1, 64, device="cuda")
    with pytest.raises(RuntimeError, match=f"{PATH_VARIABLE} is 'yes'"):
        call("forward", t, freqs, padded_batch([8], 1))
