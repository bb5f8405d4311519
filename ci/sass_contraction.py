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
sines, so a sine's address depends on the parameter `d2`; ours keep (cos, sin) pairs in 16 bytes, or
in registers. There sincosf itself tells them apart: it chooses the polynomial by the quadrant.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from sass import (
    ALL_BYTES,
    DTYPES,
    LOAD,
    PREDICATE,
    Leaf,
    Listing,
    Register,
    call,
    disassemble,
    extract,
    find_tool,
    kernels,
    registers,
    variant,
)

ORDERS = {
    "cosine_fused": "fma(x, cos, x_partner*sin)",
    "sine_fused": "fma(x_partner, sin, x*cos)",
    "unfused": "unfused",
    "unclear": "unclear",
}
COLUMNS = ["library", "chip", "kernel", "dtype", "variant", "order", *ORDERS, "sincos"]
D2_OFFSET = 0x40  # of the parameter `d2` from the first parameter, in all fused_rope kernels
# The first constant of the range reduction that the precise sincosf does and the fast one leaves.
PRECISE_SINCOS = "-1.57079625"
# A coefficient next to the last step of each of sincosf's polynomials.
POLYNOMIALS = {"-0.49999997": "cos", "-0.16666662": "sin"}
FAST_SINCOS = {"MUFU.COS": "cos", "MUFU.SIN": "sin"}
PARAMETER = re.compile(r"c\[0x0\]\[(0x[0-9a-f]+)\]")
SHARED_OFFSET = re.compile(r"(-?0x[0-9a-f]+)\]")
# Operations that change the format of a value and not what it stems from.
TRANSPARENT = re.compile(
    r"(IMAD\.(MOV|U32|SHL)|U?MOV|PRMT|F?SEL|F2FP?|HADD2|SHF|LOP3|R2UR|LDL|STL)(\.|$)"
)

Row = dict[str, str | int]


class Kernel(Listing):
    """The listing of one kernel, with the questions about its rotations."""

    def __init__(self, listing: str, *, chip: int, pairs: bool) -> None:
        super().__init__(listing)
        self.pairs = pairs
        self.d2 = D2_OFFSET + (0x160 if chip < 90 else 0x210 if chip < 100 else 0x380)
        self.swaps: dict[int, str | None] = {}
        self.results: set[int] = set()  # the operations that make stored values
        stores = [i for i, one in enumerate(self.code) if one.name in ("STG", "ST")]
        self.stores = [i for i in stores if not (pairs and self.copies(i))]

    def slice(self, index: int, names: Sequence[Register]) -> set[Leaf]:
        """All instructions that the registers `names` at `index` are made by.

        Back to loads, to sines and cosines in registers, and to rotated values: where a loop
        rotates in place, a value seems to stem from the one that the round before stored.
        """
        stack = [(index, name, ALL_BYTES) for name in names]
        seen = set(stack)
        found: set[Leaf] = set()
        while stack:
            user, name, needed = stack.pop()
            for at, word in self.definitions(user, name):
                found.add((at, word))
                one = self.code[at]
                if not (one.is_load or at in self.results or self.swapped(at)):
                    read = {(at, *origin) for origin in one.origins(word, needed)}
                    stack += read - seen
                    seen |= read
        return found

    def polynomial(self, index: int, names: Sequence[Register]) -> str:
        """Which polynomial of sincosf ends in the registers, "cos" or "sin"; "?" for neither."""
        found = set()
        for last in {at for name in names for at, _ in self.definitions(index, name)}:
            origins = [name for name, _ in self.code[last].origins()]
            before = {at for name in origins for at, _ in self.definitions(last, name)}
            steps = [self.code[at] for at in before if self.code[at].name == "FFMA"]
            kinds = {POLYNOMIALS.get(one.operands[3][:11], "?") for one in steps} - {"?"}
            found.add(kinds.pop() if len(kinds) == 1 and self.code[last].name == "FFMA" else "?")
        return found.pop() if len(found) == 1 else "?"

    def odd(self, index: int, operand: str) -> bool | None:
        """Whether a predicate says that the quadrant is odd (True) or even (False)."""
        if not (name := PREDICATE.match(operand)) or name[2] == "T":
            return None
        found: set[bool | None] = set()
        for at, _ in self.definitions(index, (name[1], int(name[2]))):
            one = self.code[at]
            text = " ".join(one.operands[1:]).replace(".reuse", "")
            compares = re.match(
                r"ISETP\.(NE|EQ)\.(U32\.)?AND PT R\d+ (0x1|RZ) PT$", f"{one.opcode} {text}"
            )
            if compares:
                found.add((compares[1] == "EQ") == (compares[3] == "0x1"))
            else:
                masks = one.name == "LOP3" and re.match(r"RZ R\d+ 0x1 RZ 0xc0 ", text)
                found.add(True if masks else None)
        holds = found.pop() if len(found) == 1 else None
        return holds if holds is None or operand[0] != "!" else not holds

    def swapped(self, index: int) -> str | None:
        """What an instruction gives that chooses a polynomial by the quadrant: "cos" or "sin".

        The fast sincosf has an instruction for each of the two.
        """
        if index not in self.swaps:
            one = self.code[index]
            self.swaps[index] = FAST_SINCOS.get(one.opcode)
            if one.name in ("FSEL", "SEL"):
                first, second = (self.polynomial(index, one.sources[i]) for i in (0, 1))
                odd = self.odd(index, one.operands[3])
                if {first, second} == {"cos", "sin"} and odd is not None:
                    # In odd quadrants the sine is what the polynomial of the cosine gives.
                    self.swaps[index] = second if odd else first
        return self.swaps[index]

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
        found |= {angle for leaf, _ in leaves if (angle := self.swapped(leaf[0]))}
        return found | {"x" for _, name in leaves if name in ("LDG", "LD")}

    def arithmetic(self, index: int, parts: Sequence[tuple[Register, int]]) -> set[int]:
        """The floating-point operations that are converted to (bytes of) registers at `index`."""
        stack = [(index, *part) for part in parts]
        seen = set(stack)
        found = set()
        while stack:
            user, name, needed = stack.pop()
            for at, word in self.definitions(user, name):
                one = self.code[at]
                negates = one.name == "FADD" and (one.is_zero(1) or one.is_zero(2))
                if TRANSPARENT.match(one.opcode) or negates:
                    read = {(at, *origin) for origin in one.origins(word, needed)}
                    stack += read - seen
                    seen |= read
                elif one.name in ("FADD", "FFMA", "FMUL"):
                    found.add(at)
        return found

    def factors(self, index: int) -> str:
        """Which angle an element is multiplied by, "cos" or "sin"; "?" for another product."""
        first, second = (self.roles(index, names) for names in self.code[index].sources[:2])
        # A register that is undefined at first (a load that is skipped, an array that moves by one
        # place a round) seems to hold what it held before as well: the element's an angle, or the
        # angle's an element. One of the two ways to read the product is left then.
        ways = {
            angle
            for angles, elements in ((first, second), (second, first))
            for angle in angles
            if angles <= {angle, "x"} and angle != "x" and "x" in elements
        }
        return ways.pop() if len(ways) == 1 else "?"

    def product(self, index: int, names: Sequence[Register]) -> str:
        """The same for registers that hold a rounded product."""
        found = set()
        for at in self.arithmetic(index, [(name, ALL_BYTES) for name in names]):
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

    def copies(self, index: int) -> bool:
        """Whether a store writes what was loaded, as far as its registers are defined."""
        names = [name for name, _ in self.stored(index)]
        return any(
            self.code[at].is_load for name in names for at, _ in self.definitions(index, name)
        )

    def rotations(self) -> dict[int, str]:
        """The operations that make stored, rotated values, each with the order it has."""
        for index in self.stores:
            self.results |= self.arithmetic(index, self.stored(index))
        inputs = {at: [name for name, _ in self.code[at].origins()] for at in self.results}
        return {at: self.order(at) for at, names in inputs.items() if self.roles(at, names) - {"x"}}

    def orders(self) -> Counter[str]:
        return Counter(self.rotations().values())

    def sincos(self) -> str:
        if any(one.opcode in FAST_SINCOS for one in self.code):
            return "fast"
        precise = any(PRECISE_SINCOS in operand for one in self.code for operand in one.operands)
        return "precise" if precise else "none"


def analyse_listing(listing: str, chip: str) -> Iterator[Row]:
    """One row for each kernel in what `nvdisasm -c` printed."""
    for found, section in kernels(listing):
        ours = found["kernel"].startswith("thd_")
        kernel = Kernel(section, chip=int(re.sub(r"\D", "", chip)), pairs=ours)
        counts = kernel.orders()
        orders = [text for name, text in ORDERS.items() if counts[name]] or ["unclear"]
        yield {
            "chip": chip,
            "kernel": found["kernel"],
            "dtype": DTYPES[found["dtype"]],
            "variant": " ".join(variant(found)),
            "order": orders[0] if len(orders) == 1 else "mixed",
            **{name: counts[name] for name in ORDERS},
            "sincos": kernel.sincos(),
        }


def analyse(library: Path, cuobjdump: str, disassemblers: Sequence[str]) -> tuple[list[Row], str]:
    """The rows of a library, and for which chips it holds PTX of these kernels."""
    rows: list[Row] = []
    virtual = set()
    with tempfile.TemporaryDirectory() as folder:
        for path, chip in extract(library, cuobjdump, Path(folder), "elf", "ptx"):
            if path.suffix == ".cubin":
                rows += analyse_listing(disassemble(path, disassemblers), chip)
            else:
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
