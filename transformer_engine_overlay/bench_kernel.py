# SPDX-License-Identifier: Apache-2.0
"""Time the kernels on named shapes, everything that is compared interleaved in one run.

On a GPU a call's device time is taken from events around a CUDA graph of one call for each set of
tensors, so that host time does not enter, and the caches are cold. Without a GPU the CPU backend's
two paths are timed by the clock.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from transformer_engine_overlay.bench_points import Point
from transformer_engine_overlay.bench_providers import COPIES, Call, Tensors, prepare, providers

YARDSTICK = "copy"
DIRECTIONS = ("forward", "backward")
MAX_SETS = 24
# A call that takes longer than this is measured in fewer rounds.
SLOW_SECONDS = 0.02


@dataclass(frozen=True)
class KernelRow:
    """Time of one provider in one direction at one point.

    Attributes
    ----------
    point : str
        Name of the point.
    provider, direction : str
        What ran; ``copy`` is the faster of two ways to copy the same number of bytes.
    median_us, p20_us, p80_us : float
        Device time of a call over the rounds, microseconds.
    tb_per_s : float
        Bytes that must be moved over the median, 10^12 bytes a second.
    of_copy : float
        Time of the copy over this time, median over rounds.
    of_stock : float or None
        This time over that of stock TransformerEngine, median over rounds.
    megabytes : float
        Bytes that must be moved, 10^6.
    """

    point: str
    provider: str
    direction: str
    median_us: float
    p20_us: float
    p80_us: float
    tb_per_s: float
    of_copy: float
    of_stock: float | None
    megabytes: float


def kernel_rows(
    points: Iterable[Point],
    device: torch.device,
    rounds: int,
    only: Collection[str] | None = None,
) -> Iterator[list[KernelRow]]:
    """Measure points one after the other; yields the rows of each.

    Parameters
    ----------
    points : iterable of Point
        What to measure.
    device : torch.device
        A CUDA device, or the CPU.
    rounds : int
        Each round runs everything once, in a random order.
    only : collection of str, optional
        Names of providers to run, beside the copies; all that can run by default.
    """
    timer = _GpuTimer(device) if device.type == "cuda" else _CpuTimer()
    for point in points:
        tensors = prepare(point, device, timer.cold_bytes, timer.max_sets)
        calls = providers(tensors, only)
        times = timer.measure(tensors, calls, rounds)
        yield list(_rows(tensors, times))


Times = dict[tuple[str, str], list[float]]


def _rows(tensors: Tensors, times: Times) -> Iterator[KernelRow]:
    """Turn seconds into rows. The rounds are paired: ratios are medians over rounds."""
    copies = [[times[name, d] for name in COPIES] for d in DIRECTIONS]
    for direction, both in zip(DIRECTIONS, copies, strict=True):
        times[YARDSTICK, direction] = min(both, key=statistics.median)
    for (provider, direction), seconds in times.items():
        if provider in COPIES:
            continue
        stock = times.get(("stock TE", direction))
        median = statistics.median(seconds)
        p20, p80 = _quantiles(seconds)
        yield KernelRow(
            point=tensors.point.name,
            provider=provider,
            direction=direction,
            median_us=median * 1e6,
            p20_us=p20 * 1e6,
            p80_us=p80 * 1e6,
            tb_per_s=tensors.num_bytes / median / 1e12,
            of_copy=paired_ratio(times[YARDSTICK, direction], seconds),
            of_stock=None if stock is None else paired_ratio(seconds, stock),
            megabytes=tensors.num_bytes / 1e6,
        )


def paired_ratio(numerators: list[float], denominators: list[float]) -> float:
    """Median over rounds of a ratio; a slow provider has fewer rounds than the others."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=False))


def _quantiles(values: list[float]) -> tuple[float, float]:
    if len(values) == 1:
        return values[0], values[0]
    cuts = statistics.quantiles(values, n=5, method="inclusive")
    return cuts[0], cuts[3]


class _GpuTimer:
    def __init__(self, device: torch.device) -> None:
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        self.cold_bytes = 3 * l2
        self.max_sets = MAX_SETS
        # Read before each measurement: with fewer sets than fill the L2, it would keep them.
        self._flush = torch.zeros(2 * l2 // 4, dtype=torch.int32, device=device)

    def measure(self, tensors: Tensors, calls: dict[str, Call], rounds: int) -> Times:
        sets = len(tensors.t)
        graphs = {}
        slow = set()
        for name, call in calls.items():
            for transpose, direction in enumerate(DIRECTIONS):
                key = name, direction
                graphs[key], seconds = _capture(call, bool(transpose), sets)
                if seconds > SLOW_SECONDS:
                    slow.add(key)
        times: Times = {key: [] for key in graphs}
        rng = random.Random(0)
        for graph in graphs.values():
            graph.replay()
        for round_ in range(rounds):
            for key in rng.sample(list(graphs), len(graphs)):
                if key in slow and round_ >= 3:
                    continue
                self._flush.sum()
                milliseconds = _elapsed(graphs[key].replay)
                times[key].append(milliseconds / 1e3 / sets)
        return times


def _elapsed(run: Callable[[], object]) -> float:
    new_event = partial(torch.cuda.Event, enable_timing=True)
    begin, end = new_event(), new_event()
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def _capture(call: Call, transpose: bool, sets: int) -> tuple[torch.cuda.CUDAGraph, float]:
    """Capture one call for each set, and return with it the seconds that a call takes."""
    side: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        call(0, transpose)  # loads, compiles, allocates
        side.synchronize()
        begin = time.perf_counter()
        call(0, transpose)
        side.synchronize()
        seconds = time.perf_counter() - begin
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # Outputs are kept until the end: one that is freed would be the next one's memory.
        kept = [call(i, transpose) for i in range(sets)]
    del kept
    return graph, seconds


class _CpuTimer:
    cold_bytes = 0
    max_sets = 2

    def measure(self, tensors: Tensors, calls: dict[str, Call], rounds: int) -> Times:
        times: Times = {(name, d): [] for name in calls for d in DIRECTIONS}
        rng = random.Random(0)
        for name, call in calls.items():
            call(0, False)
            times[name, "forward"].clear()
        for round_ in range(rounds):
            for name, direction in rng.sample(list(times), len(times)):
                begin = time.perf_counter()
                calls[name](round_ % 2, direction == "backward")
                times[name, direction].append(time.perf_counter() - begin)
        return times
