# SPDX-License-Identifier: Apache-2.0
"""Patch a source tree of TransformerEngine: check, apply, revert, status.

A tree is known by the git blob ids of the files that a patch inserts lines into. Everything is
checked before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformer_engine_overlay.patch_series import (
    FileChange,
    Patch,
    PatchError,
    describe_blob,
    git_blob_id,
    read_series,
)
from transformer_engine_overlay.tree_write import locked, remove_leftovers, write_files

# what a file is with regard to a patch
ORIGINAL = "original"
PATCHED = "patched"
CHANGED = "changed"

APPLIED = "applied"
NOT_APPLIED = "not applied"
PARTLY = "partly applied"

MARKER = "transformer_engine/common"


@dataclass(frozen=True)
class FileState:
    """A file of the tree that a patch changes.

    Attributes
    ----------
    change : FileChange
    state : str
        "original", "patched", or "changed": neither.
    found : str
        Git blob id of what is there, "" if nothing is.
    """

    change: FileChange
    state: str
    found: str


@dataclass(frozen=True)
class TreeState:
    """A tree with the patches that fit it.

    Attributes
    ----------
    source : Path
    patches : dict
        Name of a patch to its files.
    skipped : tuple of str
        Steps that are optional and fit no file of this tree, by the names of their patches.
    """

    source: Path
    patches: dict[str, tuple[FileState, ...]]
    skipped: tuple[str, ...]

    @property
    def files(self) -> list[FileState]:
        """All files, in the order of the series."""
        return [file for files in self.patches.values() for file in files]

    @property
    def changed(self) -> list[FileState]:
        """The files that stand in the way."""
        return [file for file in self.files if file.state == CHANGED]

    def state_of(self, files: Iterable[FileState]) -> str:
        """Sum up: "applied", "not applied", "partly applied" or "changed"."""
        states = {file.state for file in files}
        if CHANGED in states:
            return CHANGED
        if len(states) > 1:
            return PARTLY
        return APPLIED if states == {PATCHED} else NOT_APPLIED

    @property
    def state(self) -> str:
        """The sum of all files."""
        return self.state_of(self.files)


def read_tree(source: Path, series: Sequence[Patch] | None = None) -> TreeState:
    """Look at a tree; writes nothing.

    Parameters
    ----------
    source : Path
        The root of the tree: the folder that holds ``transformer_engine/common``.
    series : sequence of Patch, optional
        Default: the patches that came with the package.

    Raises
    ------
    PatchError
        If it is no source tree of TransformerEngine.
    """
    if not (source / MARKER).is_dir():
        raise PatchError(
            f"{source} is no source tree of TransformerEngine: it has no folder {MARKER}; name the "
            "root of a checkout"
        )
    steps: dict[str, list[Patch]] = {}
    for patch in read_series() if series is None else series:
        steps.setdefault(patch.step, []).append(patch)
    patches, skipped = {}, []
    for variants in steps.values():
        states = {patch.name: _look(source, patch) for patch in variants}
        fitting = [name for name, files in states.items() if not _strange(files)]
        if fitting:
            patches[fitting[0]] = states[fitting[0]]
        elif all(patch.optional for patch in variants):
            skipped.append(", ".join(states))
        else:
            # The one to complain about: all say the same of a file that none of them knows.
            patches[variants[0].name] = states[variants[0].name]
    return TreeState(source, patches, tuple(skipped))


def _look(source: Path, patch: Patch) -> tuple[FileState, ...]:
    return tuple(_look_at(source, change) for change in patch.changes)


def _look_at(source: Path, change: FileChange) -> FileState:
    path = source / change.path
    if path.is_symlink() or (path.exists() and not path.is_file()):
        return FileState(change, CHANGED, "not a plain file")
    found = git_blob_id(path.read_bytes()) if path.exists() else ""
    known = {change.old_blob: ORIGINAL, change.new_blob: PATCHED}
    return FileState(change, known.get(found, CHANGED), found)


def _strange(files: Iterable[FileState]) -> bool:
    return any(file.state == CHANGED and file.change.old_blob for file in files)


def check_tree(source: Path, series: Sequence[Patch] | None = None) -> TreeState:
    """Look at a tree, and refuse one that cannot be patched or reverted as a whole.

    Parameters
    ----------
    source, series
        As for `read_tree`.

    Raises
    ------
    PatchError
        If a file is neither as TransformerEngine has it nor as the patches make it; the message
        names each, with what it is and what was expected. If a folder of a new file is missing.
    """
    tree = _known_tree(source, series)
    for file in tree.files:
        folder = (source / file.change.path).parent
        if not folder.is_dir():
            raise PatchError(f"there is no folder {folder}: this is not a whole source tree")
    return tree


def _known_tree(source: Path, series: Sequence[Patch] | None) -> TreeState:
    """Look at a tree, and refuse one with a file that is not known."""
    series = read_series() if series is None else series
    tree = read_tree(source, series)
    if tree.changed:
        complaints = "\n".join(f"  {_complaint(source, file, series)}" for file in tree.changed)
        raise PatchError(
            f"{source} is not a tree that these patches are for, nor one that they made:\n"
            f"{complaints}\nTake back your changes, or check out a listed release. A tree that "
            "another version of transformer-engine-overlay patched is reverted by that version; "
            "nothing was written"
        )
    return tree


def _complaint(source: Path, file: FileState, series: Sequence[Patch]) -> str:
    path = file.change.path
    changes = [change for patch in series for change in patch.changes if change.path == path]
    expected = [
        describe_blob(change.old_blob) if change.old_blob else "no such file" for change in changes
    ]
    found = f"is blob {file.found[:10]}" if len(file.found) == 40 else f"is {file.found}"
    if not file.found:
        found = "is missing"
    elif len(file.found) == 40:
        converted = git_blob_id((source / path).read_bytes().replace(b"\r\n", b"\n"))
        if any(converted in (change.old_blob, change.new_blob) for change in changes):
            found += f", which is {converted[:10]} with CRLF line ends (see git's core.autocrlf)"
    return f"{path} {found}; expected was {' or '.join(expected)}"


def apply_series(source: Path, series: Sequence[Patch] | None = None) -> TreeState:
    """Apply all patches that fit; those that are in place already stay.

    Parameters
    ----------
    source, series
        As for `read_tree`.

    Returns
    -------
    TreeState
        From before.

    Raises
    ------
    PatchError
        As `check_tree`. Then, and after any other error, the tree is as it was.
    """

    def patched(file: FileState, path: Path) -> bytes:
        return file.change.apply(path.read_bytes() if file.found else b"")

    return _change(source, series, check_tree, ORIGINAL, patched)


def revert_series(source: Path, series: Sequence[Patch] | None = None) -> TreeState:
    """Take all patches out; the tree is then bit for bit as before `apply_series`.

    Parameters and errors are those of `apply_series`.
    """

    def original(file: FileState, path: Path) -> bytes | None:
        return file.change.revert(path.read_bytes()) if file.change.old_blob else None

    return _change(source, series, _known_tree, PATCHED, original)


def _change(
    source: Path,
    series: Sequence[Patch] | None,
    look: Callable[[Path, Sequence[Patch] | None], TreeState],
    state: str,
    content: Callable[[FileState, Path], bytes | None],
) -> TreeState:
    """Write the files of a state anew, and say how the tree was."""
    with locked(source / MARKER):
        tree = look(source, series)
        paths = {source / file.change.path: file for file in tree.files}
        remove_leftovers(paths)
        write_files({p: content(file, p) for p, file in paths.items() if file.state == state})
    return tree
