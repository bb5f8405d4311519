# SPDX-License-Identifier: Apache-2.0
"""Run a program in an interpreter of its own, for what only a new process shows."""

from __future__ import annotations

import os
import subprocess
import sys


def run_python(
    code: str, *, status: int = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run `code` with more environment variables; it must end with exit status `status`."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        cwd="/",  # not the checkout, whose package would hide the installed one
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status, done.stderr
    return done
