# SPDX-License-Identifier: Apache-2.0
"""The main job: both paths over realistic packed batches, bit for bit and against the oracle."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from transformer_engine_overlay.cases import Batch, Case, draw_case, make_batch
from transformer_engine_overlay.environment import forced_path
from transformer_engine_overlay.packing import merge_ranks
from transformer_engine_overlay.reference import rope_thd_reference
from transformer_engine_overlay.thd import path_counts, rotate_thd

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
CP_SIZES = (1, 2, 4, 8)

# rtol, atol of TE's own RoPE tests
TOLERANCES = {
    torch.float32: (1.3e-6, 1e-5),
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
}

# value of the environment variable that forces the path, name of the path's counter
PATHS = {"legacy_grid": "0", "token_linear": "1"}

DIRECTIONS = ("forward", "backward")


@dataclass
class PathTally:
    """Blocks launched and seconds spent by one path."""

    blocks: int = 0
    seconds: float = 0.0


@dataclass
class Row:
    """A line of the report: all cases of a dtype at a cp_size. A check is a case at a rank.

    `paths` holds a tally for each thing that is compared.
    """

    dtype: str
    cp_size: int
    paths: dict[str, PathTally]
    passed: int = 0
    failed: int = 0

    def to_json(self) -> dict[str, object]:
        """Return the row as plain data, an entry for each path."""
        paths = {path: asdict(tally) for path, tally in self.paths.items()}
        return {
            "dtype": self.dtype,
            "cp_size": self.cp_size,
            **paths,
            "passed": self.passed,
            "failed": self.failed,
        }


@dataclass(frozen=True)
class Failure:
    """A case that did not hold at a rank, and what was seen."""

    case: Case
    cp_rank: int
    what: str


@dataclass(frozen=True)
class Comparison:
    """What a run compares.

    Attributes
    ----------
    providers : tuple of str
        Who computes; each has a tally in a row.
    check_case : callable
        Yields what does not hold of a case, and adds to the tallies of its row.
    """

    providers: tuple[str, ...]
    check_case: Callable[[Batch, Row], Iterator[Failure]]


@dataclass
class Report:
    """Outcome of a run."""

    rows: list[Row]
    failures: list[Failure]

    @property
    def passed(self) -> int:
        """Number of checks that held."""
        return sum(row.passed for row in self.rows)

    @property
    def failed(self) -> int:
        """Number of checks that did not hold."""
        return sum(row.failed for row in self.rows)

    def smallest_failure(self) -> Failure:
        """Return the failure with the fewest elements, the easiest to look at."""
        return min(self.failures, key=lambda failure: failure.case.elements)

    def to_json(self) -> dict[str, object]:
        """Return the report as plain data."""
        failures = [
            {
                "case": f.case.index,
                "dtype": dtype_name(f.case.dtype),
                "cp_size": f.case.cp_size,
                "cp_rank": f.cp_rank,
                "traits": f.case.traits(),
                "what": f.what,
            }
            for f in self.failures
        ]
        return {
            "passed": self.passed,
            "failed": self.failed,
            "rows": [row.to_json() for row in self.rows],
            "failures": failures,
        }


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name without the module: float32."""
    return str(dtype).removeprefix("torch.")


def run(
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    cp_sizes: Sequence[int],
    case_indices: Sequence[int],
    seed: int,
    tokens: int,
    comparison: Comparison,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Report:
    """Run every case at every rank and compare.

    Parameters
    ----------
    device : torch.device
        Where to run.
    dtypes, cp_sizes, case_indices : sequences
        What to run: the product of the three.
    seed : int
        What the cases are drawn from.
    tokens : int
        Tokens of a global batch, about.
    comparison : Comparison
        What is compared.
    on_progress : callable
        Called with a word on what is next, once for each case.

    Returns
    -------
    Report
        A mismatch is a `Failure` in it, not an exception.
    """
    report = Report([], [])
    for dtype in dtypes:
        for cp_size in cp_sizes:
            row = Row(dtype_name(dtype), cp_size, {p: PathTally() for p in comparison.providers})
            report.rows.append(row)
            for index in case_indices:
                on_progress(f"{row.dtype}, cp_size {cp_size}")
                case = draw_case(seed, index, dtype, cp_size, tokens)
                failures = list(comparison.check_case(make_batch(case, device), row))
                report.failures += failures
                row.failed += len({failure.cp_rank for failure in failures})
            row.passed = len(case_indices) * cp_size - row.failed
    return report


def check_paths(batch: Batch, row: Row) -> Iterator[Failure]:
    """Yield what does not hold of the two paths: at each rank, and of all ranks put together."""
    case = batch.case
    outputs: dict[str, list[torch.Tensor]] = {direction: [] for direction in DIRECTIONS}
    for cp_rank in range(case.cp_size):
        expected = _reference(batch, cp_rank)
        for direction in DIRECTIONS:
            results = {path: _run_path(batch, cp_rank, direction, path, row) for path in PATHS}
            outputs[direction].append(results["token_linear"])
            if not same_bits(results["legacy_grid"], results["token_linear"]):
                yield Failure(case, cp_rank, f"{direction}: the two paths differ in a bit")
            problem = _outside_tolerance(results["token_linear"], expected[direction])
            if problem:
                yield Failure(case, cp_rank, f"{direction}: {problem}")
    for direction in DIRECTIONS:
        with forced_path(PATHS["token_linear"]):
            whole = _rotate(batch, batch.t, batch.grad_output, 1, 0, direction)
        merged = merge_ranks(outputs[direction], batch.cu_seqlens)
        for cp_rank in range(case.cp_size):
            if not same_bits(batch.local(merged, cp_rank), batch.local(whole, cp_rank)):
                what = f"{direction}: differs from cp_size 1 in a bit"
                yield Failure(case, cp_rank, what)


BOTH_PATHS = Comparison(tuple(PATHS), check_paths)


def _run_path(batch: Batch, cp_rank: int, direction: str, path: str, row: Row) -> torch.Tensor:
    """Run one direction with the path forced, prove that the path ran, and add to the tally."""
    t, grad_output = batch.local(batch.t, cp_rank), batch.local(batch.grad_output, cp_rank)
    before = path_counts()
    with forced_path(PATHS[path]):
        result, seconds = timed(
            lambda: _rotate(batch, t, grad_output, batch.case.cp_size, cp_rank, direction), t.device
        )
    after = path_counts()
    calls = {p: after[p]["calls"] - before[p]["calls"] for p in PATHS}
    if calls != {p: int(p == path) for p in PATHS}:
        raise RuntimeError(f"{path} was forced, but the calls counted were {calls}")
    row.paths[path].blocks += after[path]["blocks"] - before[path]["blocks"]
    row.paths[path].seconds += seconds
    return result


def _rotate(
    batch: Batch,
    t: torch.Tensor,
    grad_output: torch.Tensor,
    cp_size: int,
    cp_rank: int,
    direction: str,
) -> torch.Tensor:
    backward = direction == "backward"
    return rotate_thd(
        grad_output if backward else t,
        batch.freqs,
        batch.cu_seqlens,
        batch.start_positions,
        batch.case.interleaved,
        cp_size,
        cp_rank,
        backward,
    )


def _reference(batch: Batch, cp_rank: int) -> dict[str, torch.Tensor]:
    """Return the oracle's output and, through autograd, its gradient, by direction."""
    t = batch.local(batch.t, cp_rank).double().requires_grad_()
    output = rope_thd_reference(
        t,
        batch.freqs,
        batch.cu_seqlens,
        start_positions=batch.start_positions,
        interleaved=batch.case.interleaved,
        cp_size=batch.case.cp_size,
        cp_rank=cp_rank,
    )
    grad_output = batch.local(batch.grad_output, cp_rank).double()
    # Tail rows are constants in the oracle, and NaN times zero is NaN.
    (grad,) = torch.autograd.grad(output, t, grad_output.nan_to_num())
    return {"forward": output.detach(), "backward": grad}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare bits, so that NaN equals itself and the two zeros differ."""
    words = torch.int32 if a.element_size() == 4 else torch.int16
    return torch.equal(a.contiguous().view(words), b.contiguous().view(words))


def _outside_tolerance(actual: torch.Tensor, expected: torch.Tensor) -> str:
    """Say where and by how much `actual` misses the oracle most, or return an empty string."""
    rtol, atol = TOLERANCES[actual.dtype]
    excess = (actual.double() - expected).abs() - (atol + rtol * expected.abs())
    bad = ~(excess <= 0)  # NaN is bad too
    if not bad.any():
        return ""
    token, head, column = torch.unravel_index(
        excess.nan_to_num(float("inf")).argmax(), excess.shape
    )
    index = (int(token), int(head), int(column))
    return (
        f"{int(bad.sum())} elements outside of the tolerance, the worst at {list(index)}: "
        f"{actual[index].item():.9g} instead of {expected[index].item():.9g}"
    )


def timed(function: Callable[[], torch.Tensor], device: torch.device) -> tuple[torch.Tensor, float]:
    """Return a function's result and the seconds it took, synchronised before and after."""
    _synchronize(device)
    begin = time.perf_counter()
    result = function()
    _synchronize(device)
    return result, time.perf_counter() - begin


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
