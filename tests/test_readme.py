# SPDX-License-Identifier: Apache-2.0
"""README tells the truth: its commands, its examples, its variables, its tables."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_ci_runs_the_two_commands() -> None:
    script = ROOT / ".ci" / "run"
    if not script.exists():
        pytest.skip(".ci is not part of the sdist")
    text = script.read_text(encoding="utf-8")
    commands = blocks("sh")
    assert len(commands) == 3
    for command in (c for c in commands if "train.py" not in c):
        assert command.strip() in text


def test_examples_run() -> None:
    namespace: dict[str, Any] = {}
    examples = [e for e in blocks("python") if "enable()" not in e]  # needs TransformerEngine
    assert len(examples) == 2
    for example in examples:
        exec(example, namespace)
    assert namespace["q"].grad.shape == (8, 4, 64)
    assert namespace["out"].shape == (6, 4, 64)
    assert namespace["cu_seqlens"].tolist() == [0, 4, 12]


def test_every_variable_is_in_the_table() -> None:
    named = set(re.findall(r"^\| (?:`|`\w+`, )*`(.*?)` \|", README, re.MULTILINE))
    documented = {name for row in named for name in re.findall(r"\w+", row)}
    used: set[str] = set()
    folders = ("transformer_engine_overlay", "tests")
    for path in (p for folder in folders for p in (ROOT / folder).rglob("*")):
        if path.suffix in {".py", ".h", ".cpp", ".cu", ".cuh", ".txt", ".cmake"}:
            text = path.read_text(encoding="utf-8")
            used |= set(
                re.findall(r"(?:environ\W+(?:get\()?|ENV\{|getenv\()\"?(TE_OVERLAY_\w+)", text)
            )
            used |= set(re.findall(r"NVTE_\w*TOKEN_LINEAR", text))
    assert len(used) >= 4
    assert used <= documented


def test_tables_are_those_of_the_results() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "ci" / "results.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
