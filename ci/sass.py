# SPDX-License-Identifier: Apache-2.0
"""Read what `nvdisasm -c` prints: instructions, and where the values that they use come from."""

from __future__ import annotations

import bisect
import contextlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

KERNEL = re.compile(
    r"\d+(?P<kernel>fused_rope_(?:thd_linear_grid_)?(?:forward|backward)_kernel"
    r"|thd_(?:token_linear|legacy_grid|fused_qkv)[a-z_]*_kernel)"
    r"I(?P<dtype>f|6__half|13__nv_bfloat16)(?P<variant>(?:L[a-z]\d+E)*)EEv"
)
DTYPES = {"f": "float32", "6__half": "float16", "13__nv_bfloat16": "bfloat16"}

INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@(!?)(U?P\w)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
LABEL = re.compile(r"^(\.L_x_\d+|\$\S+):")
TARGET = re.compile(r"`\((\S+?)\)")
REGISTER = re.compile(r"\b(U?R)(\d+)\b")
PREDICATE = re.compile(r"!?(U?P)(\d|T)(?:\.\w+)*$")
STACK_SLOT = re.compile(r"\[R1(?:\+(0x[0-9a-f]+))?\]$")
REMARK = re.compile(r"\(\*.*?\*\)")
SPILL_MARK = "SpillRefill"  # in nvdisasm's remark on an instruction that spills or refills

COMPARISON = re.compile(r"[A-Z]*SETP2?|U?PLOP3")  # writes predicates only
NO_RESULT = re.compile(
    r"(ST[GSL]?|BRA|EXIT|RET|CALL|B(AR|SSY|SYNC|REAK|MOV)|NOP|WARPSYNC|MEMBAR|RED|R2P)(\.|$)"
)
LOAD = re.compile(r"(LDG|LDS|LDL|LD|LDC|ULDC|LDCU)(\.|$)")
TWO_WORDS = re.compile(r"D[A-Z]+|CS2R$|(U?MOV|U?IADD3?)\.64|U?IMAD\.WIDE|[IF]2F\.F64|F2I\.[SU]64")

ALL_BYTES = 0b1111

Fact = tuple[str, bool]  # a predicate and its value
Register = tuple[str, int]  # "R", "UR", "P" or "UP" and the number, or "L" and a word of the stack
Leaf = tuple[int, int]  # an instruction and which word of its result


class Instruction:
    """One line of the listing."""

    def __init__(self, guard: Fact | None, opcode: str, operands: list[str]) -> None:
        self.guard, self.opcode, self.operands = guard, opcode, operands
        self.name = opcode.split(".")[0]
        self.result: Register | None = None
        self.predicates: set[str] = set()  # those it writes
        self.copied: Register | None = None  # what a spill or a refill takes, its first word
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
        if LOAD.match(opcode) or self.name in ("STG", "ST", "STL"):
            found = re.search(r"\.(64|128|256)(\.|$)", opcode)
            self.width = int(found[1]) // 32 if found else 1
        for operand in operands if self.name in ("LDL", "STL") else ():
            if place := STACK_SLOT.match(operand):
                slot = ("L", int(place[1] or "0", 16) // 4)
                if self.name == "LDL":
                    self.copied = slot
                elif stored := registers(operands[-1]):
                    self.result, self.copied = slot, stored[0]
        self.is_load = LOAD.match(opcode) is not None and self.copied is None

    def word_of(self, register: Register) -> int | None:
        """Which word of the result goes into a register."""
        if register[0] in ("P", "UP"):
            return 0 if f"{register[0]}{register[1]}" in self.predicates else None
        kind, number = self.result or ("", 0)
        word = register[1] - number
        return word if kind == register[0] and 0 <= word < self.width else None

    def written(self) -> list[Register]:
        names = [(name[:-1], int(name[-1])) for name in self.predicates if name[-1] != "T"]
        kind, number = self.result or ("", 0)
        return names + [(kind, number + word) for word in range(self.width) if kind]

    def origins(self, word: int = 0, needed: int = ALL_BYTES) -> list[tuple[Register, int]]:
        """The registers that a word of the result is made from, each with which bytes of it.

        `needed` says which bytes of the result count. Both are masks, bit 0 for the lowest byte.
        """
        if self.copied:
            return [((self.copied[0], self.copied[1] + word), needed)]
        if self.name == "PRMT" and self.operands[2].startswith("0x"):
            selector, taken = int(self.operands[2], 16), [0, 0]
            for byte in range(4):
                if needed >> byte & 1:
                    digit = selector >> 4 * byte & 7
                    taken[digit // 4] |= 1 << digit % 4
            pairs = zip((0, 2), taken, strict=True)
            return [(name, bytes_) for i, bytes_ in pairs if bytes_ for name in self.sources[i]]
        if self.name in ("IMAD", "SHF") and self.moves_half:
            needed = needed >> 2 if self.moves_half == "up" else needed << 2 & ALL_BYTES
        elif self.name in ("IADD3", "VIADD") or self.opcode == "IMAD.IADD":
            needed = (1 << needed.bit_length()) - 1  # a sum's bytes depend on the ones below
        elif self.name not in ("MOV", "SEL", "FSEL") and not self.opcode.startswith("IMAD.MOV"):
            needed = ALL_BYTES
        return [(name, needed) for names in self.sources for name in names if needed]

    @property
    def moves_half(self) -> str | None:
        """Whether it moves half of a register into the other half: "up", "down"."""
        if "RZ" not in self.operands:
            return None
        if self.opcode.startswith(("IMAD.U32", "IMAD.SHL")):
            return "up" if "0x10000" in self.operands else None
        if "0x10" not in self.operands:
            return None
        return {"SHF.L.U32": "up", "SHF.R.U32.HI": "down"}.get(self.opcode)

    def is_zero(self, operand: int) -> bool:
        return self.operands[operand].lstrip("-") == "RZ"

    def targets(self, labels: dict[str, int]) -> list[int]:
        # `WARPSYNC.ALL` has none
        return [labels[name] for name in TARGET.findall(self.operands[-1])] if self.operands else []


def registers(operand: str) -> list[Register]:
    return [(kind, int(number)) for kind, number in REGISTER.findall(operand)]


def take_predicates(operands: list[str], into: set[str]) -> None:
    while operands and PREDICATE.match(operands[0]):
        into.add(operands.pop(0))


def opposite(fact: Fact) -> Fact:
    return fact[0], not fact[1]


class Listing:
    """The listing of one kernel, with the questions about where values come from."""

    def __init__(self, text: str) -> None:
        self.code: list[Instruction] = []
        self.spills = 0  # instructions that move a register to the stack or back
        labels: dict[str, int] = {}
        for line in text.splitlines():
            if found := LABEL.match(line):
                labels[found[1]] = len(self.code)
            elif (found := INSTRUCTION.search(REMARK.sub("", line))) and found[2] not in (
                "PT",
                "UPT",
            ):
                guard = (found[2], not found[1]) if found[2] else None
                operands = re.split(r",\s*", found[4]) if found[4] else []
                self.code.append(Instruction(guard, found[3], operands))
                self.spills += SPILL_MARK in line
        # What may run right before each instruction. A call is stepped over.
        self.before: list[list[int]] = [[] for _ in self.code]
        self._connect(labels)
        # Where the straight line of code that leads to each instruction begins.
        self.head = list(range(len(self.code)))
        self.writers: dict[Register, list[int]] = {}
        self.forgetful: list[int] = []  # may write any predicate
        for index, one in enumerate(self.code):
            if self.before[index] == [index - 1]:
                self.head[index] = self.head[index - 1]
            if one.name in ("R2P", "CALL"):
                self.forgetful.append(index)
            for register in one.written():
                self.writers.setdefault(register, []).append(index)
        self.definitions_seen: dict[tuple[int, Register], set[Leaf]] = {}

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
        if (index, register) not in self.definitions_seen:
            self.definitions_seen[index, register] = self._definitions(index, register)
        return self.definitions_seen[index, register]

    def _definitions(self, index: int, register: Register) -> set[Leaf]:
        writers = self.writers.get(register, [])
        # Only what guards a writer matters; of all other code, only what changes such a predicate.
        guards = {guard[0] for guard in (self.code[at].guard for at in writers) if guard}
        stops = set(writers)
        for name in guards:
            stops.update(self.writers.get((name[:-1], int(name[-1])), []), self.forgetful)
        ordered = sorted(stops)
        own = self.code[index].guard
        stack = [(index, frozenset([own] if own and own[0] in guards else []))]
        seen = set(stack)
        found: set[Leaf] = set()
        while stack:
            at, facts = stack.pop()
            place = bisect.bisect_left(ordered, at) - 1
            if place >= 0 and ordered[place] >= self.head[at] and self.head[at] != at:
                previous = [ordered[place]]
            elif self.head[at] != at:
                previous = [self.head[at]]
            else:
                previous = self.before[at]
            for earlier in previous:
                known = set(facts)
                if earlier in stops:
                    one = self.code[earlier]
                    known = {fact for fact in facts if fact[0] not in one.predicates}
                    if one.name in ("R2P", "CALL"):
                        known.clear()
                    word = one.word_of(register)
                    if word is not None and (one.guard is None or opposite(one.guard) not in known):
                        found.add((earlier, word))
                        if one.guard is None or one.guard in known:
                            continue
                        known.add(opposite(one.guard))
                state = (earlier, frozenset(known))
                if state not in seen:
                    seen.add(state)
                    stack.append(state)
        return found

    def stored(self, index: int) -> list[tuple[Register, int]]:
        """The registers that a store writes to memory, each with which bytes of it."""
        one = self.code[index]
        part = re.search(r"\.[US](8|16)(\.|$)", one.opcode)
        taken = (1 << int(part[1]) // 8) - 1 if part else ALL_BYTES
        names = registers(one.operands[-1])
        return [((kind, n + word), taken) for kind, n in names for word in range(one.width)]

    def reaching(self, targets: Sequence[int]) -> set[int]:
        """The instructions after which one of `targets` may run."""
        stack, seen = list(targets), set()
        while stack:
            for earlier in self.before[stack.pop()]:
                if earlier not in seen:
                    seen.add(earlier)
                    stack.append(earlier)
        return seen


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


def kernels(listing: str) -> Iterator[tuple[re.Match[str], str]]:
    """The kernels in what `nvdisasm -c` printed: the match of `KERNEL`, and the kernel's part."""
    for section in re.split(r"^//-+ \.text\.", listing, flags=re.MULTILINE)[1:]:
        if found := KERNEL.search(section.split(maxsplit=1)[0]):
            yield found, section


def variant(found: re.Match[str]) -> list[str]:
    """The template arguments behind the type."""
    return re.findall(r"L[a-z](\d+)E", found["variant"])


def extract(library: Path, cuobjdump: str, folder: Path, *kinds: str) -> Iterator[tuple[Path, str]]:
    """The files with our or TE's kernels that a library holds ("elf", "ptx"), with their chips."""
    for kind in kinds:
        call(cuobjdump, f"-x{kind}", "all", library.resolve(), cwd=folder)
    for path in sorted(folder.iterdir()):
        if KERNEL.search(path.read_bytes().decode("latin-1")):
            yield path, path.name.split(".")[-2]
