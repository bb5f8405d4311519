# SPDX-License-Identifier: Apache-2.0
"""What happens around calls: memory that runs out, many threads, a fork."""

from __future__ import annotations

import gc
import os
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from packed import boundaries, randn, random_table
from stub_fixtures import Format, original

from transformer_engine_overlay import _native, path_counts, router
from transformer_engine_overlay.thd import rotate_thd
from transformer_engine_overlay.verify import same_bits

Rotate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(params=["direct", "routed"])
def rotate(request: pytest.FixtureRequest) -> Rotate:
    if request.param == "direct":
        return lambda t, freqs, cu: rotate_thd(t, freqs, cu, None, False, 1, 0, False)
    routed = router.make_routed(original, False, Format.THD, router.RouterState())
    return lambda t, freqs, cu: routed(t, freqs, None, Format.THD, False, cu, 1, 0)


def batch(device: torch.device | str = "cpu", *, table_rows: int = 16) -> list[torch.Tensor]:
    return [
        randn(16, 2, 8, device=device),
        random_table(table_rows, 8, device),
        boundaries([0, 5, 16], device),
    ]


@pytest.mark.parametrize("which", ["t", "freqs"])
def test_out_of_memory_leaves_all_as_it_was(
    device: torch.device, rotate: Rotate, which: str
) -> None:
    """By the output, or by a table to be made contiguous: of 2^53 bytes, stored as one row."""
    sound = batch(device)
    expected = rotate(*sound)
    too_large = list(sound)
    if which == "t":
        too_large[0] = sound[0][:1, :1].expand(2**38, 2**10, -1)
    else:
        too_large[1] = sound[1][:1].expand(2**48, -1, -1, -1)
    before = path_counts()
    references = [sys.getrefcount(x) for x in too_large]
    memory = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    with pytest.raises(RuntimeError, match=r"(?i)alloc|out of memory"):
        rotate(*too_large)
    gc.collect()
    assert path_counts() == before
    assert [sys.getrefcount(x) for x in too_large] == references
    if device.type == "cuda":
        assert torch.cuda.memory_allocated() == memory
        torch.cuda.synchronize()
    assert same_bits(rotate(*sound), expected)


def test_threads_that_meet_faults_and_a_changing_environment(
    rotate: Rotate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gets its own result, one fault is reported, and no call is lost to the counters."""
    threads, calls = 8, 60
    sound = [batch() for _ in range(threads)]
    for i, (t, *_) in enumerate(sound):
        t += i
    expected = [rotate(*tensors) for tensors in sound]
    faulty = batch(table_rows=8)
    changes = (
        ("NVTE_FUSED_ROPE_THD_TOKEN_LINEAR", "1"),
        ("TE_OVERLAY_CHECK", "0"),
    )
    for name, _ in changes:
        monkeypatch.setenv(name, "1")  # so that it is what it was at the end
        monkeypatch.delenv(name)
    wrong: list[Any] = []

    def work(i: int) -> None:
        try:
            for k in range(calls):
                if not same_bits(rotate(*sound[i]), expected[i]):
                    wrong.append(i)
                name, value = changes[k % 2]
                if k % 4 < 2:
                    os.environ[name] = value
                else:
                    os.environ.pop(name, None)
                rotate(*faulty)
        except Exception as error:
            wrong.append(error)

    _native.reset_faults(-1)
    before = path_counts()["token_linear"]["calls"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    assert not wrong
    assert [w for w in caught if "met wrong packing" in str(w.message)] == caught
    assert len(caught) == 1
    assert path_counts()["token_linear"]["calls"] - before == 2 * threads * calls
    _native.reset_faults(-1)


def test_a_forked_child_goes_on(rotate: Rotate) -> None:
    """No thread of ours is there that a child would miss. torch's are: it compares bytes."""
    tensors = [randn(4096, 8, 64), random_table(4096, 64), boundaries([0, 1000, 4096])]
    expected = rotate(*tensors).numpy().tobytes()  # large enough for several threads
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if rotate(*tensors).numpy().tobytes() == expected else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
