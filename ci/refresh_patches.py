#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write patches/ anew from common/ and ci/te_tree/ for given trees of TransformerEngine.

    python ci/refresh_patches.py --te-source TREE [TREE ...]

A tree is a clean checkout. The new files need none; a patch that inserts lines into a file of
TransformerEngine is written for the blob that the tree has of it, beside those for other blobs.
"""

from __future__ import annotations

import argparse
import datetime
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from transformer_engine_overlay.patch_series import (
    OPTIONAL,
    SERIES,
    FileChange,
    Insertion,
    PatchError,
    describe_blob,
    git_blob_id,
    read_changes,
    write_changes,
)

ROOT = Path(__file__).resolve().parents[1]
PATCHES = ROOT / "patches"
PACKAGE = ROOT / "transformer_engine_overlay"
TE_TREE = ROOT / "ci" / "te_tree"  # new files of ours, at the paths that they have in the tree

KERNELS = "transformer_engine/common/fused_rope"
FUSED_ROPE = f"{KERNELS}/fused_rope.cu"
TEST_LIST = "qa/L0_pytorch_unittest/test.sh"
VARIABLES = "docs/envvars.rst"

SPDX = "SPDX-License-Identifier: Apache-2.0"
ISSUE = "https://github.com/NVIDIA/TransformerEngine/issues/2866"

INCLUDE = '#include "thd_te_branch.cuh"\n'

BRANCH = """\
  if (thd_rope::launch_if_token_linear(
          {input}, cu_seqlens, freqs, start_positions, *{output}, qkv_format,
          {{interleaved, cp_size, cp_rank, b, h, d, d2, stride_s_or_t, stride_h, stride_d}},
          /*transpose=*/{transpose}, stream)) {{
    return;
  }}
"""

VERSION = """\

const char *nvte_fused_rope_thd_overlay_version() {
  return transformer_engine::thd_rope::kOverlayVersion;
}
"""

TEST_LINE = (
    "python3 -m pytest --tb=auto --junitxml=$XML_LOG_DIR/{name}.xml "
    '$TE_PATH/tests/pytorch/{name}.py || test_fail "{name}.py"\n'
).format(name="test_fused_rope_thd_token_linear")

VARIABLE = """\
.. envvar:: NVTE_FUSED_ROPE_THD_TOKEN_LINEAR

   :Type: ``int`` (0 or 1)
   :Default: unset (automatic)
   :Description: Launch of fused RoPE in the THD layout. With ``1`` or unset, token-linear kernels run, whose work follows the rows of the local tensor; with ``0``, the launch without them. Read at each call; any other value is an error.

"""  # noqa: E501


class AnchorError(RuntimeError):
    """A file of the tree does not look as expected; the places for our lines are not known."""


def line_of(lines: Sequence[str], pattern: str, start: int = 0) -> int:
    """Return the number, from 1, of the only line behind `start` to match; of several, the first
    behind a start."""
    found = [i + 1 for i, line in enumerate(lines[start:], start) if re.search(pattern, line)]
    if not found or (start == 0 and len(found) > 1):
        raise AnchorError(f"{len(found)} lines match {pattern!r}")
    return found[0]


def launcher_insertions(lines: Sequence[str]) -> list[tuple[int, str]]:
    def body(name: str) -> int:
        return line_of(lines, r"\) \{$", line_of(lines, rf"^void {name}\(const Tensor") - 1)

    return [
        (line_of(lines, r'^#include "\.\./utils\.cuh"'), INCLUDE),
        (
            body("fused_rope_forward"),
            BRANCH.format(input="input", output="output", transpose="false"),
        ),
        (
            body("fused_rope_backward"),
            BRANCH.format(input="output_grads", output="input_grads", transpose="true"),
        ),
        (len(lines), VERSION),
    ]


def test_list_insertions(lines: Sequence[str]) -> list[tuple[int, str]]:
    return [(line_of(lines, r"/test_fused_rope\.py"), TEST_LINE)]


def variable_insertions(lines: Sequence[str]) -> list[tuple[int, str]]:
    return [(line_of(lines, r"^Attention Backend Selection$") - 1, VARIABLE)]


@dataclass(frozen=True)
class Step:
    """A step of the series: new files, or insertions into one file."""

    name: str
    description: str
    sources: Callable[[], dict[str, Path]] = dict  # path in the tree to the file of ours
    path: str = ""
    insertions: Callable[[Sequence[str]], list[tuple[int, str]]] | None = None
    optional: bool = False
    body: tuple[str, ...] = field(default=())


def kernel_sources() -> dict[str, Path]:
    files = sorted((PACKAGE / "common" / "fused_rope").glob("*.*h"))
    return {f"{KERNELS}/{file.name}": file for file in files}


def sources_under(folder: str) -> Callable[[], dict[str, Path]]:
    return lambda: {
        file.relative_to(TE_TREE).as_posix(): file
        for file in sorted((TE_TREE / folder).rglob("*.py"))
    }


STEPS = (
    Step(
        "0001-token-linear-kernels",
        "token-linear kernels for fused RoPE on packed (THD) batches",
        kernel_sources,
        body=(
            "Headers that fused_rope.cu includes; the build lists stay as they are. The grid has",
            "a share of lanes for each row of the local tensor, which find their sequence by a",
            "search of a whole warp, while the row's data is on its way.",
        ),
    ),
    Step(
        "0002-launcher-branch",
        "a branch to the token-linear kernels, for THD only",
        path=FUSED_ROPE,
        insertions=launcher_insertions,
        body=(
            "At the top of fused_rope_forward and fused_rope_backward, where the rows of the",
            "local tensor are at hand. NVTE_FUSED_ROPE_THD_TOKEN_LINEAR=1 takes it always, 0",
            "never; unset, choose_path() of thd_params.h decides. What it does not take goes on",
            "to the code that was there, which stays as it is.",
        ),
    ),
    Step(
        "0003-tests",
        "tests that force each path and compare bit for bit, over every cp_rank",
        sources_under("tests"),
    ),
    Step(
        "0004-benchmark",
        "a benchmark of the paths, beside a copy of the same tensors",
        sources_under("benchmarks"),
    ),
    Step(
        "0005-docs",
        "NVTE_FUSED_ROPE_THD_TOKEN_LINEAR in the list of environment variables",
        path=VARIABLES,
        insertions=variable_insertions,
        optional=True,
    ),
    Step(
        "0006-test-list",
        "the tests in qa/L0_pytorch_unittest",
        path=TEST_LIST,
        insertions=test_list_insertions,
        optional=True,
    ),
)


def new_files(step: Step, header: str = "") -> tuple[FileChange, ...]:
    """Make the changes of a step that needs no tree.

    Parameters
    ----------
    step : Step
    header : str
        Lines to put in place of the license line of each file, without comment signs.
    """
    changes = []
    for path, file in step.sources().items():
        text = file.read_text(encoding="utf-8")
        if header:
            sign, _, rest = text.partition(f" {SPDX}\n")
            text = "".join(f"{sign} {line}".rstrip() + "\n" for line in header.splitlines()) + rest
        lines = tuple(text.encode().splitlines(keepends=True))
        content = b"".join(lines)
        changes.append(FileChange(path, "", git_blob_id(content), (Insertion(0, lines),)))
    return tuple(changes)


def inserted(step: Step, tree: Path) -> FileChange:
    """Make the change of a step for the file that a tree has."""
    assert step.insertions is not None
    old = (tree / step.path).read_bytes()
    try:
        places = step.insertions(old.decode().splitlines(keepends=True))
    except AnchorError as error:
        raise AnchorError(f"{tree / step.path}: {error}; is the tree patched already?") from None
    insertions = tuple(
        Insertion(after, tuple(text.encode().splitlines(keepends=True))) for after, text in places
    )
    lines = old.splitlines(keepends=True)
    for insertion in reversed(insertions):
        lines[insertion.after : insertion.after] = insertion.lines
    return FileChange(step.path, git_blob_id(old), git_blob_id(b"".join(lines)), insertions)


def render(step: Step, changes: tuple[FileChange, ...], date: str) -> bytes:
    """Write a patch with its DEP-3 header."""
    head = [f"Description: {step.description}"]
    head += [f" {line}" for line in step.body]
    old = changes[0].old_blob
    if old and step.path == FUSED_ROPE:
        head.append(f" For blob {describe_blob(old)}.")
    head += [
        "Origin: vendor, transformer-engine-overlay",
        f"Bug: {ISSUE}",
        "Forwarded: no",
        "Applied-Upstream: no",
        f"Last-Update: {date}",
        "---",
    ]
    return "".join(f"{line}\n" for line in head).encode() + write_changes(changes)


def write_patch(path: Path, step: Step, changes: tuple[FileChange, ...]) -> None:
    """Write a patch; one that says the same already keeps its date."""
    old = path.read_bytes() if path.exists() else b""
    dated = re.search(rb"^Last-Update: (\S+)$", old, re.MULTILINE)
    if dated and old == render(step, changes, dated[1].decode()):
        return
    path.write_bytes(render(step, changes, datetime.date.today().isoformat()))


def refresh(trees: Sequence[Path], folder: Path = PATCHES, header: str = "") -> None:
    """Write the patches and the file `series`.

    Parameters
    ----------
    trees : sequence of Path
        Clean checkouts of TransformerEngine.
    folder : Path
        Where the patches are.
    header : str
        As for `new_files`.
    """
    folder.mkdir(exist_ok=True)
    for step in STEPS:
        if step.insertions is None:
            write_patch(folder / f"{step.name}.patch", step, new_files(step, header))
            continue
        for tree in trees:
            if step.optional and not (tree / step.path).is_file():
                continue
            change = inserted(step, tree)
            name = f"{step.name}-{change.old_blob[:10]}.patch"
            write_patch(folder / name, step, (change,))
    lines = ["# In the order in which they apply. Of one number, the one for the file's blob.\n"]
    for step in STEPS:
        for path in sorted(folder.glob(f"{step.name}*.patch")):
            blob = read_changes(path.name, path.read_bytes())[0].old_blob
            remark = [OPTIONAL] if step.optional else []
            remark += [describe_blob(blob)] if step.path == FUSED_ROPE else []
            lines.append(f"{path.name}  # {', '.join(remark)}".rstrip("# ") + "\n")
    (folder / SERIES).write_text("".join(lines), encoding="utf-8")


def drifted(folder: Path = PATCHES) -> list[str]:
    """Name the patches that are not what our sources make now; needs no tree."""
    complaints = []
    for step in STEPS:
        found = sorted(folder.glob(f"{step.name}*.patch"))
        if not found:
            complaints.append(f"{step.name}: there is no patch")
        for path in found:
            changes = read_changes(path.name, path.read_bytes())
            if step.insertions is None:
                fresh = new_files(step)
            else:
                texts = expected_insertions(step)
                old = changes[0].insertions
                insertions = tuple(Insertion(i.after, t) for i, t in zip(old, texts, strict=False))
                change = changes[0]
                fresh = (FileChange(change.path, change.old_blob, change.new_blob, insertions),)
                if len(texts) != len(old):
                    complaints.append(f"{path.name}: {len(texts)} insertions are expected")
            if fresh != changes:
                complaints.append(f"{path.name}: it differs from our sources")
    return complaints


def expected_insertions(step: Step) -> list[tuple[bytes, ...]]:
    """Return the lines that a step inserts, wherever that is."""
    texts = {
        FUSED_ROPE: [text for _, text in launcher_insertions(STAND_IN)],
        TEST_LIST: [TEST_LINE],
        VARIABLES: [VARIABLE],
    }[step.path]
    return [tuple(text.encode().splitlines(keepends=True)) for text in texts]


# As much of a fused_rope.cu as the search for places needs.
STAND_IN = (
    '#include "../utils.cuh"\n',
    "void fused_rope_forward(const Tensor &input) {\n",
    "}\n",
    "void fused_rope_backward(const Tensor &output_grads) {\n",
    "}\n",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--te-source", type=Path, nargs="+", default=[], metavar="TREE")
    parser.add_argument("--check", action="store_true", help="change nothing, only compare")
    parser.add_argument("--to", type=Path, default=PATCHES, help="another folder")
    parser.add_argument(
        "--header", type=Path, help="a file with lines for the head of each new file"
    )
    options = parser.parse_args()
    if not options.check:
        header = options.header.read_text(encoding="utf-8") if options.header else ""
        try:
            refresh(options.te_source, options.to, header)
        except (AnchorError, PatchError, OSError) as error:
            print(f"refresh_patches.py: {error}", file=sys.stderr)
            return 2
    complaints = [] if options.header else drifted(options.to)
    for complaint in complaints:
        print(f"{complaint}: run `python ci/refresh_patches.py --te-source TREE ...`")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
