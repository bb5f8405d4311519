#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Read from compiled THD RoPE kernels which product of the rotation is rounded first.

    python ci/sass_contraction.py libtransformer_engine.so --label "TE 2.18.0 cu12"
    python ci/sass_contraction.py transformer-engine-cu12==2.18.0 --append TABLE.csv

`x * cos + x_partner * sin` gives other last bits when the compiler fuses the sine product instead
of the cosine product. A library is a shared object, a wheel, or a requirement that pip downloads.

The disassembly of each kernel is followed backwards: from a store, through conversions, to the
addition that made the value; from its operands to the loads they stem from. An element comes from
global memory, an angle from shared memory. TransformerEngine's kernels keep all cosines before all
sines, so a sine's address depends on the parameter `d2`; ours keep (cos, sin) pairs in 16 bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

ORDERS = {
    "cosine_fused": "fma(x, cos, x_partner*sin)",
    "sine_fused": "fma(x_partner, sin, x*cos)",
    "unfused": "unfused",
    "unclear": "unclear",
}
COLUMNS = ["library", "chip", "kernel", "dtype", "variant", "order", *ORDERS, "sincos"]
KERNEL = re.compile(
    r"\d+(?P<kernel>fused_rope_(?:thd_linear_grid_)?(?:forward|backward)_kernel"
    r"|thd_(?:token_linear|legacy_grid)[a-z_]*_kernel)"
    r"I(?P<dtype>f|6__half|13__nv_bfloat16)(?P<variant>(?:L[a-z]\d+E)*)EEv"
)
DTYPES = {"f": "float32", "6__half": "float16", "13__nv_bfloat16": "bfloat16"}
D2_OFFSET = 0x40  # of the parameter `d2` from the first parameter, in all fused_rope kernels
# The first constant of the range reduction that the precise sincosf does and the fast one leaves.
PRECISE_SINCOS = "-1.57079625"

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@(!?)(U?P\w)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
LABEL = re.compile(r"^(\.L_x_\d+|\$\S+):")
TARGET = re.compile(r"`\((\S+?)\)")
REGISTER = re.compile(r"\b(U?R)(\d+)\b")
PREDICATE = re.compile(r"!?(U?P)(\d|T)(?:\.\w+)*$")
PARAMETER = re.compile(r"c\[0x0\]\[(0x[0-9a-f]+)\]")
SHARED_OFFSET = re.compile(r"(-?0x[0-9a-f]+)\]")

COMPARISON = re.compile(r"[A-Z]*SETP2?|U?PLOP3")  # writes predicates only
NO_RESULT = re.compile(
    r"(ST[GSL]?|BRA|EXIT|RET|CALL|B(AR|SSY|SYNC|REAK|MOV)|NOP|WARPSYNC|MEMBAR|RED|R2P)(\.|$)"
)
LOAD = re.compile(r"(LDG|LDS|LDL|LD|LDC|ULDC|LDCU)(\.|$)")
TWO_WORDS = re.compile(r"D[A-Z]+|CS2R$|(U?MOV|U?IADD3?)\.64|U?IMAD\.WIDE|[IF]2F\.F64|F2I\.[SU]64")
# Operations that change the format of a value and not what it stems from.
TRANSPARENT = re.compile(r"(IMAD\.(MOV|U32|SHL)|U?MOV|PRMT|F?SEL|F2FP?|HADD2|SHF|LOP3|R2UR)(\.|$)")

Row = dict[str, str | int]
Fact = tuple[str, bool]  # a predicate and its value
Register = tuple[str, int]  # "R" or "UR", and the number
Leaf = tuple[int, int]  # an instruction and which word of its result


class Instruction:
    """One line of the listing."""

    def __init__(self, guard: Fact | None, opcode: str, operands: list[str]) -> None:
        self.guard, self.opcode, self.operands = guard, opcode, operands
        self.result: Register | None = None
        self.predicates: set[str] = set()  # those it writes
        rest = list(operands)
        if not NO_RESULT.match(opcode):
            # Predicates are written before the register (LOP3) or behind it (a carry).
            take_predicates(rest, self.predicates)
            if not COMPARISON.match(opcode) and rest:
                self.result = next(iter(registers(rest.pop(0))), None)
                take_predicates(rest, self.predicates)
        self.sources = [registers(operand) for operand in rest]
        if ".64" in opcode and not LOAD.match(opcode):
            self.sources += [[(kind, n + 1) for kind, n in some] for some in self.sources]
        self.width = 2 if TWO_WORDS.match(opcode) else 1  # of what it writes, in registers
        if LOAD.match(opcode) or self.name in ("STG", "ST"):
            found = re.search(r"\.(64|128|256)(\.|$)", opcode)
            self.width = int(found[1]) // 32 if found else 1

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]

    def word_of(self, register: Register) -> int | None:
        """Which word of the result goes into a register."""
        kind, number = self.result or ("", 0)
        word = register[1] - number
        return word if kind == register[0] and 0 <= word < self.width else None

    def origins(self, *, low_half: bool) -> list[Register]:
        """The registers read; for the low half of PRMT's result, those that it takes bytes of."""
        operands = self.sources
        if low_half and self.name == "PRMT" and self.operands[2].startswith("0x"):
            selector = int(self.operands[2], 16)
            operands = [self.sources[2 if byte & 4 else 0] for byte in (selector, selector >> 4)]
        return [name for names in operands for name in names]

    def is_zero(self, operand: int) -> bool:
        return self.operands[operand].lstrip("-") == "RZ"

    def targets(self, labels: dict[str, int]) -> list[int]:
        return [labels[name] for name in TARGET.findall(self.operands[-1])]


def registers(operand: str) -> list[Register]:
    return [(kind, int(number)) for kind, number in REGISTER.findall(operand)]


def take_predicates(operands: list[str], into: set[str]) -> None:
    while operands and PREDICATE.match(operands[0]):
        into.add(operands.pop(0))


def opposite(fact: Fact) -> Fact:
    return fact[0], not fact[1]


class Kernel:
    """The listing of one kernel, with the questions about where values come from."""

    def __init__(self, listing: str, *, chip: int, pairs: bool) -> None:
        self.code: list[Instruction] = []
        self.pairs = pairs
        self.d2 = D2_OFFSET + (0x160 if chip < 90 else 0x210 if chip < 100 else 0x380)
        labels: dict[str, int] = {}
        for line in listing.splitlines():
            if found := LABEL.match(line):
                labels[found[1]] = len(self.code)
            elif (found := INSTRUCTION.search(line)) and found[2] not in ("PT", "UPT"):
                guard = (found[2], not found[1]) if found[2] else None
                operands = re.split(r",\s*", found[4]) if found[4] else []
                self.code.append(Instruction(guard, found[3], operands))
        # What may run right before each instruction. A call is stepped over.
        self.before: list[list[int]] = [[] for _ in self.code]
        self._connect(labels)

    def _connect(self, labels: dict[str, int]) -> None:
        barriers: dict[str, list[int]] = {}
        for one in self.code:
            if one.name == "BSSY":
                barriers.setdefault(one.operands[0], []).extend(one.targets(labels))
        for index, one in enumerate(self.code):
            jumps = one.opcode == "BRA" and len(one.operands) == 1
            follows = one.guard is not None or not (jumps or one.name in ("EXIT", "RET"))
            targets = one.targets(labels) if one.name in ("BRA", "WARPSYNC") else []
            if one.name == "BSYNC":
                # Goes on where the matching BSSY says: behind itself, mostly.
                targets = barriers.get(one.operands[0], [])
                targets = [index + 1] if index + 1 in targets else targets
                follows = False
            for target in targets + [index + 1] * follows:
                if target < len(self.code):
                    self.before[target].append(index)

    def definitions(self, index: int, register: Register) -> set[Leaf]:
        """Which instructions may have written what `index` reads, and which word of their result.

        What is known of predicates on the way back, from guards, rules out some of the writers.
        """
        stack = [(index, frozenset(filter(None, [self.code[index].guard])))]
        seen = set(stack)
        found: set[Leaf] = set()
        while stack:
            at, facts = stack.pop()
            for previous in self.before[at]:
                one = self.code[previous]
                known = {fact for fact in facts if fact[0] not in one.predicates}
                if one.name in ("R2P", "CALL"):
                    known.clear()
                word = one.word_of(register)
                if word is not None and (one.guard is None or opposite(one.guard) not in known):
                    found.add((previous, word))
                    if one.guard is None or one.guard in known:
                        continue
                    known.add(opposite(one.guard))
                state = (previous, frozenset(known))
                if state not in seen:
                    seen.add(state)
                    stack.append(state)
        return found

    def slice(self, index: int, names: Sequence[Register]) -> set[Leaf]:
        """All instructions that the registers `names` at `index` are made by, back to loads."""
        stack = [(index, name) for name in names]
        seen: set[Leaf] = set()
        while stack:
            for leaf in self.definitions(*stack.pop()) - seen:
                seen.add(leaf)
                one = self.code[leaf[0]]
                if not LOAD.match(one.opcode):
                    stack += [(leaf[0], name) for name in one.origins(low_half=False)]
        return seen

    def angle(self, leaf: Leaf) -> str:
        """What a load from shared memory gives: "cos" or "sin"."""
        one = self.code[leaf[0]]
        if self.pairs:
            offset = SHARED_OFFSET.search(one.operands[-1])
            return "sin" if (leaf[1] + (int(offset[1], 16) // 4 if offset else 0)) % 2 else "cos"
        address = self.slice(leaf[0], registers(one.operands[-1]))
        return "sin" if any(map(self.reads_d2, address)) else "cos"

    def reads_d2(self, leaf: Leaf) -> bool:
        one = self.code[leaf[0]]
        place = self.d2 - 4 * leaf[1] * bool(LOAD.match(one.opcode))
        return any(int(offset, 16) == place for offset in PARAMETER.findall(str(one.operands)))

    def roles(self, index: int, names: Sequence[Register]) -> set[str]:
        """What registers stem from: elements ("x"), cosines ("cos"), sines ("sin")."""
        leaves = [(leaf, self.code[leaf[0]].name) for leaf in self.slice(index, names)]
        found = {self.angle(leaf) for leaf, name in leaves if name == "LDS"}
        return found | {"x" for _, name in leaves if name in ("LDG", "LD")}

    def arithmetic(self, index: int, names: Sequence[Register]) -> set[int]:
        """The floating-point operations that are converted to the registers `names` at `index`."""
        stack = [(index, name) for name in names]
        seen: set[int] = set()
        found = set()
        while stack:
            user, name = stack.pop()
            low_half = ".U16" in self.code[user].opcode
            for at in {at for at, _ in self.definitions(user, name)} - seen:
                seen.add(at)
                one = self.code[at]
                negates = one.name == "FADD" and (one.is_zero(1) or one.is_zero(2))
                if TRANSPARENT.match(one.opcode) or negates:
                    stack += [(at, name) for name in one.origins(low_half=low_half)]
                elif one.name in ("FADD", "FFMA", "FMUL"):
                    found.add(at)
        return found

    def factors(self, index: int) -> str:
        """Which angle an element is multiplied by, "cos" or "sin"; "?" for another product."""
        pair = [self.roles(index, names) for names in self.code[index].sources[:2]]
        return next((angle for angle in ("cos", "sin") if {angle} in pair and {"x"} in pair), "?")

    def product(self, index: int, names: Sequence[Register]) -> str:
        """The same for registers that hold a rounded product."""
        found = set()
        for at in self.arithmetic(index, names):
            one = self.code[at]
            rounded = one.name == "FMUL" or (one.name == "FFMA" and one.is_zero(3))
            found.add(self.factors(at) if rounded else "?")
        return found.pop() if len(found) == 1 else "?"

    def order(self, index: int) -> str:
        one = self.code[index]
        if one.name == "FFMA":
            both = self.factors(index) + self.product(index, one.sources[2])
            return {"cossin": "cosine_fused", "sincos": "sine_fused"}.get(both, "unclear")
        terms = {self.product(index, names) for names in one.sources[:2]}
        return "unfused" if one.name == "FADD" and terms == {"cos", "sin"} else "unclear"

    def orders(self) -> Counter[str]:
        """Count the operations that make stored, rotated values, by the order they have."""
        results: set[int] = set()
        for index, one in enumerate(self.code):
            if one.name in ("STG", "ST"):
                words = range(one.width)
                stored = [(kind, n + i) for kind, n in one.sources[-1] for i in words]
                results |= self.arithmetic(index, stored)
        inputs = {index: self.code[index].origins(low_half=False) for index in results}
        return Counter(self.order(i) for i, names in inputs.items() if self.roles(i, names) - {"x"})

    def sincos(self) -> str:
        if any(re.match(r"MUFU\.(SIN|COS)", one.opcode) for one in self.code):
            return "fast"
        precise = any(PRECISE_SINCOS in operand for one in self.code for operand in one.operands)
        return "precise" if precise else "none"


def find_tool(name: str) -> str | None:
    """A tool of the CUDA toolkit, on PATH or in a wheel such as nvidia-cuda-nvdisasm."""
    wheels = (path for root in sys.path for path in Path(root).glob(f"nvidia/*/bin/{name}"))
    return shutil.which(name) or next(map(str, wheels), None)


def call(*command: str | Path, cwd: Path | None = None) -> str:
    return subprocess.run(command, cwd=cwd, stdout=subprocess.PIPE, text=True, check=True).stdout


def disassemble(cubin: Path, tools: Sequence[str]) -> str:
    """The listing from the first disassembler that knows the chip: newer ones drop old chips."""
    for tool in tools[:-1]:
        with contextlib.suppress(subprocess.CalledProcessError):
            return call(tool, "-c", cubin)
    return call(tools[-1], "-c", cubin)


def analyse_listing(listing: str, chip: str) -> Iterator[Row]:
    """One row for each kernel in what `nvdisasm -c` printed."""
    for section in re.split(r"^//-+ \.text\.", listing, flags=re.MULTILINE)[1:]:
        if not (found := KERNEL.search(section.split(maxsplit=1)[0])):
            continue
        ours = found["kernel"].startswith("thd_")
        kernel = Kernel(section, chip=int(re.sub(r"\D", "", chip)), pairs=ours)
        counts = kernel.orders()
        orders = [text for name, text in ORDERS.items() if counts[name]] or ["unclear"]
        yield {
            "chip": chip,
            "kernel": found["kernel"],
            "dtype": DTYPES[found["dtype"]],
            "variant": " ".join(re.findall(r"L[a-z](\d+)E", found["variant"])),
            "order": orders[0] if len(orders) == 1 else "mixed",
            **{name: counts[name] for name in ORDERS},
            "sincos": kernel.sincos(),
        }


def analyse(library: Path, cuobjdump: str, disassemblers: Sequence[str]) -> tuple[list[Row], str]:
    """The rows of a library, and for which chips it holds PTX of these kernels."""
    rows: list[Row] = []
    virtual = set()
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("-xelf", "-xptx"):
            call(cuobjdump, kind, "all", library.resolve(), cwd=Path(folder))
        for path in Path(folder).iterdir():
            if not KERNEL.search(path.read_bytes().decode("latin-1")):
                continue
            chip = path.name.split(".")[-2]
            if path.suffix == ".cubin":
                rows += analyse_listing(disassemble(path, disassemblers), chip)
            elif path.suffix == ".ptx":
                virtual.add(chip)
    rows.sort(key=lambda row: (int(re.sub(r"\D", "", str(row["chip"]))), *map(str, row.values())))
    return rows, " ".join(sorted(virtual)) or "none"


def shared_object(library: str, folder: Path) -> Path:
    """The library's file; a requirement such as NAME==VERSION is downloaded, a wheel unpacked."""
    path = Path(library)
    if "==" in library:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        call(*pip, "--only-binary", ":all:", "--dest", folder, library)
        (path,) = folder.glob("*.whl")
    if path.suffix != ".whl":
        return path
    with zipfile.ZipFile(path) as wheel:
        wanted = re.compile(r"/(libtransformer_engine|_native\.[\w.-]+)\.so$")
        (member,) = filter(wanted.search, wheel.namelist())
        return Path(wheel.extract(member, folder))


def append(table: Path, facts: dict[str, str], rows: list[Row]) -> None:
    """Write rows into a table in place of those that it has of the same libraries."""
    lines = table.read_text(encoding="utf-8").splitlines() if table.exists() else []
    old_facts = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# "))
    old_rows = list(csv.DictReader(line for line in lines if not line.startswith("# ")))
    replaced = {row["library"] for row in rows}
    with table.open("w", encoding="utf-8", newline="") as file:
        file.writelines(f"# {name}: {text}\n" for name, text in {**old_facts, **facts}.items())
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(row for row in old_rows if row["library"] not in replaced)
        writer.writerows(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "binary", metavar="LIBRARY", help="shared object, wheel, or NAME==VERSION to download"
    )
    parser.add_argument("--label", help="name of the library in the table (default: as given)")
    parser.add_argument("--append", type=Path, metavar="CSV", help="table to write the rows into")
    parser.add_argument("--cuobjdump", default=find_tool("cuobjdump"))
    parser.add_argument("--nvdisasm", action="append", help="repeat it with one for older chips")
    arguments = parser.parse_args()
    tools = arguments.nvdisasm or [find_tool("nvdisasm")]
    if None in (arguments.cuobjdump, *tools):
        parser.error("needs cuobjdump and nvdisasm: pip install nvidia-cuda-{cuobjdump,nvdisasm}")
    with tempfile.TemporaryDirectory() as folder:
        path = shared_object(arguments.binary, Path(folder))
        rows, ptx = analyse(path, arguments.cuobjdump, tools)
    label = arguments.label or arguments.binary
    for row in rows:
        row["library"] = label
        print(*(row[name] for name in COLUMNS), sep=",")
    if arguments.append:
        versions = [re.findall(r"V(\d[\d.]+)", call(tool, "--version"))[0] for tool in tools]
        command = "python ci/sass_contraction.py LIBRARY --label NAME --append TABLE"
        facts = {"command": command, "nvdisasm": ", ".join(versions), f"PTX in {label}": ptx}
        append(arguments.append, facts, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
