# SPDX-License-Identifier: Apache-2.0
"""Where TransformerEngine is installed and whether its packages fit; imports none of them."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path

from transformer_engine_overlay.findings import NOTE, PROBLEM, Finding

MODULE = "transformer_engine"
META = "transformer-engine"
CORES = ("transformer-engine-cu12", "transformer-engine-cu13")
TORCH = "transformer-engine-torch"
PACKAGES = (META, *CORES, TORCH)
# start of a library's file name, what it is
LIBRARIES = {
    "libtransformer_engine": "core library",
    "transformer_engine_torch": "PyTorch extension",
}


@dataclass(frozen=True)
class Package:
    """A distribution of TransformerEngine.

    Attributes
    ----------
    name, version : str
        As pip shows them; the version is "unknown" where the metadata is damaged.
    folder : Path
        The folder that it is installed in.
    pure : bool or None
        What WHEEL says of ``Root-Is-Purelib``: TransformerEngine's own loader takes true for "from
        the package index" and the rest for "built from source". None if there is no WHEEL.
    """

    name: str
    version: str
    folder: Path
    pure: bool | None

    def __str__(self) -> str:
        return f"{self.name} {self.version}"


@dataclass
class Install:
    """What there is of TransformerEngine.

    Attributes
    ----------
    packages : dict
        Name to copies of it; the first is the one that counts.
    module : Path or None
        Folder of the Python package that an import takes in this process.
    installed : Path or None
        The same if Python had not been started in the current folder.
    libraries : dict
        Start of a file name to the files that TransformerEngine's loader finds.
    """

    packages: dict[str, list[Package]] = field(default_factory=dict)
    module: Path | None = None
    installed: Path | None = None
    libraries: dict[str, list[Path]] = field(default_factory=dict)

    def first(self, name: str) -> Package | None:
        """Return the copy that counts."""
        copies = self.packages.get(name)
        return copies[0] if copies else None

    @property
    def version(self) -> str:
        """The version in the metadata, or ""."""
        found = [package for package in map(self.first, PACKAGES) if package is not None]
        return found[0].version if found else ""

    @property
    def is_empty_metapackage(self) -> bool:
        """Whether the package of dependencies is there, and none of them."""
        meta = self.first(META)
        others = [self.first(name) for name in (*CORES, TORCH)]
        return meta is not None and meta.pure is True and not any(others)


def find_install(path: Sequence[str], cwd: Path, purelib: Path) -> Install:
    """Look for TransformerEngine as an import with this ``sys.path`` would.

    Parameters
    ----------
    path : sequence of str
        ``sys.path``.
    cwd : Path
        The current folder.
    purelib : Path
        Where TransformerEngine's loader looks for its libraries last.
    """
    module = find_module(path)
    starts_here = bool(path) and Path(path[0] or cwd).resolve() == cwd.resolve()
    return Install(
        packages=find_packages(path),
        module=module,
        installed=find_module(path[1:]) if starts_here else module,
        libraries=find_libraries(module, purelib),
    )


def find_packages(path: Sequence[str]) -> dict[str, list[Package]]:
    """Find the distributions of TransformerEngine, with every copy of each."""
    found: dict[str, list[Package]] = {}
    for name in PACKAGES:
        for distribution in importlib.metadata.distributions(name=name, path=list(path)):
            folder = Path(str(distribution.locate_file(""))).resolve()
            package = Package(name, _version(distribution), folder, _is_pure(distribution))
            copies = found.setdefault(name, [])
            if package not in copies:  # sys.path may name a folder twice
                copies.append(package)
    return found


def _version(distribution: importlib.metadata.Distribution) -> str:
    try:
        return distribution.version or "unknown"
    except Exception:  # which error damaged metadata raises depends on the Python version
        return "unknown"


def _is_pure(distribution: importlib.metadata.Distribution) -> bool | None:
    for line in (distribution.read_text("WHEEL") or "").splitlines():
        name, _, value = line.partition(":")
        if name == "Root-Is-Purelib":
            return value.strip().lower() == "true"
    return None


def find_module(path: Sequence[str]) -> Path | None:
    """Return the folder of the package that an import would take, without importing it."""
    for finder in sys.meta_path:  # editable installs have finders of their own
        find_spec = getattr(finder, "find_spec", None)
        if find_spec is None:
            continue
        spec = find_spec(MODULE, list(path) if finder is PathFinder else None)
        if spec is not None:
            # A namespace package, which has no origin, is a folder that something was left in.
            return Path(spec.origin).resolve().parent if spec.origin else None
    return None


def find_libraries(module: Path | None, purelib: Path) -> dict[str, list[Path]]:
    """Find the libraries in the folders that TransformerEngine's loader searches, in its order."""
    found: dict[str, list[Path]] = {}
    for prefix in LIBRARIES:
        for root in _library_roots(module, purelib):
            files = sorted(_matching_files(root, prefix))
            if files:
                found[prefix] = files
                break
    return found


def _library_roots(module: Path | None, purelib: Path) -> list[Path]:
    if module is None:
        return []
    return [module.parent, *([purelib] if (purelib / MODULE).exists() else [])]


def _matching_files(root: Path, prefix: str) -> Iterable[Path]:
    for folder in (root, root / MODULE, root / MODULE / "wheel_lib"):
        if folder.is_dir():
            for file in folder.iterdir():
                if file.name.startswith(prefix) and file.suffix == ".so":
                    yield file


def reinstall_command(version: str) -> str:
    """Write the commands that replace whatever is installed by one version."""
    pin = f"=={version.partition('+')[0]}" if version not in ("", "unknown") else ""
    return (
        f"`pip uninstall -y {' '.join(PACKAGES)}`, then "
        f'`pip install --no-build-isolation "transformer-engine[pytorch]{pin}"`'
    )


def check_packages(install: Install, torch_cuda: str | None) -> list[Finding]:
    """Check that the packages are complete, of one version and of one CUDA.

    Parameters
    ----------
    install : Install
    torch_cuda : str or None
        ``torch.version.cuda``.
    """
    if not install.packages:
        return []
    meta, extension = install.first(META), install.first(TORCH)
    cores = [core for core in map(install.first, CORES) if core is not None]
    present = [p for p in (meta, *cores, extension) if p is not None]
    names = ", ".join(map(str, present))
    remedy = reinstall_command(install.version)
    findings = []

    def problem(what: str) -> None:
        findings.append(Finding(PROBLEM, what, remedy))

    if install.is_empty_metapackage:
        problem(
            f"only the empty metapackage is installed ({names}): it has neither the core library "
            "nor the PyTorch extension"
        )
    if len(cores) > 1:
        problem(
            f"two cores are installed, {cores[0]} and {cores[1]}: they own the same files, so the "
            "one installed last is in place, while TransformerEngine takes the first for its core"
        )
    if len({package.version for package in present}) > 1:
        problem(
            f"TransformerEngine's packages are of different versions, {names}; it refuses to be "
            "imported like that"
        )
    if meta is None:
        problem(f"{names} without the package {META}: TransformerEngine refuses to be imported")
    elif meta.pure is False and len(present) > 1:
        problem(
            f"{meta} was built from source, but there is also {names.partition(', ')[2]} from the "
            "package index; TransformerEngine refuses to be imported like that"
        )
    if extension is not None and not cores:
        problem(f"{extension} without a core ({' or '.join(CORES)})")
    if len(cores) == 1 and torch_cuda and not cores[0].name.endswith(torch_cuda.split(".")[0]):
        what = f"{cores[0]} is for another CUDA than torch, which was built with CUDA {torch_cuda}"
        findings.append(Finding(NOTE, what, f"if TransformerEngine does not work: {remedy}"))
    return findings + check_copies(install)


def check_copies(install: Install) -> list[Finding]:
    """Find packages that are installed more than once."""
    findings = []
    for name, copies in install.packages.items():
        if len(copies) > 1:
            where = ", then ".join(f"{copy.version} in {copy.folder}" for copy in copies)
            what = f"{name} is installed {len(copies)} times: {where}; the first counts"
            remedy = f"repeat `pip uninstall {name}` until it finds none, then install it once"
            findings.append(Finding(NOTE, what, remedy))
    return findings


def check_module(install: Install, cwd: Path) -> list[Finding]:
    """Check that what an import takes is what was installed, and no source folder."""
    local = (cwd / MODULE).resolve()
    away = "work in another folder, one that has no transformer_engine/ in it"
    if install.module is None:
        if not install.packages:
            return []
        names = ", ".join(str(copies[0]) for copies in install.packages.values())
        what = f"there is metadata of {names}, but no module {MODULE}: an install or removal broke"
        return [Finding(PROBLEM, what, reinstall_command(install.version))]
    if install.module == local and install.installed is None:
        what = f"{MODULE} would be imported from {local}, a source folder that is not installed"
        remedy = f"{away}, or build it: `pip install --no-build-isolation .`"
        return [Finding(PROBLEM, what, remedy)]
    if install.module == local and install.installed != local:
        what = f"{MODULE} of the current folder, {local}, hides the one in {install.installed}"
        return [Finding(PROBLEM, what, away)]
    if install.module != local and (local / "__init__.py").is_file():
        what = (
            f"the current folder has a {MODULE} of its own, which `python -m` and `python -c` "
            f"would import instead of {install.module}"
        )
        return [Finding(NOTE, what, away)]
    return []


def check_libraries(install: Install, purelib: Path) -> list[Finding]:
    """Check that the loader finds each library, once.

    Only for an install that cannot be imported: if it can be, the libraries are there, wherever.

    Parameters
    ----------
    install : Install
    purelib : Path
        Where TransformerEngine's loader looks last.
    """
    if install.module is None or install.is_empty_metapackage:
        return []
    meta = install.first(META)
    remedy = reinstall_command(install.version)
    if meta is None or not meta.pure:
        remedy = f"build it again: `pip install --no-build-isolation .` in its source; or {remedy}"
    findings = []
    for prefix, title in LIBRARIES.items():
        files = install.libraries.get(prefix, [])
        if len(files) == 1:
            continue
        if files:
            what = (
                f"TransformerEngine's {title} is there {len(files)} times, and it refuses to "
                f"choose: {', '.join(map(str, files))}"
            )
            findings.append(Finding(PROBLEM, what, f"remove what is left of others; or {remedy}"))
        else:
            roots = " and ".join(map(str, _library_roots(install.module, purelib)))
            what = (
                f"TransformerEngine's {title}, {prefix}*.so, is missing: it is not in {roots}, nor "
                f"in {MODULE}/ or {MODULE}/wheel_lib/ there"
            )
            findings.append(Finding(PROBLEM, what, remedy))
    return findings
