#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Hold the compiled kernels to ci/kernel_budget.csv, and to what their speed and bits rest on.

    python ci/kernel_budget.py            # checks the installed module; needs no GPU
    python ci/kernel_budget.py --update   # after a change that is worth what it costs

The budget has registers, stack, static shared memory, spills and split 16-byte stores of each
kernel, and the size of the module, as one nvcc made them. A module of the same nvcc release must
stay within it. Another release allocates registers in its own way: its limits are `ceilings()`.

Whatever the compiler, each kernel must fuse the product with the cosine, and the vector kernels
must load and store their units by 16 bytes and issue a token's first loads before the search for
its sequence, which then hides behind them (`fast_body_problems()`).
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import re
import sys
import tempfile
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sass import DTYPES, KERNEL, SPILL_MARK, call, disassemble, extract, find_tool, kernels, variant
from sass_contraction import Kernel

BUDGET = Path(__file__).parent / "kernel_budget.csv"
NAMES = ["chip", "kernel", "dtype", "pairing", "direction"]
FIGURES = ["registers", "stack", "shared", "spills", "split_stores"]
SIZE_LIMIT = 20_000_000  # bytes of the wheel, which holds the packed module and little else
# The host's code differs between compilers, Pythons and releases of nanobind; it is about 3% of the
# module and 10% of the packed one.
SIZE_ALLOWANCE = 1.05
# 64 registers let 1,024 threads run on an SM, the number that the launch bounds ask for.
REGISTER_CEILING = 64

Key = tuple[str, ...]  # the values of NAMES
# By FIGURES. A spill is an instruction that moves a register to the stack or back.
Usage = dict[str, int]
# What no kernel should have at all; those that the budget allows are known flaws.
FLAWS = ["spills", "split_stores"]

RESOURCES = re.compile(
    r"Function (?P<symbol>\S+):\s+REG:(?P<registers>\d+) STACK:(?P<stack>\d+) "
    r"SHARED:(?P<shared>\d+)"
)
NVCC = re.compile(rb"Cuda compilation tools, release (\d+\.\d+)")


@dataclass
class Build:
    """What a module was found to be, or what the budget says that it may be."""

    nvcc: str = "unknown"
    sizes: dict[str, int] = field(default_factory=dict)
    chips: list[str] = field(default_factory=list)
    usage: dict[Key, Usage] = field(default_factory=dict)


def chip_number(chip: str) -> int:
    return int(re.sub(r"\D", "", chip))


def key_of(symbol: re.Match[str], chip: str) -> Key:
    """A kernel by the words of the sources: `narrow2` is the narrow one with 2 heads in flight."""
    interleaved, *shape = variant(symbol)
    name = re.sub(r"^thd_(token_linear_)?|_?kernel$", "", symbol["kernel"]) or "scalar"
    direction = "both"
    if not name.startswith("fused"):
        direction = "backward" if shape.pop(0) == "1" else "forward"
    pairing = "interleaved" if interleaved == "1" else "half-split"
    return chip, name + "".join(shape), DTYPES[symbol["dtype"]], pairing, direction


def vectors_in_flight(key: Key) -> int:
    """How many 16-byte vectors a lane of a vector kernel loads at a time; 0 for other kernels."""
    _, name, _, pairing, _ = key
    if narrow := re.fullmatch(r"(?:fused_qkv_)?narrow_?(\d*)", name):
        return int(narrow[1] or 2) * (1 if pairing == "interleaved" else 2)
    if re.fullmatch(r"(fused_qkv_)?wide_?\d+", name):
        return 4
    if name not in ("scalar", "legacy_grid"):
        raise SystemExit(f"unknown kernel {name}: say in vectors_in_flight() what it has in flight")
    return 0


def fast_body_problems(kernel: Kernel, rotated: set[int], vectors: int) -> Iterator[str]:
    """What a vector kernel lacks that has as many 16-byte vectors in flight."""
    stores = [i for i in kernel.stores if kernel.code[i].width == 4]
    if not any(kernel.arithmetic(i, kernel.stored(i)) & rotated for i in stores):
        yield "stores no rotated values by 16 bytes (STG.E.128)"

    # The unit loads are the 16-byte ones after which a vote may run. The search is the votes and
    # the loads that they wait for; a unit load behind one of those waits for the search as well.
    votes = [i for i, one in enumerate(kernel.code) if one.name.startswith("VOTE")]
    ahead = sorted(i for i in kernel.reaching(votes) if kernel.code[i].name == "LDG")
    units = [i for i in ahead if kernel.code[i].width == 4]
    search = {*votes, *ahead} - {*units}
    first = [i for i in units if not search & kernel.reaching([i])]
    if len(first) < vectors:
        yield (
            f"issues {len(first)} of {vectors} unit loads (LDG.E.128) before the search; the "
            "__syncwarp() behind them in the source keeps the compiler from moving them"
        )


def listing_problems(listing: str, chip: str) -> Iterator[str]:
    """What is wrong with the kernels that `nvdisasm -c` printed."""
    for symbol, text in kernels(listing):
        key = key_of(symbol, chip)
        kernel = Kernel(text, chip=chip_number(chip), pairs=True)
        rotations = kernel.rotations()
        orders = sorted({*rotations.values()}) or ["no"]
        problems = [f"has {', '.join(orders)} rotations"] if orders != ["cosine_fused"] else []
        if vectors := vectors_in_flight(key):
            problems += fast_body_problems(kernel, {*rotations}, vectors)
        yield from (f"{' '.join(key)}: {problem}" for problem in problems)


def split_stores(key: Key, text: str) -> int:
    """Stores under 16 bytes in a vector kernel, beyond those that its source has.

    A narrow kernel has two: it rotates a table whose halves differ one pair at a time. That with 2
    heads in flight has five more, which record a fault; the others call a function for it.
    """
    if not vectors_in_flight(key):
        return 0
    meant = 7 if key[1] == "narrow2" else 2 if "narrow" in key[1] else 0
    small = [one for one in re.findall(r"\bSTG\.\S+", text) if not re.search(r"\.(128|256)", one)]
    return max(0, len(small) - meant)


def usage_of(cubin: Path, listing: str, chip: str) -> dict[Key, Usage]:
    """Resources of the kernels of a cubin, as ptxas noted them there, and what the listing shows.

    Spills are counted in the listing: the note has only the stack, which also holds an array of the
    precise sincosf.
    """
    usage: dict[Key, Usage] = {}
    for symbol, text in kernels(listing):
        key = key_of(symbol, chip)
        spills = text.count(SPILL_MARK)
        usage[key] = {"spills": spills, "split_stores": split_stores(key, text)}
    for function in RESOURCES.finditer(call(str(find_tool("cuobjdump")), "-res-usage", cubin)):
        if symbol := KERNEL.search(function["symbol"]):
            for name in ("registers", "stack", "shared"):
                usage[key_of(symbol, chip)][name] = int(function[name])
    return usage


def read_module(module: Path, chips: Collection[str] | None = None) -> tuple[Build, list[str]]:
    """What a module is, and what is wrong with its code; only sizes and names for other `chips`."""
    data = module.read_bytes()
    build = Build(sizes={"module": len(data), "packed": len(zlib.compress(data))})
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        for cubin, chip in extract(module, str(find_tool("cuobjdump")), Path(folder), "elf"):
            build.chips.append(chip)
            if found := NVCC.search(cubin.read_bytes()):
                build.nvcc = found[1].decode()
            if chips is None or chip in chips:
                listing = disassemble(cubin, [str(find_tool("nvdisasm"))])
                build.usage |= usage_of(cubin, listing, chip)
                problems += listing_problems(listing, chip)
    build.chips.sort(key=chip_number)
    return build, problems


def ceilings(limit: Usage) -> Usage:
    """The limits for another nvcc, given those of the budget's.

    Registers within what the launch bounds ask for, and no flaw in a kernel that has none. Stack
    and shared memory are left out: what the compiler reserves in them differs between releases.
    """
    ceiling = {"registers": max(REGISTER_CEILING, limit["registers"])}
    return ceiling | {name: 0 for name in FLAWS if limit[name] == 0}


def compare(build: Build, budget: Build) -> Iterator[str]:
    """Where a build goes beyond the budget. Chips that the budget lacks are not looked at."""
    same = build.nvcc == budget.nvcc
    chips = {key[0] for key in build.usage} & {key[0] for key in budget.usage}
    known = {key for key in budget.usage if key[0] in chips}
    for key in sorted(known ^ {key for key in build.usage if key[0] in chips}):
        missing = "the budget" if key in build.usage else "the module"
        yield f"{' '.join(key)}: not in {missing}; python ci/kernel_budget.py --update"
    for key in sorted(known & {*build.usage}):
        limit = budget.usage[key] if same else ceilings(budget.usage[key])
        for name, most in limit.items():
            if build.usage[key][name] > most:
                found = f"{build.usage[key][name]} (nvcc {build.nvcc})"
                yield f"{' '.join(key)}: {name} {found}, more than {most} (nvcc {budget.nvcc})"


def compare_sizes(build: Build, budget: Build) -> Iterator[str]:
    """Where a module is larger than it may be: than the budget's, if it has the same chips."""
    for name, size in build.sizes.items():
        most = SIZE_LIMIT if name == "packed" else size
        if build.nvcc == budget.nvcc and build.chips == budget.chips:
            most = min(most, int(budget.sizes[name] * SIZE_ALLOWANCE))
        if size > most:
            yield f"{name}: {size:,} bytes, more than {most:,}"


def read_budget(path: Path = BUDGET) -> Build:
    lines = path.read_text(encoding="utf-8").splitlines()
    facts = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# "))
    sizes = {name: int(facts[name]) for name in ("module", "packed")}
    budget = Build(facts["nvcc"], sizes, facts["chips"].split())
    for row in csv.DictReader(line for line in lines if not line.startswith("# ")):
        key = tuple(row[name] for name in NAMES)
        budget.usage[key] = {name: int(row[name]) for name in FIGURES}
    return budget


def write_budget(build: Build, path: Path = BUDGET) -> None:
    facts = {"command": "python ci/kernel_budget.py --update", "nvcc": build.nvcc}
    facts |= {"chips": " ".join(build.chips), **build.sizes}
    with path.open("w", encoding="utf-8", newline="") as file:
        file.writelines(f"# {name}: {text}\n" for name, text in facts.items())
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(NAMES + FIGURES)
        for key in sorted(build.usage, key=lambda key: (chip_number(key[0]), key)):
            writer.writerow([*key, *(build.usage[key][name] for name in FIGURES)])


def refusals(build: Build, budget: Build, *, accept_flaws: bool) -> Iterator[str]:
    """Why a build must not become the budget."""
    if lost := [chip for chip in budget.chips if chip not in build.chips]:
        yield f"no code for {', '.join(lost)}; build with TE_OVERLAY_CUDA_ARCHS unset"
    for key, usage in build.usage.items() if not accept_flaws else ():
        for name in FLAWS:
            before = budget.usage[key][name] if key in budget.usage else 0
            if usage[name] > before:
                yield f"{' '.join(key)}: {usage[name]} {name}, {before} before; --accept-flaws"


def installed_module() -> Path | None:
    spec = importlib.util.find_spec("transformer_engine_overlay._native")
    return Path(spec.origin) if spec and spec.origin else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("module", nargs="?", type=Path, help="(default: the installed one)")
    parser.add_argument("--update", action="store_true", help="write the budget")
    parser.add_argument(
        "--accept-flaws", action="store_true", help="with --update: more spills, split stores"
    )
    arguments = parser.parse_args()
    if None in (find_tool("cuobjdump"), find_tool("nvdisasm")):
        parser.error("needs cuobjdump and nvdisasm: pip install nvidia-cuda-{cuobjdump,nvdisasm}")
    module = arguments.module or installed_module()
    if module is None:
        parser.error("transformer_engine_overlay is not installed; name a module")
    build, problems = read_module(module)
    if not build.usage:
        parser.error(f"{module} has no CUDA code")
    budget = read_budget() if BUDGET.exists() else Build()
    if arguments.update:
        problems += refusals(build, budget, accept_flaws=arguments.accept_flaws)
    else:
        problems += [*compare(build, budget), *compare_sizes(build, budget)]
    for problem in problems:
        print(problem)
    if arguments.update and not problems:
        write_budget(build)
    chips = f"{len(build.usage)} kernels for {' '.join(build.chips)}"
    sizes = ", ".join(f"{name} {size:,} bytes" for name, size in build.sizes.items())
    print(f"{chips}, nvcc {build.nvcc}, {sizes}: {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
