# SPDX-License-Identifier: Apache-2.0
"""Finding TransformerEngine's packages, module and libraries, and what can be wrong with them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from te_stub import write_stub
from te_wheels import ALL_WHEELS, LIBRARIES, WHEELS, add_libraries, add_package, texts, write_te

from transformer_engine_overlay import te_install
from transformer_engine_overlay.findings import NOTE, PROBLEM, Finding
from transformer_engine_overlay.te_install import Install


def packages(folder: Path, **pure: bool | None) -> Install:
    for name, value in pure.items():
        add_package(folder, name, pure=value)
    return Install(packages=te_install.find_packages([str(folder)]))


class TestPackages:
    def test_healthy(self, tmp_path: Path) -> None:
        assert te_install.check_packages(packages(tmp_path, **ALL_WHEELS), "13.0") == []

    def test_built_from_source(self, tmp_path: Path) -> None:
        assert te_install.check_packages(packages(tmp_path, transformer_engine=False), "13.0") == []

    def test_none(self) -> None:
        assert te_install.check_packages(Install(), "13.0") == []

    def test_names_are_normalised(self, tmp_path: Path) -> None:
        add_package(tmp_path, "Transformer.Engine_cu13")
        assert list(te_install.find_packages([str(tmp_path)])) == ["transformer-engine-cu13"]

    def test_p08_mismatch(self, tmp_path: Path) -> None:
        add_package(tmp_path, "transformer_engine_torch", "2.17.0")
        found = te_install.check_packages(packages(tmp_path, **WHEELS), "13.0")
        for part in (
            "transformer-engine 2.18.0, transformer-engine-cu13 2.18.0, "
            "transformer-engine-torch 2.17.0",
            'pip install --no-build-isolation "transformer-engine[pytorch]==2.18.0"',
        ):
            assert part in texts(found)

    def test_p08_two_cores(self, tmp_path: Path) -> None:
        install = packages(tmp_path, **ALL_WHEELS, transformer_engine_cu12=False)
        found = texts(te_install.check_packages(install, "13.0"))
        assert "transformer-engine-cu12 2.18.0 and transformer-engine-cu13 2.18.0" in found

    def test_p03_empty_metapackage(self, tmp_path: Path) -> None:
        found = te_install.check_packages(packages(tmp_path, transformer_engine=True), "13.0")
        assert "empty metapackage" in texts(found)
        assert "transformer-engine[pytorch]" in texts(found)

    def test_core_without_metapackage(self, tmp_path: Path) -> None:
        found = te_install.check_packages(packages(tmp_path, transformer_engine_cu13=False), "13.0")
        assert "without the package transformer-engine" in texts(found)

    def test_extension_without_core(self, tmp_path: Path) -> None:
        install = packages(tmp_path, transformer_engine=True, transformer_engine_torch=False)
        assert "without a core" in texts(te_install.check_packages(install, "13.0"))

    def test_source_build_beside_wheels(self, tmp_path: Path) -> None:
        install = packages(tmp_path, **{**ALL_WHEELS, "transformer_engine": False})
        assert "built from source, but" in texts(te_install.check_packages(install, "13.0"))

    def test_core_of_another_cuda_is_a_note(self, tmp_path: Path) -> None:
        found = te_install.check_packages(packages(tmp_path, **ALL_WHEELS), "12.8")
        assert "for another CUDA than torch" in texts(found, NOTE)
        assert not texts(found)

    def test_two_copies(self, tmp_path: Path) -> None:
        add_package(tmp_path / "user", "transformer_engine", "2.12.0")
        install = packages(tmp_path, **ALL_WHEELS)
        assert te_install.check_copies(install) == []
        both = te_install.find_packages([str(tmp_path), str(tmp_path / "user"), str(tmp_path)])
        (finding,) = te_install.check_copies(Install(packages=both))
        assert f"2.18.0 in {tmp_path}, then 2.12.0 in {tmp_path}/user" in finding.what

    def test_damaged_metadata(self, tmp_path: Path) -> None:
        (tmp_path / "transformer_engine-2.18.0.dist-info").mkdir()
        (package,) = te_install.find_packages([str(tmp_path)])["transformer-engine"]
        assert package.version == "unknown"


class TestModule:
    @pytest.fixture
    def site(self, tmp_path: Path) -> Path:
        return write_te(tmp_path / "site")

    @pytest.fixture
    def checkout(self, tmp_path: Path) -> Path:
        init = tmp_path / "checkout" / "transformer_engine" / "__init__.py"
        init.parent.mkdir(parents=True)
        init.touch()
        return tmp_path / "checkout"

    def find(self, path: list[Path | str], cwd: Path) -> tuple[Install, list[Finding]]:
        install = te_install.find_install([str(p) for p in path], cwd, cwd / "none")
        return install, te_install.check_module(install, cwd)

    def test_healthy(self, site: Path, tmp_path: Path) -> None:
        install, found = self.find([site], tmp_path)
        assert found == []
        assert install.module == install.installed == site / "transformer_engine"
        assert install.version == "2.18.0"
        assert "transformer_engine" not in sys.modules

    def test_none(self, tmp_path: Path) -> None:
        install, found = self.find([tmp_path], tmp_path)
        assert (install.module, install.version, found) == (None, "", [])

    @pytest.mark.parametrize("first", ["", "checkout"])
    def test_p05_checkout_hides_the_install(
        self, site: Path, checkout: Path, first: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(checkout)
        _, found = self.find([first and checkout, site], checkout)
        assert f"{checkout}/transformer_engine, hides the one in {site}" in texts(found)
        assert "another folder" in texts(found)

    def test_checkout_without_an_install(self, checkout: Path) -> None:
        assert "source folder that is not installed" in texts(self.find([checkout], checkout)[1])

    def test_checkout_off_the_path_is_a_note(self, site: Path, checkout: Path) -> None:
        _, found = self.find([site], checkout)
        assert "`python -m` and `python -c`" in texts(found, NOTE)
        assert not texts(found)

    def test_p05_editable_install_of_the_current_folder(self, checkout: Path) -> None:
        assert self.find([checkout, "/lib", checkout], checkout)[1] == []

    def test_finder_of_an_editable_install(
        self, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Finder:
            @staticmethod
            def find_spec(name: str, path: object = None, target: object = None) -> object:
                return sys.meta_path[-1].find_spec(name, [str(site)])

        monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
        assert te_install.find_module([str(tmp_path)]) == site / "transformer_engine"

    def test_metadata_without_a_module(self, tmp_path: Path) -> None:
        add_package(tmp_path, "transformer_engine", pure=True)
        (tmp_path / "transformer_engine" / "wheel_lib").mkdir(parents=True)
        assert "no module transformer_engine" in texts(self.find([tmp_path], tmp_path)[1])


class TestLibraries:
    def check(self, site: Path, purelib: Path) -> list[Finding]:
        install = te_install.find_install([str(site)], site, purelib)
        return te_install.check_libraries(install, purelib)

    def test_healthy(self, tmp_path: Path) -> None:
        assert self.check(write_te(tmp_path), tmp_path) == []

    @pytest.mark.parametrize("library", LIBRARIES)
    def test_p05_missing(self, tmp_path: Path, library: str) -> None:
        site = write_te(tmp_path / "site")
        (site / library).unlink()
        (finding,) = self.check(site, tmp_path / "purelib")
        prefix = Path(library).stem
        assert f"{prefix}*.so, is missing: it is not in {site}, nor" in finding.what
        assert finding.level == PROBLEM

    def test_missing_in_a_source_build(self, tmp_path: Path) -> None:
        write_stub(tmp_path)
        assert "build it again" in texts(self.check(tmp_path, tmp_path))

    def test_p05_in_purelib(self, tmp_path: Path) -> None:
        site, purelib = write_te(tmp_path / "site"), tmp_path / "purelib"
        for library in LIBRARIES:
            (site / library).unlink()
        (purelib / "transformer_engine").mkdir(parents=True)
        add_libraries(purelib)
        assert self.check(site, purelib) == []

    def test_twice(self, tmp_path: Path) -> None:
        add_libraries(write_te(tmp_path), ("transformer_engine/transformer_engine_torch.x.so",))
        assert "is there 2 times" in texts(self.check(tmp_path, tmp_path))

    def test_empty_metapackage_says_it_all(self, tmp_path: Path) -> None:
        write_stub(tmp_path)
        add_package(tmp_path, "transformer_engine", pure=True)
        assert self.check(tmp_path, tmp_path) == []
