# SPDX-License-Identifier: Apache-2.0
"""Measurements beside an installed TransformerEngine: host time of a call, time of a whole layer.

What is compared runs interleaved in one process, since timings of a shared machine drift.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from transformer_engine_overlay import gate, patching
from transformer_engine_overlay.thd import path_counts

# sequences and their length: those of the proposal that became TransformerEngine's PR 3057
LAYER_SHAPES = ((128, 512), (512, 128), (1024, 64), (2401, 28))
LAYER_TABLE_ROWS = 65536
LAYER = {
    "hidden_size": 4096,
    "ffn_hidden_size": 11008,
    "num_attention_heads": 32,
    "num_gqa_groups": 8,
}


@dataclass(frozen=True)
class HostRow:
    """Host time of a call: medians over rounds, microseconds.

    Attributes
    ----------
    function : str
        ``fused_rope_forward`` or ``fused_rope_backward``.
    case : str
        What is special about the arguments.
    stock_us, routed_us : float
        A call of TransformerEngine's own function, and of the routed one.
    ratio : float
        Median over rounds of routed over stock.
    """

    function: str
    case: str
    stock_us: float
    routed_us: float
    ratio: float


@dataclass(frozen=True)
class LayerRow:
    """A TransformerLayer, forward and backward: medians over rounds, milliseconds.

    Attributes
    ----------
    sequences, length : int
        The packed batch.
    stock_ms, overlay_ms, no_rope_ms : float
        With TransformerEngine's own kernel, with the overlay, and without any RoPE.
    stock_rope_share, overlay_rope_share : float
        Part of the layer's time that RoPE takes.
    speedup : float
        Median over rounds of stock over overlay.
    """

    sequences: int
    length: int
    stock_ms: float
    overlay_ms: float
    no_rope_ms: float
    stock_rope_share: float
    overlay_rope_share: float
    speedup: float


def host_rows(device: torch.device, rounds: int = 41, calls: int = 200) -> Iterator[HostRow]:
    """Measure the host time of stock and routed calls; the overlay must be enabled.

    A call's work on the GPU is small, and fewer calls are queued at a time than the queue holds, so
    that the host never waits for it.
    """
    for name in patching.FUNCTIONS:
        for case, arguments in _host_cases(device).items():
            functions = {
                "stock": patching.original(name),
                "routed": getattr(gate.import_extension(), name),
            }
            before = path_counts()
            times = _interleaved(
                {label: partial(_host_time, f, arguments, calls) for label, f in functions.items()},
                rounds,
            )
            _require_routed(before, at_least=rounds * calls)
            yield HostRow(
                function=name,
                case=case,
                stock_us=statistics.median(times["stock"]) * 1e6,
                routed_us=statistics.median(times["routed"]) * 1e6,
                ratio=_median_ratio(times["routed"], times["stock"]),
            )


def layer_rows(device: torch.device, rounds: int = 9) -> Iterator[LayerRow]:
    """Measure a TransformerLayer on packed batches; the overlay must be enabled."""
    import transformer_engine.pytorch as te

    torch.manual_seed(0)
    layer = te.TransformerLayer(
        **LAYER,
        attn_input_format="thd",
        self_attn_mask_type="padding_causal",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=torch.bfloat16,
        normalization="RMSNorm",
        activation="swiglu",
        bias=False,
        device=device,
    )
    head_dim = LAYER["hidden_size"] // LAYER["num_attention_heads"]
    freqs = te.attention.RotaryPositionEmbedding(head_dim)(LAYER_TABLE_ROWS).to(device)
    for sequences, length in LAYER_SHAPES:
        before = path_counts()
        runs = _layer_runs(layer, freqs, sequences, length, device)
        times = _interleaved(runs, rounds)
        _require_routed(before, at_least=4 * rounds)  # q and k, forward and backward
        stock, overlay, no_rope = (
            statistics.median(times[k]) for k in ("stock", "overlay", "no RoPE")
        )
        yield LayerRow(
            sequences=sequences,
            length=length,
            stock_ms=stock,
            overlay_ms=overlay,
            no_rope_ms=no_rope,
            stock_rope_share=1.0 - no_rope / stock,
            overlay_rope_share=1.0 - no_rope / overlay,
            speedup=_median_ratio(times["stock"], times["overlay"]),
        )


def as_dicts(rows: list[Any]) -> list[dict[str, object]]:
    """Return rows as plain data."""
    return [asdict(row) for row in rows]


def _host_cases(device: torch.device) -> dict[str, tuple[Any, ...]]:
    t = torch.randn(64, 8, 64, device=device, dtype=torch.bfloat16)
    freqs = torch.randn(64, 1, 1, 64, device=device)
    cu_seqlens = torch.tensor([0, 16, 32, 64], dtype=torch.int32, device=device)
    starts = torch.zeros(3, dtype=torch.int32, device=device)
    fused = torch.randn(64, 8, 192, device=device, dtype=torch.bfloat16)
    thd = gate.thd_format(gate.import_extension())
    return {
        "plain": (t, freqs, None, thd, False, cu_seqlens, 1, 0),
        "start positions": (t, freqs, starts, thd, False, cu_seqlens, 1, 0),
        "strided, cp_size 2": (fused[..., :64], freqs, None, thd, False, cu_seqlens, 2, 1),
    }


def _host_time(function: Callable[..., Any], arguments: tuple[Any, ...], calls: int) -> float:
    """Return seconds a call, without the wait for the GPU."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        function(*arguments)
    return (time.perf_counter() - begin) / calls


def _layer_runs(
    layer: Any, freqs: torch.Tensor, sequences: int, length: int, device: torch.device
) -> dict[str, Callable[[], float]]:
    tokens = sequences * length
    cu_seqlens = torch.arange(sequences + 1, dtype=torch.int32, device=device) * length
    x = torch.randn(
        tokens, LAYER["hidden_size"], device=device, dtype=torch.bfloat16, requires_grad=True
    )
    grad = torch.randn_like(x)
    new_event = partial(torch.cuda.Event, enable_timing=True)

    def step(
        table: torch.Tensor | None, within: Callable[[], AbstractContextManager[Any]]
    ) -> float:
        begin, end = new_event(), new_event()
        with within():
            begin.record()
            output = layer(
                x,
                cu_seqlens_q=cu_seqlens,
                cu_seqlens_kv=cu_seqlens,
                max_seqlen_q=length,
                max_seqlen_kv=length,
                rotary_pos_emb=table,
            )
            output.backward(grad)
            end.record()
            end.synchronize()
        x.grad = None
        layer.zero_grad(set_to_none=True)
        return float(begin.elapsed_time(end))

    return {
        "stock": lambda: step(freqs, _without_overlay),
        "overlay": lambda: step(freqs, nullcontext),
        "no RoPE": lambda: step(None, nullcontext),
    }


class _without_overlay:  # noqa: N801 (a context manager, used as a function)
    def __enter__(self) -> None:
        patching.disable()

    def __exit__(self, *exception: object) -> None:
        patching.enable(strict=True)


def _interleaved(
    runs: dict[str, Callable[[], float]], rounds: int, warm_up: int = 3
) -> dict[str, list[float]]:
    """Run all of them once a round, after a warm-up, in an order that changes with the round.

    In a fixed order each would always meet the clock and the caches that the one before it leaves.
    """
    rng = random.Random(0)
    times: dict[str, list[float]] = {label: [] for label in runs}
    for i in range(warm_up + rounds):
        for label in rng.sample(list(runs), len(runs)):
            seconds = runs[label]()
            if i >= warm_up:
                times[label].append(seconds)
    return times


def _median_ratio(numerators: list[float], denominators: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def _require_routed(before: dict[str, dict[str, int]], at_least: int) -> None:
    after = path_counts()
    routed = sum(after[path]["routed"] - before[path]["routed"] for path in after)
    if routed < at_least:
        raise RuntimeError(f"{routed} calls were routed where {at_least} were measured as routed")
