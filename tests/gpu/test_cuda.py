# SPDX-License-Identifier: Apache-2.0
"""What only a GPU shows: streams, synchronisation, graphs, memory, sizes past 32 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from transformer_engine_overlay import apply_rotary_pos_emb_thd
from transformer_engine_overlay.thd import rotate_thd
from transformer_engine_overlay.verify import same_bits

pytestmark = pytest.mark.gpu

PATH_VARIABLE = "NVTE_FUSED_ROPE_THD_TOKEN_LINEAR"


@pytest.fixture(params=["0", "1"], ids=["legacy_grid", "token_linear"], autouse=True)
def _path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATH_VARIABLE, request.param)


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    t = torch.randn(4096, 8, 64, generator=generator).cuda().bfloat16()
    freqs = torch.randn(4096, 1, 1, 64, generator=generator).cuda() * 30
    cu = torch.arange(0, 4097, 64, dtype=torch.int32).cuda()
    return t, freqs, cu


def test_k37_runs_on_the_current_stream(batch: tuple[torch.Tensor, ...]) -> None:
    t, freqs, cu = batch
    expected = rotate_thd(t, freqs, cu, None, False, 1, 0, False)
    x = torch.zeros_like(t)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # a tenth of a second: another stream would see zeros
        x.copy_(t)
        y = apply_rotary_pos_emb_thd(x, freqs, cu)
    assert not side.query()  # and nothing has waited for it
    side.synchronize()
    assert same_bits(y, expected)


def test_k37_backward_on_another_stream(batch: tuple[torch.Tensor, ...]) -> None:
    t, freqs, cu = batch
    expected = rotate_thd(torch.ones_like(t), freqs, cu, None, False, 1, 0, True)
    x = t.clone().requires_grad_()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = apply_rotary_pos_emb_thd(x, freqs, cu)
    torch.cuda.current_stream().wait_stream(side)
    y.backward(torch.ones_like(y))
    torch.cuda.synchronize()
    assert x.grad is not None
    assert same_bits(x.grad, expected)


@pytest.fixture
def synchronisation_is_an_error() -> Iterator[Callable[[], None]]:
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


def test_k41_never_synchronises(
    batch: tuple[torch.Tensor, ...], synchronisation_is_an_error: Callable[[], None]
) -> None:
    t, freqs, cu = batch
    t.requires_grad_()
    starts = torch.zeros_like(cu)
    synchronisation_is_an_error()
    y = apply_rotary_pos_emb_thd(t, freqs, cu, start_positions=starts, cp_size=2)
    y.backward(torch.ones_like(y))


def test_takes_no_memory_but_the_output(batch: tuple[torch.Tensor, ...]) -> None:
    t, freqs, cu = batch
    apply_rotary_pos_emb_thd(t, freqs, cu)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = apply_rotary_pos_emb_thd(t, freqs, cu)
    output = y.numel() * y.element_size()
    assert torch.cuda.max_memory_allocated() - before == output


def test_k04_graph_replay_follows_new_boundaries() -> None:
    t = torch.randn(12, 2, 8, device="cuda")
    grad = torch.randn(12, 2, 8, device="cuda")
    freqs = torch.randn(16, 1, 1, 8, device="cuda") * 30
    cu = torch.tensor([0, 5, 9, 9, 9], dtype=torch.int32, device="cuda")

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        return (
            rotate_thd(t, freqs, cu, None, False, 1, 0, False),
            rotate_thd(grad, freqs, cu, None, False, 1, 0, True),
        )

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for boundaries in ([0, 5, 9, 9, 9], [0, 3, 7, 12, 12], [0, 0, 0, 0, 1]):
        cu.copy_(torch.tensor(boundaries, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        assert all(same_bits(a, b) for a, b in zip(captured, call(), strict=True))


@pytest.mark.parametrize("tokens", [262_144, 262_145])  # 2^31 elements, and a row more
def test_k08_more_than_two_to_the_31_elements(tokens: int) -> None:
    heads, dim = 64, 128
    free, _ = torch.cuda.mem_get_info()
    if free < 3 * tokens * heads * dim * 2:
        pytest.skip(f"needs 13 GB of GPU memory, {free / 1e9:.0f} GB are free")
    t = torch.randn(tokens, heads, dim, device="cuda", dtype=torch.bfloat16)
    freqs = torch.randn(tokens, 1, 1, dim, device="cuda") * 30
    cu = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    y = apply_rotary_pos_emb_thd(t, freqs, cu)
    one = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    for row in (0, 1, 262_143, tokens - 1):
        start = torch.tensor([row], dtype=torch.int32, device="cuda")
        alone = apply_rotary_pos_emb_thd(t[row : row + 1], freqs, one, start_positions=start)
        assert same_bits(y[row : row + 1], alone)


def test_an_error_leaves_the_context_usable(
    batch: tuple[torch.Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    t, freqs, cu = batch
    with pytest.raises(ValueError, match="cu_seqlens is on cpu"):
        apply_rotary_pos_emb_thd(t, freqs, cu.cpu())
    with monkeypatch.context() as patch:
        patch.setenv(PATH_VARIABLE, "yes")
        with pytest.raises(ValueError, match="is 'yes'"):
            apply_rotary_pos_emb_thd(t, freqs, cu)
    y = apply_rotary_pos_emb_thd(t, freqs, cu)
    torch.cuda.synchronize()
    assert y.isfinite().all()


def test_gpu_and_cpu_agree_within_the_tolerance(
    batch: tuple[torch.Tensor, ...], run_on: Callable[..., torch.Tensor]
) -> None:
    t, freqs, cu = batch
    torch.testing.assert_close(run_on(t.float(), freqs, cu, "cuda").cpu(),
                               run_on(t.float(), freqs, cu, "cpu"))  # fmt: skip


@pytest.fixture
def run_on() -> Callable[..., torch.Tensor]:
    def run(t: torch.Tensor, freqs: torch.Tensor, cu: torch.Tensor, device: str) -> torch.Tensor:
        return apply_rotary_pos_emb_thd(t.to(device), freqs.to(device), cu.to(device))

    return run


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_k36_runs_on_the_device_of_the_tensor(batch: tuple[torch.Tensor, ...]) -> None:
    t, freqs, cu = batch
    expected = rotate_thd(t, freqs, cu, None, False, 1, 0, False)
    moved = [x.to("cuda:1") for x in (t, freqs, cu)]
    assert torch.cuda.current_device() == 0
    y = rotate_thd(*moved, None, False, 1, 0, False)
    assert torch.cuda.current_device() == 0
    assert y.device == torch.device("cuda:1")
    assert same_bits(y.cpu(), expected.cpu())
