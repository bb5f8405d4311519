# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs: replays give the bits of eager calls, with metadata that changed in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from packed import DTYPES, boundaries, randn, random_table

from transformer_engine_overlay import _native, apply_rotary_pos_emb_thd, checked, path_counts
from transformer_engine_overlay.faults import PackingError
from transformer_engine_overlay.verify import same_bits

pytestmark = pytest.mark.gpu

PATHS = {"0": "legacy_grid", "1": "token_linear"}
TOKENS, ROWS = 512, 1024
# Boundaries and start positions of batches with room for four sequences: empty sequences, one
# sequence alone, tail rows. Divisible by 2 * cp_size of all tests, and within the table.
BATCHES = [
    ([0, 96, 100, 300, 512], [0, 5, 0, 100]),
    ([0, 4, 4, 4, 512], [7, 0, 0, 0]),
    ([0, 512, 512, 512, 512], [0, 0, 0, 0]),
    ([0, 128, 256, 384, 400], [500, 1, 2, 3]),
    ([0, 0, 0, 0, 4], [0, 0, 0, 9]),
]


@pytest.fixture(params=PATHS, ids=PATHS.get, autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("NVTE_FUSED_ROPE_THD_TOKEN_LINEAR", request.param)
    return PATHS[request.param]


@pytest.fixture(autouse=True)
def _fresh_record() -> Iterator[None]:
    torch.cuda.synchronize()
    _native.reset_faults(torch.cuda.current_device())
    yield
    torch.cuda.synchronize()
    _native.reset_faults(torch.cuda.current_device())


def metadata(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    cu, starts = BATCHES[batch]
    return boundaries(cu, "cuda"), boundaries(starts, "cuda")


def gradient(
    function: Callable[..., torch.Tensor], t: torch.Tensor, *rest: torch.Tensor, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and gradient of a call, as copies: a replay writes where the last one wrote."""
    x = t.detach().clone().requires_grad_()
    y = function(x, *rest)
    g = randn(*y.shape, dtype=y.dtype, device="cuda", seed=100 + seed)
    (grad,) = torch.autograd.grad(y, x, g)
    return y.detach().clone(), grad.clone()


def assert_same(results: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    assert all(same_bits(a, b) for a, b in zip(results, expected, strict=True))


def calls(path: str) -> int:
    return path_counts()[path]["calls"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [(8, 128), (32, 128), (1, 64), (3, 20)])
@pytest.mark.parametrize(("cp_size", "cp_rank"), [(1, 0), (2, 1)])
def test_graphed_callable(
    dtype: torch.dtype, heads: int, dim: int, cp_size: int, cp_rank: int, path: str
) -> None:
    freqs = random_table(ROWS, dim, "cuda")
    tokens = TOKENS // cp_size

    def call(t: torch.Tensor, cu: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return apply_rotary_pos_emb_thd(
            t, freqs, cu, start_positions=starts, cp_size=cp_size, cp_rank=cp_rank
        )

    sample = randn(tokens, heads, dim, dtype=dtype, device="cuda").requires_grad_()
    graphed = torch.cuda.make_graphed_callables(call, (sample, *metadata(0)))
    for i in [*range(len(BATCHES)), 0]:
        t = randn(tokens, heads, dim, dtype=dtype, device="cuda", seed=i)
        expected = gradient(call, t, *metadata(i), seed=i)
        before = calls(path)
        assert_same(gradient(graphed, t, *metadata(i), seed=i), expected)
        assert calls(path) == before  # it was a replay, not a call


def test_k04_metadata_written_into_the_buffers_of_a_graphed_callable() -> None:
    freqs = random_table(ROWS, 64, "cuda")

    def call(t: torch.Tensor, cu: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return apply_rotary_pos_emb_thd(t, freqs, cu, start_positions=starts)

    sample = randn(TOKENS, 8, 64, device="cuda").requires_grad_()
    cu, starts = metadata(0)
    graphed = torch.cuda.make_graphed_callables(call, (sample, cu, starts))
    for i in [*range(len(BATCHES)), 0]:
        for buffer, values in zip((cu, starts), metadata(i), strict=True):
            buffer.copy_(values)
        t = randn(TOKENS, 8, 64, device="cuda", seed=i)
        expected = gradient(call, t, *metadata(i), seed=i)
        assert_same(gradient(graphed, t, cu, starts, seed=i), expected)


def test_two_callables_q_and_k() -> None:
    freqs = random_table(ROWS, 128, "cuda")

    def call(t: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
        return apply_rotary_pos_emb_thd(t, freqs, cu)

    def again(t: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
        return call(t, cu)

    cu, _ = metadata(0)
    samples = tuple(
        (randn(TOKENS, heads, 128, device="cuda").requires_grad_(), cu) for heads in (32, 8)
    )
    q_graphed, k_graphed = torch.cuda.make_graphed_callables((call, again), samples)
    for i in range(len(BATCHES)):
        cu, _ = metadata(i)
        q, k = (randn(TOKENS, heads, 128, device="cuda", seed=i) for heads in (32, 8))
        expected = gradient(call, q, cu, seed=i), gradient(call, k, cu, seed=i)
        # Both forward, then both backward, as captured.
        x, z = (t.requires_grad_() for t in (q, k))
        outputs = q_graphed(x, cu), k_graphed(z, cu)
        grads = tuple(randn(*y.shape, device="cuda", seed=100 + i) for y in outputs)
        found = torch.autograd.grad(outputs, (x, z), grads)
        for (y, grad), (expected_y, expected_grad) in zip(
            zip(outputs, found, strict=True), expected, strict=True
        ):
            assert_same((y.detach(), grad), (expected_y, expected_grad))


@pytest.mark.parametrize("stream_of_capture", ["own", "other"])
def test_whole_step_captured_and_replayed_on_streams(stream_of_capture: str) -> None:
    """Warm-up on one stream, capture on it or on one of torch's own, replay on a third."""
    freqs = random_table(ROWS, 128, "cuda")
    t = randn(TOKENS, 8, 128, dtype=torch.bfloat16, device="cuda").requires_grad_()
    g = randn(TOKENS, 8, 128, dtype=torch.bfloat16, device="cuda", seed=100)
    cu, starts = metadata(0)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        y = apply_rotary_pos_emb_thd(t, freqs, cu, start_positions=starts)
        (grad,) = torch.autograd.grad(y, t, g)
        return y, grad

    warm, other = torch.cuda.Stream(), torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(warm)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=warm if stream_of_capture == "own" else None):
        captured = step()
    for i in [*range(len(BATCHES)), 0]:
        for buffer, values in zip((cu, starts), metadata(i), strict=True):
            buffer.copy_(values)
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            graph.replay()
        torch.cuda.current_stream().wait_stream(other)
        torch.cuda.synchronize()
        found = tuple(x.detach().clone() for x in captured)
        assert_same(found, tuple(x.detach() for x in step()))


def test_fault_of_a_replay_is_reported_by_a_later_call() -> None:
    freqs = random_table(200, 128, "cuda")

    def call(t: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
        return apply_rotary_pos_emb_thd(t, freqs, cu)

    t = randn(TOKENS, 8, 128, dtype=torch.bfloat16, device="cuda")
    sound = boundaries([0, 128, 256, 384, 512], "cuda")
    graphed = torch.cuda.make_graphed_callables(call, (t.clone().requires_grad_(), sound.clone()))
    expected = gradient(call, t, sound, seed=0)
    assert_same(gradient(graphed, t, sound, seed=0), expected)

    faulty = boundaries([0, 128, 256, 256, 512], "cuda")  # its last sequence has 256 tokens
    y, grad = gradient(graphed, t, faulty, seed=0)
    torch.cuda.synchronize()
    assert y[:456].ne(0).any(-1).all()
    assert y[456:].eq(0).all()
    assert grad[456:].eq(0).all()
    with pytest.warns(
        RuntimeWarning, match=r"sequence 3 .* position 2\d\d, and freqs has 200 rows"
    ):
        call(t, sound)
    assert_same(gradient(graphed, t, sound, seed=0), expected)  # and goes on


def test_fault_of_a_replay_raises_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TE_OVERLAY_ON_FAULT", "raise")
    freqs = random_table(ROWS, 64, "cuda")

    def call(t: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
        return apply_rotary_pos_emb_thd(t, freqs, cu, cp_size=2, cp_rank=0)

    t = randn(TOKENS // 2, 8, 64, device="cuda")
    sound, _ = metadata(0)
    graphed = torch.cuda.make_graphed_callables(call, (t.clone().requires_grad_(), sound.clone()))
    graphed(t, boundaries([0, 98, 100, 300, 512], "cuda"))
    torch.cuda.synchronize()
    with pytest.raises(PackingError, match=r"not divisible by 2 \* cp_size = 4"):
        call(t, sound)


def test_checked_mode_says_that_it_does_not_check_a_capture(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TE_OVERLAY_CHECK", "1")
    monkeypatch.setattr(checked, "_warned_of_capture", False)
    freqs = random_table(ROWS, 64, "cuda")

    def call(t: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
        return apply_rotary_pos_emb_thd(t, freqs, cu)

    t = randn(TOKENS, 8, 64, device="cuda")
    cu, _ = metadata(0)
    with pytest.warns(RuntimeWarning, match="checks nothing while a CUDA graph is captured"):
        graphed = torch.cuda.make_graphed_callables(call, (t.clone().requires_grad_(), cu.clone()))
    assert_same(gradient(graphed, t, cu, seed=0), gradient(call, t, cu, seed=0))


def test_compiled_into_cuda_graphs(path: str) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    freqs = random_table(ROWS, 128, "cuda")

    def call(t: torch.Tensor, cu: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return apply_rotary_pos_emb_thd(t * 2, freqs, cu, start_positions=starts) + 1

    # Its first calls warm up and capture, the others are replays. It needs no code generation.
    compiled: Any = torch.compile(call, backend="cudagraphs", fullgraph=True)
    for i in [*range(len(BATCHES)), *range(len(BATCHES))]:
        t = randn(TOKENS, 8, 128, device="cuda", seed=i)
        expected = gradient(call, t, *metadata(i), seed=i)
        before = calls(path)
        torch.compiler.cudagraph_mark_step_begin()
        assert_same(gradient(compiled, t, *metadata(i), seed=i), expected)
    assert calls(path) == before
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0
    torch._dynamo.reset()
