# SPDX-License-Identifier: Apache-2.0
"""Write several files of a source tree, or none; one process at a time.

A process that is killed in between leaves each file as it was or as it should be, and files with a
mark in their names, which the next one removes.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from transformer_engine_overlay.patch_series import PatchError

MARK = ".te-overlay-"


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes of ours out of a tree; wait for one that is in.

    Parameters
    ----------
    folder : Path
        A folder of the tree. The lock is on itself, so that no file is left behind.
    """
    if not folder.is_dir():
        yield  # there is nothing to keep anybody out of
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        # Some network file systems lock no folders; there one goes without.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def remove_leftovers(paths: Iterable[Path]) -> None:
    """Remove what a process that was killed prepared for these files; call it under the lock."""
    for path in paths:
        for file in path.parent.glob(f".{glob.escape(path.name)}{MARK}*"):
            file.unlink(missing_ok=True)


def write_files(wanted: dict[Path, bytes | None]) -> None:
    """Write all files, or none: prepare them all beside their places, then move them there.

    Parameters
    ----------
    wanted : dict
        Path of a file to its content; None stands for a file to remove.

    Raises
    ------
    PatchError
        If a move failed, and one before it could not be undone.
    """
    before: dict[Path, tuple[bytes, os.stat_result] | None] = {}
    made: list[Path] = []
    try:
        prepared = {path: _prepare(path, content, made) for path, content in wanted.items()}
        for path, new in prepared.items():
            before[path] = (path.read_bytes(), path.stat()) if path.exists() else None
            _move(new, path)
    except BaseException as error:
        stuck = [str(path) for path, old in before.items() if not _restore(path, old, made)]
        if stuck:
            raise PatchError(
                f"{error}; and these files could not be put back: {', '.join(stuck)}. The tree is "
                "partly patched: apply or revert once more when the cause is gone"
            ) from error
        raise
    finally:
        for file in made:
            file.unlink(missing_ok=True)


def _restore(path: Path, old: tuple[bytes, os.stat_result] | None, made: list[Path]) -> bool:
    try:
        if old is None:
            path.unlink(missing_ok=True)
        else:
            content, status = old
            _move(_prepare(path, content, made, status), path)
    except OSError:
        return False
    return True


def _prepare(
    path: Path, content: bytes | None, made: list[Path], like: os.stat_result | None = None
) -> Path | None:
    """Write a file beside its place, with the mode and, if that can be, the owner of the old."""
    if content is None:
        return None
    if like is None and path.exists():
        like = path.stat()
    handle, name = tempfile.mkstemp(prefix=f".{path.name}{MARK}", dir=path.parent)
    made.append(Path(name))
    with os.fdopen(handle, "wb") as file:
        file.write(content)
        if like is not None and (like.st_uid, like.st_gid) != (os.geteuid(), os.getegid()):
            with contextlib.suppress(OSError):
                os.fchown(file.fileno(), like.st_uid, like.st_gid)
        os.fchmod(file.fileno(), stat.S_IMODE(like.st_mode) if like is not None else 0o644)
    return Path(name)


def _move(new: Path | None, path: Path) -> None:
    if new is None:
        path.unlink(missing_ok=True)
    else:
        os.replace(new, path)
