# SPDX-License-Identifier: Apache-2.0
"""Trees whose patching was interrupted, or is done by several processes at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from te_tree import FUSED_ROPE, load_refresh, snapshot, write_tree

from transformer_engine_overlay import source_tree, tree_write
from transformer_engine_overlay.patch_series import Patch, PatchError, read_series
from transformer_engine_overlay.source_tree import apply_series, revert_series

# In a process of its own: PACKAGE ACTION TREE PATCHES, killed before the move of this number, or
# never (-1). A bare package in place of ours spares it the import of torch.
PROGRAM = """
import os, signal, sys, types
from pathlib import Path

package, action, tree, patches, fatal = sys.argv[1:]
sys.modules["transformer_engine_overlay"] = bare = types.ModuleType("transformer_engine_overlay")
bare.__path__ = [package]
from transformer_engine_overlay import source_tree, tree_write
from transformer_engine_overlay.patch_series import read_series

move, left = tree_write._move, int(fatal)

def fatal_move(new, path):
    global left
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left -= 1
    move(new, path)

tree_write._move = fatal_move
getattr(source_tree, action)(Path(tree), read_series(Path(patches)))
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "tree")


@pytest.fixture
def series(tmp_path: Path, tree: Path) -> list[Patch]:
    load_refresh().refresh([tree], tmp_path / "patches")
    return read_series(tmp_path / "patches")


def start(action: str, tree: Path, fatal: int = -1) -> subprocess.Popen[bytes]:
    package = Path(source_tree.__file__).parent
    arguments = [package, action, tree, tree.parent / "patches", str(fatal)]
    return subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments], stderr=subprocess.PIPE)


@pytest.mark.parametrize("moves", [0, 2, 11])
@pytest.mark.parametrize("killed", ["apply_series", "revert_series"])
@pytest.mark.parametrize("then", [apply_series, revert_series])
def test_killed_process_leaves_nothing_that_the_next_does_not_mend(
    tree: Path, series: list[Patch], moves: int, killed: str, then: object
) -> None:
    original = snapshot(tree)
    apply_series(tree, series)
    patched = snapshot(tree)
    if killed == "apply_series":
        revert_series(tree, series)
    begin = snapshot(tree)
    process = start(killed, tree, moves)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, errors.decode()
    assert snapshot(tree) != begin or (killed, moves) == ("revert_series", 0)
    states = {file.state for file in source_tree.read_tree(tree, series).files}
    assert states <= {source_tree.ORIGINAL, source_tree.PATCHED}
    assert callable(then)
    then(tree, series)
    assert snapshot(tree) == (patched if then is apply_series else original)


def test_foreign_files_beside_ours_stay(tree: Path, series: list[Patch]) -> None:
    """Only what carries our mark is a leftover."""
    folder = (tree / FUSED_ROPE).parent
    names = (".fused_rope.cu.swp", "fused_rope.cu.orig", ".fused_rope.cu.abcd1234")
    for name in names:
        (folder / name).write_text("another's\n")
    before = snapshot(tree)
    (folder / f".fused_rope.cu{tree_write.MARK}abcd1234").write_text("ours\n")
    apply_series(tree, series)
    revert_series(tree, series)
    assert snapshot(tree) == before


def test_processes_at_once_wait_for_each_other(tree: Path, series: list[Patch]) -> None:
    """Whatever their order, each finds a tree that is whole."""
    original = snapshot(tree)
    apply_series(tree, series)
    patched = snapshot(tree)
    processes = [start(action, tree) for action in ("revert_series", "apply_series") * 3]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors.decode()
    assert snapshot(tree) in (original, patched)


def test_second_process_waits_for_the_first(tree: Path, series: list[Patch]) -> None:
    before = snapshot(tree)
    with tree_write.locked(tree / source_tree.MARKER):
        process = start("apply_series", tree)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2)
        assert snapshot(tree) == before
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert source_tree.read_tree(tree, series).state == source_tree.APPLIED


def test_failure_that_cannot_be_undone_is_told(
    tree: Path, series: list[Patch], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fills up, and stays full: the tree can still be mended later."""
    before = snapshot(tree)
    move, left = tree_write._move, 2

    def failing_move(new: Path | None, path: Path) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError("no space left")
        move(new, path)

    apply_series(tree, series)
    with monkeypatch.context() as patch:
        patch.setattr(tree_write, "_move", failing_move)
        with pytest.raises(PatchError, match=r"no space left; .*could not be put back: .*thd_"):
            revert_series(tree, series)
    assert source_tree.read_tree(tree, series).state == source_tree.PARTLY
    revert_series(tree, series)
    assert snapshot(tree) == before


def test_mode_survives_a_failed_removal(
    tree: Path, series: list[Patch], monkeypatch: pytest.MonkeyPatch
) -> None:
    apply_series(tree, series)
    new = next(file.change.path for file in apply_series(tree, series).files)
    (tree / new).chmod(0o600)
    before = snapshot(tree)
    move, left = tree_write._move, 1

    def failing_move(new: Path | None, path: Path) -> None:
        nonlocal left
        left -= 1
        if left == -1:
            raise OSError("interrupted")
        move(new, path)

    monkeypatch.setattr(tree_write, "_move", failing_move)
    with pytest.raises(OSError, match="interrupted"):
        revert_series(tree, series)
    assert snapshot(tree) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_owner_stays(tree: Path, series: list[Patch]) -> None:
    """Root in a container, on the tree of a user outside it."""
    file = tree / FUSED_ROPE
    os.chown(file, 12345, 23456)
    file.chmod(0o440)
    before = snapshot(tree)
    for action in (apply_series, revert_series):
        action(tree, series)
        assert (file.stat().st_uid, file.stat().st_gid) == (12345, 23456)
    assert snapshot(tree) == before
