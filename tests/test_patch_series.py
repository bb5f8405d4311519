# SPDX-License-Identifier: Apache-2.0
"""The patches that are shipped: up to date, ours alone, and as good by hand as by the tool."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from te_tree import (
    FUSED_ROPE,
    ROOT,
    TREES_VARIABLE,
    copy_touched,
    load_refresh,
    real_trees,
    snapshot,
    write_tree,
)

from transformer_engine_overlay import __version__
from transformer_engine_overlay.patch_series import (
    FileChange,
    Insertion,
    Patch,
    PatchError,
    git_blob_id,
    patches_folder,
    read_changes,
    read_series,
    write_changes,
)
from transformer_engine_overlay.source_tree import APPLIED, apply_series, read_tree, revert_series
from transformer_engine_overlay.te_versions import RELEASES

PATCHES = ROOT / "patches"
COMMON = ROOT / "transformer_engine_overlay" / "common" / "fused_rope"
SERIES = [patch.name for patch in read_series(PATCHES)]


class TestShipped:
    def test_up_to_date(self) -> None:
        """On failure: python ci/refresh_patches.py --te-source TREE ..."""
        assert load_refresh().drifted() == []

    def test_installed_ones_are_these(self) -> None:
        """On failure: install the package again."""
        installed = {file.name: file.read_bytes() for file in patches_folder().glob("*.patch")}
        assert installed == {file.name: file.read_bytes() for file in PATCHES.glob("*.patch")}

    def test_series_names_each_patch_once(self) -> None:
        assert sorted(file.name for file in PATCHES.glob("*.patch")) == SERIES

    def test_all_headers_travel(self) -> None:
        (kernels,) = (p for p in read_series(PATCHES) if p.step == "0001")
        names = {Path(change.path).name for change in kernels.changes}
        assert names == {file.name for file in COMMON.iterdir()}

    def test_each_supported_release_has_its_launcher_branch(self) -> None:
        blobs = [
            change.old_blob
            for patch in read_series(PATCHES)
            for change in patch.changes
            if change.path == FUSED_ROPE
        ]
        supported = [release.blob for release in RELEASES if release.supported]
        assert sorted(blob[:10] for blob in blobs) == sorted(supported)

    @pytest.mark.parametrize("name", SERIES)
    def test_header(self, name: str) -> None:
        head = (PATCHES / name).read_text().partition("\n---\n")[0]
        fields = re.findall(r"^([A-Z][\w-]+): \S", head, re.MULTILINE)
        assert fields == [
            "Description",
            "Origin",
            "Bug",
            "Forwarded",
            "Applied-Upstream",
            "Last-Update",
        ]
        assert re.search(r"^Last-Update: \d{4}-\d\d-\d\d$", head, re.MULTILINE)

    def test_exported_version_is_ours(self) -> None:
        text = (COMMON / "thd_te_branch.cuh").read_text()
        assert re.findall(r'kOverlayVersion = "(.*)"', text) == [__version__]

    @pytest.mark.parametrize("name", SERIES)
    def test_written_again_it_is_the_same(self, name: str) -> None:
        text = (PATCHES / name).read_bytes()
        assert text.endswith(b"\n---\n" + write_changes(read_changes(name, text)))


@pytest.mark.parametrize("name", SERIES)
def test_every_line_is_ours(name: str) -> None:
    """Each hunk only adds, and each added line stands in a file of ours."""
    refresh = load_refresh()
    ours = {text for step in refresh.STEPS if step.path for text in step_lines(refresh, step)}
    for step in refresh.STEPS:
        for file in step.sources().values():
            ours |= set(file.read_bytes().splitlines(keepends=True))
    body = (PATCHES / name).read_bytes().partition(b"\n---\n")[2]
    heads = (b"diff --git ", b"index ", b"new file mode ", b"--- ", b"+++ ", b"@@ ")
    for line in body.splitlines(keepends=True):
        if line.startswith(heads):
            # behind the second @@ git writes a line of the file that is patched
            assert re.fullmatch(rb"@@ -\d+,0 \+\d+(,\d+)? @@\n", line) or line[:2] != b"@@"
            continue
        assert line.startswith(b"+")
        assert line[1:] in ours


def step_lines(refresh: object, step: object) -> list[bytes]:
    return [line for text in refresh.expected_insertions(step) for line in text]  # type: ignore[attr-defined]


HEAD = f"diff --git a/f b/f\nindex {'1' * 40}..{'2' * 40} 100644\n--- a/f\n+++ b/f\n".encode()


@pytest.mark.parametrize(
    "hunk",
    [
        b"@@ -1,0 +2,2 @@\n+a\n context\n",
        b"@@ -1 +1 @@\n-removed\n+a\n",
        b"@@ -1,2 +1,3 @@\n b\n+a\n c\n",
        b"@@ -1,0 +2,3 @@\n+a\n",
        b"@@ -1,0 +3 @@\n+a\n",
        b"@@ -5,0 +6 @@\n+a\n@@ -2,0 +4 @@\n+a\n",
        b"@@ -1,0 +2 @@ void theirs() {\n+a\n",
        b"@@ -1,0 +2 @@\n+a\nrename from x\n",
        b"",
    ],
)
def test_other_than_an_insertion_is_not_read(hunk: bytes) -> None:
    with pytest.raises(PatchError, match="reinstall"):
        read_changes("x.patch", HEAD + hunk)


def test_damaged_patch_does_not_apply() -> None:
    old, new = b"a\nb\n", b"a\nx\nb\n"
    blobs = git_blob_id(old), git_blob_id(new)
    good = FileChange("f", *blobs, (Insertion(1, (b"x\n",)),))
    assert good.apply(old) == new
    assert good.revert(new) == old
    bad = FileChange("f", *blobs, (Insertion(1, (b"y\n",)),))
    with pytest.raises(PatchError, match="f: the patch does not lead to blob"):
        bad.apply(old)


def test_blob_id_is_that_of_git(tmp_path: Path) -> None:
    file = tmp_path / "f"
    for content in (b"", b"a\r\nb\n\0"):
        file.write_bytes(content)
        done = subprocess.run(["git", "hash-object", file], capture_output=True, check=True)
        assert done.stdout.decode().strip() == git_blob_id(content)


class TestDrift:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        return Path(shutil.copytree(PATCHES, tmp_path / "patches"))

    @pytest.mark.parametrize("name", SERIES)
    def test_an_older_patch_is_found(self, folder: Path, name: str) -> None:
        file = folder / name
        head, separator, body = file.read_text().partition("+++ b/")
        lines = body.splitlines(keepends=True)
        index = next(i for i, line in enumerate(lines) if i and line.startswith("+"))
        lines[index] = "+an older line\n"
        file.write_text(head + separator + "".join(lines))
        (complaint,) = load_refresh().drifted(folder)
        assert complaint == f"{name}: it differs from our sources"

    def test_a_missing_patch_is_found(self, folder: Path) -> None:
        (folder / "0003-tests.patch").unlink()
        assert load_refresh().drifted(folder) == ["0003-tests: there is no patch"]

    def test_refreshing_anew_changes_nothing(self, folder: Path) -> None:
        before = snapshot(folder)
        load_refresh().refresh([], folder)
        assert snapshot(folder) == before

    def test_changed_source_is_dated_anew(
        self, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        refresh = load_refresh()
        sources = Path(shutil.copytree(refresh.TE_TREE, tmp_path / "tree"))
        (sources / "tests" / "pytorch" / "test_new.py").write_text(f"# {refresh.SPDX}\n")
        monkeypatch.setattr(refresh, "TE_TREE", sources)
        names = ("0003-tests.patch", "0004-benchmark.patch")
        for file in (folder / name for name in names):
            text = re.sub("(?m)^Last-Update: .*", "Last-Update: 2020-01-01", file.read_text())
            file.write_text(text)
        refresh.refresh([], folder)
        tests, benchmark = ((folder / name).read_text() for name in names)
        assert "test_new.py" in tests
        assert "2020-01-01" not in tests
        assert "2020-01-01" in benchmark


class TestRefresh:
    def test_tree_that_is_patched_already(self, tmp_path: Path) -> None:
        refresh = load_refresh()
        tree = write_tree(tmp_path / "tree")
        refresh.refresh([tree], tmp_path / "patches")
        text = (tree / FUSED_ROPE).read_text()
        (tree / FUSED_ROPE).write_text(text + '#include "../utils.cuh"\n')
        with pytest.raises(refresh.AnchorError, match=r"2 lines match .* patched already"):
            refresh.refresh([tree], tmp_path / "patches")

    def test_header_of_a_pull_request(self, tmp_path: Path) -> None:
        refresh = load_refresh()
        refresh.refresh([], tmp_path / "patches", "Copyright (c) 2030, Somebody\n\nSee LICENSE.\n")
        text = (tmp_path / "patches" / "0001-token-linear-kernels.patch").read_text()
        assert "\n+// Copyright (c) 2030, Somebody\n+//\n+// See LICENSE.\n" in text
        assert refresh.SPDX not in text
        text = (tmp_path / "patches" / "0003-tests.patch").read_text()
        assert "\n+# Copyright (c) 2030, Somebody\n+#\n+# See LICENSE.\n" in text
        assert refresh.SPDX not in text


def contents(tree: Path) -> dict[str, str]:
    """Leave out the modes, of which git knows two alone."""
    return {name: state.split()[1] for name, state in snapshot(tree).items()}


def git_apply(tree: Path, patch: Path) -> None:
    subprocess.run(["git", "apply", "--unidiff-zero", patch], cwd=tree, check=True)


def patch_p1(tree: Path, patch: Path) -> None:
    subprocess.run(["patch", "-p1", "--quiet", "-i", patch], cwd=tree, check=True)


@pytest.mark.parametrize("by_hand", [git_apply, patch_p1])
class TestByHand:
    """README's manual way leads where the tool leads."""

    def check(
        self, tree: Path, series: list[Patch], folder: Path, by_hand: Callable[..., None]
    ) -> None:
        if shutil.which("patch" if by_hand is patch_p1 else "git") is None:
            pytest.skip(f"{by_hand.__name__}: there is no such command")
        before = contents(tree)
        names = list(apply_series(tree, series).patches)
        by_tool = contents(tree)
        revert_series(tree, series)
        assert contents(tree) == before
        for name in names:
            by_hand(tree, folder / name)
        assert contents(tree) == by_tool
        assert read_tree(tree, series).state == APPLIED
        revert_series(tree, series)
        assert contents(tree) == before

    def test_stand_in(self, tmp_path: Path, by_hand: Callable[..., None]) -> None:
        tree = write_tree(tmp_path / "tree")
        load_refresh().refresh([tree], tmp_path / "patches")
        series = read_series(tmp_path / "patches")
        self.check(tree, series, tmp_path / "patches", by_hand)

    @pytest.mark.parametrize("tree", real_trees() or [None], ids=lambda t: t.name if t else "none")
    def test_real_tree(
        self, tmp_path: Path, tree: Path | None, by_hand: Callable[..., None]
    ) -> None:
        if tree is None:
            pytest.skip(f"needs TransformerEngine's source: {TREES_VARIABLE} names no tree")
        copy = copy_touched(tree, tmp_path / "tree")
        self.check(copy, read_series(), patches_folder(), by_hand)


@pytest.mark.parametrize("tree", real_trees() or [None], ids=lambda t: t.name if t else "none")
class TestRealTree:
    @pytest.fixture(autouse=True)
    def needs_tree(self, tree: Path | None) -> None:
        if tree is None:
            pytest.skip(f"needs TransformerEngine's source: {TREES_VARIABLE} names no tree")

    def test_series_is_what_the_tree_makes_of_our_sources(self, tree: Path, tmp_path: Path) -> None:
        folder = Path(shutil.copytree(PATCHES, tmp_path / "patches"))
        refresh = load_refresh()
        for step in refresh.STEPS:
            if step.insertions is not None and step.path == FUSED_ROPE:
                change = refresh.inserted(step, tree)
                name = f"{step.name}-{change.old_blob[:10]}.patch"
                assert read_changes(name, (folder / name).read_bytes()) == (change,)

    def test_no_line_of_the_launcher_is_theirs(self, tree: Path) -> None:
        theirs = set((tree / FUSED_ROPE).read_text().splitlines())
        refresh = load_refresh()
        (step,) = (step for step in refresh.STEPS if step.path == FUSED_ROPE)
        lines = [line.decode().rstrip("\n") for line in step_lines(refresh, step)]
        trivial = {"", "}", "  }", "    return;"}
        assert [line for line in lines if line in theirs and line not in trivial] == []
