# SPDX-License-Identifier: Apache-2.0
"""`te-overlay patch`: check, apply, revert and status, on trees of our own making."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from te_tree import FUSED_ROPE, TEST_LIST, VARIABLES, load_refresh, snapshot, write_tree
from typer.testing import CliRunner

from transformer_engine_overlay import source_tree, tree_write
from transformer_engine_overlay.cli import app
from transformer_engine_overlay.patch_series import Patch, PatchError, git_blob_id, read_series
from transformer_engine_overlay.source_tree import apply_series, check_tree, revert_series

KERNEL = "transformer_engine/common/fused_rope/thd_launch.cuh"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    return write_tree(tmp_path / "tree")


@pytest.fixture
def series(tmp_path: Path, tree: Path) -> list[Patch]:
    """Patches for two stand-ins for releases, of which `tree` is one."""
    other = write_tree(tmp_path / "other", "another release")
    load_refresh().refresh([other, tree], tmp_path / "patches")
    return read_series(tmp_path / "patches")


class TestRoundTrip:
    def test_apply_and_revert(self, tree: Path, series: list[Patch]) -> None:
        (tree / FUSED_ROPE).chmod(0o755)
        before = snapshot(tree)
        assert apply_series(tree, series).state == source_tree.NOT_APPLIED
        text = (tree / FUSED_ROPE).read_text()
        assert text.index('#include "../utils.cuh"') < text.index('#include "thd_te_branch.cuh"')
        forward, backward = text.split("void fused_rope_backward(const")
        assert "{\n  if (thd_rope::launch_if_token_linear(\n          input, " in forward
        assert "{\n  if (thd_rope::launch_if_token_linear(\n          output_grads, " in backward
        assert "/*transpose=*/false" in forward
        assert "/*transpose=*/true" in backward
        assert (tree / KERNEL).is_file()
        assert "NVTE_FUSED_ROPE_THD_TOKEN_LINEAR" in (tree / VARIABLES).read_text()
        assert "test_fused_rope_thd_token_linear.py" in (tree / TEST_LIST).read_text()
        assert snapshot(tree)[FUSED_ROPE].startswith("100755 ")
        assert revert_series(tree, series).state == source_tree.APPLIED
        assert snapshot(tree) == before

    def test_twice_is_once(self, tree: Path, series: list[Patch]) -> None:
        before = snapshot(tree)
        apply_series(tree, series)
        applied = snapshot(tree)
        assert apply_series(tree, series).state == source_tree.APPLIED
        assert snapshot(tree) == applied
        revert_series(tree, series)
        assert revert_series(tree, series).state == source_tree.NOT_APPLIED
        assert snapshot(tree) == before

    def test_half_a_series_is_completed_or_taken_out(self, tree: Path, series: list[Patch]) -> None:
        before = snapshot(tree)
        apply_series(tree, series)
        applied = snapshot(tree)
        (tree / KERNEL).unlink()
        assert apply_series(tree, series).state == source_tree.PARTLY
        assert snapshot(tree) == applied
        (tree / KERNEL).unlink()
        revert_series(tree, series)
        assert snapshot(tree) == before

    def test_each_release_gets_its_own_variant(self, tmp_path: Path, series: list[Patch]) -> None:
        other = tmp_path / "other"
        names = set(check_tree(other, series).patches)
        apply_series(other, series)
        assert names != set(check_tree(tmp_path / "tree", series).patches)
        assert (other / FUSED_ROPE).read_text().count("launch_if_token_linear") == 2


def shift(tree: Path) -> str:
    file = tree / FUSED_ROPE
    file.write_text("\n" + file.read_text())
    return f"{FUSED_ROPE} is blob {git_blob_id(file.read_bytes())[:10]}; expected was "


def remove(tree: Path) -> str:
    (tree / FUSED_ROPE).unlink()
    return f"{FUSED_ROPE} is missing; expected was "


def occupy(tree: Path) -> str:
    (tree / KERNEL).write_text("somebody else's\n")
    return f"{KERNEL} is blob "


def link(tree: Path) -> str:
    file = tree / FUSED_ROPE
    file.rename(file.with_suffix(".real"))
    file.symlink_to(file.with_suffix(".real"))
    return f"{FUSED_ROPE} is not a plain file"


def occupy_by_folder(tree: Path) -> str:
    (tree / KERNEL).mkdir()
    return f"{KERNEL} is not a plain file"


@pytest.mark.parametrize("change", [shift, remove, occupy, link, occupy_by_folder])
@pytest.mark.parametrize("action", [check_tree, apply_series, revert_series])
def test_changed_tree_is_refused_untouched(
    tree: Path,
    series: list[Patch],
    change: Callable[[Path], str],
    action: Callable[..., object],
) -> None:
    complaint = change(tree)
    before = snapshot(tree)
    with pytest.raises(PatchError) as error:
        action(tree, series)
    assert complaint in str(error.value)
    assert "nothing was written" in str(error.value)
    assert snapshot(tree) == before


def test_every_expected_blob_is_named(tree: Path, series: list[Patch]) -> None:
    known = [git_blob_id((tree.parent / n / FUSED_ROPE).read_bytes()) for n in ("tree", "other")]
    shift(tree)
    with pytest.raises(PatchError) as error:
        check_tree(tree, series)
    assert all(blob[:10] in str(error.value) for blob in known)


def test_patched_file_that_was_edited_is_refused(tree: Path, series: list[Patch]) -> None:
    apply_series(tree, series)
    (tree / KERNEL).write_text((tree / KERNEL).read_text() + "\n")
    with pytest.raises(PatchError, match=r"thd_launch\.cuh is blob"):
        revert_series(tree, series)


def test_optional_patches_do_not_stand_in_the_way(tree: Path, series: list[Patch]) -> None:
    (tree / VARIABLES).write_text("another text\n")
    (tree / TEST_LIST).unlink()
    skipped = apply_series(tree, series).skipped
    assert ["docs" in names for names in skipped] == [True, False]
    assert (tree / VARIABLES).read_text() == "another text\n"
    assert check_tree(tree, series).state == source_tree.APPLIED


@pytest.mark.parametrize("action", [apply_series, revert_series])
@pytest.mark.parametrize("moves", [0, 1, 3])
def test_failure_in_the_middle_leaves_the_tree_as_it_was(
    tree: Path,
    series: list[Patch],
    monkeypatch: pytest.MonkeyPatch,
    action: Callable[..., object],
    moves: int,
) -> None:
    if action is revert_series:
        apply_series(tree, series)
    before = snapshot(tree)
    done = 0
    move = tree_write._move

    def failing_move(new: Path | None, path: Path) -> None:
        nonlocal done
        done += 1
        if done == moves + 1:
            raise OSError("no space left")
        move(new, path)

    monkeypatch.setattr(tree_write, "_move", failing_move)
    with pytest.raises(OSError, match="no space left"):
        action(tree, series)
    assert done > moves
    assert snapshot(tree) == before


@pytest.mark.parametrize("action", [check_tree, apply_series])
def test_missing_folder_is_named(
    tree: Path, series: list[Patch], action: Callable[..., object]
) -> None:
    (tree / "benchmarks" / "README").unlink()
    (tree / "benchmarks").rmdir()
    before = snapshot(tree)
    with pytest.raises(PatchError, match=r"there is no folder .*benchmarks"):
        action(tree, series)
    assert snapshot(tree) == before


def test_folder_that_went_missing_is_not_in_the_way_of_a_revert(
    tree: Path, series: list[Patch]
) -> None:
    before = snapshot(tree)
    apply_series(tree, series)
    shutil.rmtree(tree / "benchmarks")
    revert_series(tree, series)
    del before["benchmarks/README"]
    assert snapshot(tree) == before


@pytest.mark.parametrize("release", ["tree", "other"])
@pytest.mark.parametrize("patched", [False, True])
def test_crlf_line_ends_are_recognised(
    tree: Path, series: list[Patch], release: str, patched: bool
) -> None:
    tree = tree.parent / release
    if patched:
        apply_series(tree, series)
    file = tree / FUSED_ROPE
    blob = git_blob_id(file.read_bytes())
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    with pytest.raises(PatchError, match=f"which is {blob[:10]} with CRLF line ends"):
        check_tree(tree, series)


def test_other_folder_is_no_tree(tmp_path: Path) -> None:
    with pytest.raises(PatchError, match="is no source tree of TransformerEngine"):
        check_tree(tmp_path, [])


class TestCommand:
    @pytest.fixture
    def run(self, series: list[Patch], monkeypatch: pytest.MonkeyPatch) -> Callable[..., object]:
        monkeypatch.setattr(source_tree, "read_series", lambda: series)

        def run(action: str, tree: Path, code: int = 0) -> str:
            result = CliRunner().invoke(app, ["patch", action, "--te-source", str(tree)])
            assert result.exit_code == code, result.output
            return result.output

        return run

    def test_life_of_a_tree(self, run: Callable[..., str], tree: Path) -> None:
        before = snapshot(tree)
        assert "the patches fit" in run("check", tree)
        assert "0001-token-linear-kernels.patch: not applied" in run("status", tree)
        assert snapshot(tree) == before
        count = len(before)
        assert "the patches are in place, build it now" in run("apply", tree)
        written = len(snapshot(tree)) - count + 3  # three files have lines inserted
        assert f"({written} files written)" in run("revert", tree)
        assert "(0 files written)" in run("revert", tree)
        assert snapshot(tree) == before
        run("apply", tree)
        assert "the patches are in place" in run("check", tree)
        assert "(0 files written)" in run("apply", tree)
        status = run("status", tree)
        assert f"patched   {FUSED_ROPE}" in status
        assert status.strip().endswith("applied")

    def test_refusal(self, run: Callable[..., str], tree: Path) -> None:
        complaint = shift(tree)
        for action in ("check", "apply", "revert"):
            assert complaint in " ".join(run(action, tree, code=2).split())
        assert f"changed   {FUSED_ROPE}" in run("status", tree, code=1)

    def test_names_are_shown_as_they_are(self, run: Callable[..., str], tree: Path) -> None:
        odd = tree.parent / "a [b] [" / "b] :cat: 'c"
        odd.parent.mkdir()
        tree.rename(odd)
        assert f"{odd}: the patches are in place" in run("apply", odd)
        shift(odd)
        assert str(odd) in " ".join(run("revert", odd, code=2).split())

    def test_no_tree(self, run: Callable[..., str], tmp_path: Path) -> None:
        assert "is no source tree" in " ".join(run("apply", tmp_path, code=2).split())

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    def test_read_only_tree(self, run: Callable[..., str], tree: Path) -> None:
        (tree / "benchmarks").chmod(0o555)
        before = snapshot(tree)
        assert "Permission denied" in run("apply", tree, code=2)
        assert snapshot(tree) == before
