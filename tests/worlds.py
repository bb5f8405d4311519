# SPDX-License-Identifier: Apache-2.0
"""Start a script under torchrun, as many processes as ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
SCRIPTS = TESTS / "distributed"
# where the tensors live, and who carries them
PLACES = [
    "cpu-gloo",
    pytest.param("cuda-gloo", marks=pytest.mark.gpu),  # ranks share the GPUs that there are
    pytest.param("cuda-nccl", marks=pytest.mark.gpu),  # a GPU for each rank
]


def run_world(script: str, ranks: int, *arguments: str, place: str = "cpu-gloo") -> str:
    """Run a script of tests/distributed on each rank; every rank must end well.

    Returns
    -------
    str
        What the ranks printed.
    """
    found = torch.cuda.device_count() if place == "cuda-nccl" else ranks
    if found < ranks:
        pytest.skip(f"nccl needs a GPU for each of {ranks} ranks; torch sees {found}")
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, *torchrun, str(SCRIPTS / script), *arguments],
        # A thread a rank: more than the cores are no use.
        env={**os.environ, "OMP_NUM_THREADS": "1", "PLACE": place, "PYTHONPATH": path},
        cwd=SCRIPTS,  # not the checkout, whose package would hide the installed one
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=600,  # a collective call that a rank leaves out hangs
    )
    assert done.returncode == 0, done.stdout
    for rank in range(ranks):
        assert f"rank {rank} of {ranks} done" in done.stdout, done.stdout
    return done.stdout
