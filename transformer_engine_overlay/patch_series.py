# SPDX-License-Identifier: Apache-2.0
"""The patches for TransformerEngine's source tree: where they are, and what each of them changes.

A patch has new files, whole, and insertions into files that are there: hunks without context and
without removals. Nothing else is understood.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from transformer_engine_overlay.te_versions import RELEASES

SERIES = "series"
OPTIONAL = "optional"


class PatchError(RuntimeError):
    """A patch cannot be read, or a tree cannot be patched; the message says what would help."""


@dataclass(frozen=True)
class Insertion:
    """Lines that go into a file.

    Attributes
    ----------
    after : int
        Number of the line, in the file as it was, behind which they go; 0 for the beginning.
    lines : tuple of bytes
        Each with its newline.
    """

    after: int
    lines: tuple[bytes, ...]


@dataclass(frozen=True)
class FileChange:
    """What a patch does to one file.

    Attributes
    ----------
    path : str
        In the tree, with slashes.
    old_blob : str
        Git blob id of the file as it was, "" for a new file.
    new_blob : str
        Git blob id of the outcome.
    insertions : tuple of Insertion
        By ascending line; one at line 0 for a new file.
    """

    path: str
    old_blob: str
    new_blob: str
    insertions: tuple[Insertion, ...]

    def apply(self, old: bytes) -> bytes:
        """Return the changed content.

        Raises
        ------
        PatchError
            If the outcome is not the one that the patch names.
        """
        lines = old.splitlines(keepends=True)
        for insertion in reversed(self.insertions):
            lines[insertion.after : insertion.after] = insertion.lines
        return self._checked(b"".join(lines), self.new_blob)

    def revert(self, new: bytes) -> bytes:
        """Return the content from before, of a file that is not new; the opposite of `apply`."""
        lines = new.splitlines(keepends=True)
        for insertion in self.insertions:
            del lines[insertion.after : insertion.after + len(insertion.lines)]
        return self._checked(b"".join(lines), self.old_blob)

    def _checked(self, content: bytes, blob: str) -> bytes:
        if git_blob_id(content) != blob:
            raise PatchError(f"{self.path}: the patch does not lead to blob {blob}; it is damaged")
        return content


@dataclass(frozen=True)
class Patch:
    """One file of the series.

    Attributes
    ----------
    name : str
        Its file name.
    step : str
        The number that it begins with: of the patches of one step, one fits a tree.
    optional : bool
        Whether a tree that none of the step fits does without it.
    changes : tuple of FileChange
    """

    name: str
    step: str
    optional: bool
    changes: tuple[FileChange, ...]


def git_blob_id(content: bytes) -> str:
    """Return what ``git hash-object`` prints for a file of this content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()


def patches_folder() -> Path:
    """Return the folder of the patches, in the installed package or in a checkout."""
    package = Path(__file__).parent
    for folder in (package / "patches", package.parent / "patches"):
        if (folder / SERIES).is_file():
            return folder
    raise PatchError("the package came without its patches; reinstall transformer-engine-overlay")


def read_series(folder: Path | None = None) -> list[Patch]:
    """Read all patches that the file ``series`` names, in its order.

    Parameters
    ----------
    folder : Path, optional
        Where they are; default `patches_folder`.
    """
    folder = folder or patches_folder()
    patches = []
    for line in (folder / SERIES).read_text(encoding="utf-8").splitlines():
        name, _, remark = (part.strip() for part in line.partition("#"))
        if name:
            changes = read_changes(name, (folder / name).read_bytes())
            step = name.partition("-")[0]
            patches.append(Patch(name, step, remark.startswith(OPTIONAL), changes))
    return patches


_FILE = re.compile(
    rb"diff --git a/(?P<path>\S+) b/(?P=path)\n(?P<new>new file mode 100644\n)?"
    rb"index (?P<old_blob>[0-9a-f]{40})\.\.(?P<new_blob>[0-9a-f]{40})(?: 100[0-7]{3})?\n"
    rb"--- (?P<old_name>\S+)\n\+\+\+ b/(?P=path)\n"
)
_HUNK = re.compile(rb"@@ -(\d+),0 \+(\d+)(?:,(\d+))? @@\n")


def read_changes(name: str, text: bytes) -> tuple[FileChange, ...]:
    """Take a patch apart.

    Parameters
    ----------
    name : str
        For the error.
    text : bytes
        The patch, with its header.

    Raises
    ------
    PatchError
        If it has anything but new files and insertions, or does not add up.
    """

    def damaged(what: str) -> PatchError:
        return PatchError(f"{name}: {what}; reinstall transformer-engine-overlay")

    position = text.find(b"diff --git ")
    changes = []
    while 0 <= position < len(text):
        head = _FILE.match(text, position)
        if head is None:
            raise damaged("it has something else than new files and insertions")
        position = head.end()
        insertions: list[Insertion] = []
        added = 0
        while hunk := _HUNK.match(text, position):
            position = hunk.end()
            count = int(hunk[3] or 1)
            lines = []
            for _ in range(count):
                end = text.find(b"\n", position) + 1
                if not end or text[position : position + 1] != b"+":
                    raise damaged("it has lines that are not added, or fewer than it says")
                lines.append(text[position + 1 : end])
                position = end
            after = int(hunk[1])
            if int(hunk[2]) != after + added + 1 or (insertions and after <= insertions[-1].after):
                raise damaged("its line numbers do not add up")
            insertions.append(Insertion(after, tuple(lines)))
            added += count
        is_new = head["new"] is not None
        old_name = b"/dev/null" if is_new else b"a/" + head["path"]
        names_no_blob = head["old_blob"].strip(b"0") == b""
        if not insertions or head["old_name"] != old_name or is_new != names_no_blob:
            raise damaged("it does not say whether a file is new")
        old_blob = "" if is_new else head["old_blob"].decode()
        change = (head["path"].decode(), old_blob, head["new_blob"].decode(), tuple(insertions))
        changes.append(FileChange(*change))
    if not changes:
        raise damaged("it changes nothing")
    return tuple(changes)


def write_changes(changes: tuple[FileChange, ...]) -> bytes:
    """Write what `read_changes` reads, as ``git diff -U0 --full-index`` does."""
    out = []
    for change in changes:
        path = change.path
        out.append(f"diff --git a/{path} b/{path}\n")
        if not change.old_blob:
            out.append("new file mode 100644\n")
            out.append(f"index {'0' * 40}..{change.new_blob}\n--- /dev/null\n+++ b/{path}\n")
        else:
            out.append(f"index {change.old_blob}..{change.new_blob} 100644\n")
            out.append(f"--- a/{path}\n+++ b/{path}\n")
        added = 0
        for insertion in change.insertions:
            count = len(insertion.lines)
            length = f",{count}" if count != 1 else ""
            out.append(f"@@ -{insertion.after},0 +{insertion.after + added + 1}{length} @@\n")
            out += [f"+{line.decode()}" for line in insertion.lines]
            added += count
    return "".join(out).encode()


def describe_blob(blob: str) -> str:
    """Name a blob of ``fused_rope.cu`` with the releases that have it."""
    for release in RELEASES:
        if release.blob and blob.startswith(release.blob):
            first, last = (".".join(map(str, version)) for version in (release.first, release.last))
            return f"{blob[:10]} (TransformerEngine {first} to {last})"
    return blob[:10]
