# SPDX-License-Identifier: Apache-2.0
"""What holds of every call: properties, tried on the corpus and on calls that hypothesis draws."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from fuzz.corpus import CALLS, SPOILED, with_corpus
from fuzz.harness import PATHS, checked_mode, oracle, rotate, rotate_both
from fuzz.profiles import profile
from fuzz.strategies import Call, Spoiled, Tensors, calls, make_tensors, spoiled_calls
from hypothesis import event, given
from hypothesis import strategies as st
from packed import randn

from transformer_engine_overlay import path_counts
from transformer_engine_overlay.packing import merge_ranks, padded_cu_seqlens, split_for_rank
from transformer_engine_overlay.thd import rotate_thd
from transformer_engine_overlay.verify import TOLERANCES, same_bits

Tally = Callable[[str], None]


@profile()
@given(call=calls())
@with_corpus("call", CALLS)
def test_paths_agree_and_match_the_oracle(device: torch.device, tally: Tally, call: Call) -> None:
    tensors = make_tensors(call, device)
    y = rotate_both(call, tensors)
    rtol, atol = TOLERANCES[y.dtype]
    torch.testing.assert_close(y.double(), oracle(call, tensors), rtol=rtol, atol=atol)
    tail = y[call.rows :]
    assert same_bits(tail, torch.zeros_like(tail))
    assert same_bits(y[..., call.rotary_dim :][: call.rows],
                     tensors.t[..., call.rotary_dim :][: call.rows])  # fmt: skip
    with checked_mode():
        assert same_bits(rotate(call, tensors, "1"), y)
    tally("legal")
    event(f"{call.dtype}, {'gradient' if call.transpose else 'forward'}")


@profile()
@given(call=calls(), victim=st.integers(0, 200))
@with_corpus("call", CALLS, victim=1)
@pytest.mark.parametrize("path", PATHS, ids=PATHS.get)
def test_rows_depend_on_their_own_input_alone(
    device: torch.device, tally: Tally, path: str, call: Call, victim: int
) -> None:
    """Not on the memory around, tail rows, neighbours, nor on table rows of others."""
    y = rotate(call, make_tensors(call, device), path)
    tensors = make_tensors(call, device, filling=-3e4)
    assert same_bits(rotate(call, tensors, path), y)

    used = torch.tensor([call.table_row_of(r) for r in range(call.rows)], dtype=torch.int64)
    unused = torch.ones(call.table_rows, dtype=torch.bool)
    unused[used] = False
    tensors.freqs[unused.to(device)] = float("nan")
    poison(call, tensors, slice(call.rows, None))
    assert same_bits(rotate(call, tensors, path), y)

    if call.lengths and 0 not in call.layout.expanded:
        i = victim % len(call.lengths)
        begin, end = (b // call.cp_size for b in call.cu_seqlens[i : i + 2])
        poison(call, tensors, slice(begin, end))
        z = rotate(call, tensors, path)
        assert same_bits(z[:begin], y[:begin])
        assert same_bits(z[end:], y[end:])
        assert z[begin:end].isnan().all()
    tally("legal")


def poison(call: Call, tensors: Tensors, rows: slice) -> None:
    """Make rows of the input NaN, unless they share their memory with others."""
    if 0 in call.layout.expanded:
        return
    heads, columns = (slice(1) if i in call.layout.expanded else slice(None) for i in (1, 2))
    tensors.t[rows, heads, columns] = float("nan")


@profile()
@given(call=calls())
@with_corpus("call", CALLS)
def test_ranks_put_together_are_the_whole(device: torch.device, tally: Tally, call: Call) -> None:
    cu = padded_cu_seqlens(call.lengths, call.cp_size, device)
    tensors = make_tensors(call, device)
    t = randn(int(cu[-1]), *call.shape[1:], dtype=tensors.t.dtype, device=device, seed=call.seed)

    def run(x: torch.Tensor, cp_size: int, cp_rank: int) -> torch.Tensor:
        return rotate_thd(
            x, tensors.freqs, cu, tensors.starts, call.interleaved, cp_size, cp_rank, call.transpose
        )

    shards = [
        run(split_for_rank(t, cu, call.cp_size, rank), call.cp_size, rank)
        for rank in range(call.cp_size)
    ]
    assert same_bits(merge_ranks(shards, cu), run(t, 1, 0))
    tally("legal")


def expected_rows(spoiled: Spoiled, tensors: Tensors) -> torch.Tensor:
    """Each row that has a table row, turned by it, as a sequence of its own; zeros elsewhere."""
    used = spoiled.table_rows_used()
    device = tensors.t.device
    held = torch.tensor([row is not None for row in used], dtype=torch.bool, device=device)
    y = torch.zeros(tensors.t.shape, dtype=tensors.t.dtype, device=device)
    starts = torch.tensor([row for row in used if row is not None], dtype=torch.int32)
    if len(starts):
        singles = torch.arange(len(starts) + 1, dtype=torch.int32, device=device)
        y[held] = rotate_thd(
            tensors.t[held],
            tensors.freqs,
            singles,
            starts.to(device),
            spoiled.call.interleaved,
            1,
            0,
            spoiled.call.transpose,
        )
    return y


@profile()
@given(spoiled=spoiled_calls())
@with_corpus("spoiled", SPOILED)
def test_metadata_that_do_not_fit_do_no_harm(
    device: torch.device, tally: Tally, spoiled: Spoiled
) -> None:
    """Rows are right or zeros, checked mode refuses just what does not fit, the next call works."""
    call, tensors = spoiled.call, spoiled.make(device)
    good = make_tensors(call, device)
    before = rotate(call, good, "1")
    if spoiled.decreases:  # a row may belong to one sequence or another
        for path in PATHS:
            assert rotate(call, tensors, path).isfinite().all()
    else:
        assert same_bits(rotate_both(call, tensors), expected_rows(spoiled, tensors))

    faults = spoiled.faults()
    counts = path_counts()
    refused = pytest.raises(ValueError, match="cu_seqlens") if faults else nullcontext()
    with checked_mode(), refused:
        rotate_thd(
            *(tensors.t, tensors.freqs, tensors.cu_seqlens, tensors.starts),
            *(call.interleaved, call.cp_size, call.cp_rank, call.transpose),
        )
    assert not faults or path_counts() == counts
    assert same_bits(rotate(call, good, "1"), before)
    tally("illegal" if faults else "legal")
    event(", ".join(sorted(faults)) or "fits")


# Each makes an argument of a legal call one that no call may have.
WRONG: dict[str, tuple[str, Callable[[Call, Any], Any]]] = {
    "int64 boundaries": ("cu_seqlens", lambda call, x: x.long()),
    "float boundaries": ("cu_seqlens", lambda call, x: x.float()),
    "2-D boundaries": ("cu_seqlens", lambda call, x: x[None]),
    "no entry": ("cu_seqlens", lambda call, x: x[:0]),
    "boundaries elsewhere": ("cu_seqlens", lambda call, x: x.to("meta")),
    "list of boundaries": ("cu_seqlens", lambda call, x: x.tolist()),
    "float starts": ("starts", lambda call, x: torch.zeros(9 + len(call.lengths))),
    "0-D start": ("starts", lambda call, x: torch.zeros((), dtype=torch.int32)),
    "float64": ("t", lambda call, x: x.double()),
    "2-D tensor": ("t", lambda call, x: x[:, 0] if call.heads else x.flatten(1)),
    "tensor elsewhere": ("t", lambda call, x: x.to("meta")),
    "odd d2": ("freqs", lambda call, x: torch.zeros(*x.shape[:3], x.shape[3] + 1, device=x.device)),
    "wide d2": (
        "freqs",
        lambda call, x: torch.zeros(*x.shape[:3], call.head_dim // 2 * 2 + 2, device=x.device),
    ),
    "integer table": ("freqs", lambda call, x: x.int()),
    "table of samples": ("freqs", lambda call, x: x.expand(-1, 2, -1, -1)),
    "table elsewhere": ("freqs", lambda call, x: x.to("meta")),
    "rank past the end": ("cp_rank", lambda call, x: call.cp_size),
    "negative rank": ("cp_rank", lambda call, x: -1),
    "no ranks": ("cp_size", lambda call, x: 0),
    "size as a float": ("cp_size", lambda call, x: float(call.cp_size)),
}


@profile()
@given(call=calls(), name=st.sampled_from(sorted(WRONG)))
def test_wrong_arguments_are_refused_and_the_next_call_works(
    device: torch.device, tally: Tally, call: Call, name: str
) -> None:
    tensors = make_tensors(call, device)
    before = rotate(call, tensors, "1")
    argument, spoil = WRONG[name]
    arguments: dict[str, Any] = {
        "t": tensors.t,
        "freqs": tensors.freqs,
        "cu_seqlens": tensors.cu_seqlens,
        "starts": tensors.starts,
        "interleaved": call.interleaved,
        "cp_size": call.cp_size,
        "cp_rank": call.cp_rank,
    }
    arguments[argument] = spoil(call, arguments[argument])
    counts = path_counts()
    word = {"starts": "start_positions", "t": "(t|grad_output)"}.get(argument, argument)
    with pytest.raises((TypeError, ValueError), match=f"^{word} "):
        rotate_thd(*arguments.values(), call.transpose)
    assert path_counts() == counts
    assert same_bits(rotate(call, tensors, "1"), before)
    tally("illegal")
    event(name)


@pytest.mark.parametrize("path", PATHS, ids=PATHS.get)
def test_the_path_that_is_named_runs(device: torch.device, path: str) -> None:
    """Guards `rotate`, which lets a path not run, as there may be nothing to do."""
    before = path_counts()[PATHS[path]]["calls"]
    rotate(Call(), make_tensors(Call(), device), path)
    assert path_counts()[PATHS[path]]["calls"] == before + 1
