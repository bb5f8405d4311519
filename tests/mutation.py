# SPDX-License-Identifier: Apache-2.0
"""Build the package with a mistake in it, and run tests on that build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEADERS = "transformer_engine_overlay/common/fused_rope"


@dataclass(frozen=True)
class Mutation:
    """A mistake in a header, and tests, below tests/, that must fail on a build with it."""

    header: str
    original: str
    replacement: str
    failing_tests: tuple[str, ...]


def check_caught(mutation: Mutation, folder: Path, **build_environment: str) -> None:
    """Build with the mutation in `folder`, put the build before the installed package, and test."""
    source = folder / "source"
    ignored = shutil.ignore_patterns(".*", "build", "results", "__pycache__", "*.so")
    shutil.copytree(ROOT, source, ignore=ignored)
    header = source / HEADERS / mutation.header
    text = header.read_text()
    assert text.count(mutation.original) == 1
    header.write_text(text.replace(mutation.original, mutation.replacement))

    installed = folder / "installed"
    built = run_python(
        *("-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"),
        *("--target", str(installed), str(source)),
        **build_environment,
    )
    assert built.returncode == 0, built.stdout
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
    for test in mutation.failing_tests:
        outcome = run_python(
            *("-m", "pytest", "-q", "-p", "no:cacheprovider", f"{ROOT}/tests/{test}"),
            PYTHONPATH=path,
        )
        assert outcome.returncode == 1, f"{test} passed on a wrong build\n{outcome.stdout}"
        assert "1 failed" in outcome.stdout, outcome.stdout


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python outside of the checkout, which would hide the installed package."""
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        cwd=ROOT.parent,
        check=False,
        timeout=300,  # a wrong build may hang
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
