# SPDX-License-Identifier: Apache-2.0
"""Time THD RoPE, forward and backward, on each path, beside a copy of the same tensors.

Scope: the kernels alone, on one GPU, for packed batches of one total length that are cut into
more and more sequences. The paths take turns within each round, and medians are shown.
"""

import argparse
import itertools
import os
import statistics

import torch
import transformer_engine.pytorch  # noqa: F401  # loads the common library
import transformer_engine_torch as tex

PATH_VARIABLE = "NVTE_FUSED_ROPE_THD_TOKEN_LINEAR"
PATHS = {"0": "without", "1": "token-linear", None: "automatic"}


def even_boundaries(tokens, sequences, multiple):
    """Cut `tokens` rows into sequences of about one length, each a multiple of `multiple`."""
    units = tokens // multiple
    ends = [multiple * (units * i // sequences) for i in range(sequences + 1)]
    return torch.tensor(ends, dtype=torch.int32, device="cuda")


def timed(function, calls):
    """Return milliseconds a call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def set_path(value):
    """Force a path, or leave the choice with None."""
    if value is None:
        os.environ.pop(PATH_VARIABLE, None)
    else:
        os.environ[PATH_VARIABLE] = value


def measure(heads, sequences, options):
    """Return the median time of each path, and of a copy."""
    cu_seqlens = even_boundaries(options.tokens * options.cp_size, sequences, 2 * options.cp_size)
    t = torch.randn(options.tokens, heads, options.dim, device="cuda", dtype=torch.bfloat16)
    freqs = torch.randn(options.table, 1, 1, options.dim, device="cuda")
    rest = (freqs, None, tex.NVTE_QKV_Format.NVTE_THD, False, cu_seqlens, options.cp_size, 0)
    target = torch.empty_like(t)

    def rotate():
        tex.fused_rope_forward(t, *rest)
        tex.fused_rope_backward(t, *rest)

    def copy():
        target.copy_(t)
        target.copy_(t)

    times = {name: [] for name in (*PATHS.values(), "copy")}
    for _ in range(options.rounds + 1):  # the first warms up
        for value, name in PATHS.items():
            set_path(value)
            times[name].append(timed(rotate, options.calls))
        times["copy"].append(timed(copy, options.calls))
    set_path(None)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def main():
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, nargs="+", default=[32, 8, 1])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 32, 256, 2401])
    parser.add_argument("--tokens", type=int, default=65536, help="rows of the local tensor")
    parser.add_argument("--table", type=int, default=65536, help="rows of the angle table")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--cp-size", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--calls", type=int, default=3, help="calls in a round")
    options = parser.parse_args()
    longest = -(-options.tokens * options.cp_size // min(options.sequences))
    if longest > options.table:
        parser.error(f"a sequence of {longest} tokens needs --table {longest} or more")
    names = (*PATHS.values(), "copy")
    print(f"{torch.cuda.get_device_name()}, bfloat16, forward + backward, ms a pair")
    print(f"{'heads':>6}{'sequences':>11}" + "".join(f"{name:>14}" for name in names))
    for heads, sequences in itertools.product(options.heads, options.sequences):
        times = measure(heads, sequences, options)
        row = "".join(f"{times[name]:14.4f}" for name in names)
        print(f"{heads:>6}{sequences:>11}{row}")


if __name__ == "__main__":
    main()
