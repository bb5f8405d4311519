# SPDX-License-Identifier: Apache-2.0
"""The import of TransformerEngine in a process of its own: crashes, waits, and known errors."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from te_stub import BACKWARD_OLD
from te_wheels import PRETEND, TORCH_SYMBOL, texts, write_te

from transformer_engine_overlay import doctor_checks as checks
from transformer_engine_overlay import te_probe
from transformer_engine_overlay.findings import NOTE, PROBLEM, Finding
from transformer_engine_overlay.te_probe import Probe


def probe(folder: Path, timeout: float = 60) -> Probe:
    return te_probe.run_probe([str(folder), *sys.path], timeout)


def explain(found: Probe, explained: bool = False) -> list[Finding]:
    return te_probe.check_import(found, "2.13.0+cu130", "2.18.0", explained)


class TestProbe:
    def test_crash(self, tmp_path: Path) -> None:
        code = "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n"
        found = probe(write_te(tmp_path, code))
        assert "crashed with SIGSEGV" in texts(explain(found))
        assert found.tail().startswith("Fatal Python error: Segmentation fault")
        assert "pytorch/__init__.py" in found.tail()

    def test_crash_after_the_import(self, tmp_path: Path) -> None:
        code = "import os, atexit\natexit.register(os.abort)\n"
        found = probe(write_te(tmp_path, code + PRETEND))
        assert found.imported
        assert found.enabled
        assert "imported TransformerEngine crashed with SIGABRT after that" in texts(explain(found))

    def test_timeout_reaches_grandchildren(self, tmp_path: Path) -> None:
        code = "import subprocess\nprint('waiting')\nsubprocess.run(['sleep', '60'])\n"
        started = time.monotonic()
        found = probe(write_te(tmp_path, code), timeout=1)
        assert time.monotonic() - started < 10
        assert found.returncode is None
        assert "did not end in time" in texts(explain(found))

    def test_exit_without_an_import(self, tmp_path: Path) -> None:
        found = probe(write_te(tmp_path, "import os\nos._exit(0)\n"))
        assert "it printed nothing" in texts(explain(found))

    def test_error(self, tmp_path: Path) -> None:
        found = probe(write_te(tmp_path, "print('chatter')\nraise OSError('some trouble')\n"))
        assert "cannot be imported: OSError: some trouble" in texts(explain(found))
        assert "chatter" in found.output

    def test_hook_does_not_get_in_first(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("TE_OVERLAY_ENABLE", "1")
        code = "import os\nraise OSError(str(os.environ.get('TE_OVERLAY_ENABLE')))\n"
        assert "OSError: None" in probe(write_te(tmp_path, code)).output

    def test_another_signature_and_a_refusal(self, tmp_path: Path) -> None:
        found = probe(write_te(tmp_path, PRETEND, backward=BACKWARD_OLD))
        assert found.imported
        assert not found.enabled
        assert explain(found) == []
        signatures = checks.check_signatures(found, "2.18.0")
        assert "fused_rope_backward takes (tensor, tensor, format," in texts(signatures)
        assert len(signatures) == 1
        assert checks.check_refusal(found, explained=True) == []
        assert "fused_rope_backward of Trans" in texts(checks.check_refusal(found, explained=False))


@pytest.mark.parametrize(
    ("output", "what", "remedy"),
    [
        (
            "python: symbol lookup error: /t.so: undefined symbol: nvte_rope",
            "core library lacks",
            "never transformer_engine_torch by itself",
        ),
        (f"ImportError: /x/{TORCH_SYMBOL}", "another torch, or", "--no-cache-dir"),
        (
            "ImportError: /t.so: undefined symbol: _ZNK2at10TensorBase8data_ptrIfEEPT_v",
            "the one installed, 2.13.0+cu130",
            "transformer-engine-torch==2.18.0",
        ),
        (
            "ImportError: libc10_cuda.so: cannot open shared object file: No such file",
            "needs a torch built with CUDA",
            "install a torch with CUDA",
        ),
        (
            "OSError: /te.so: undefined symbol: cublasLtGroupedMatrixLayoutInit_internal, version",
            "the overlay has no part in it",
            "LD_LIBRARY_PATH",
        ),
        (
            "OSError: /lib/libcublas.so.13: version `libcublasLt.so.13' not found (required by x)",
            "CUDA library",
            "stale copy",
        ),
        (
            "ImportError: libcudnn.so.9: cannot open shared object file: No such file or directory",
            "CUDA library",
            "pip list",
        ),
        ("RuntimeError: nvrtc shared object not found.", "CUDA library", "CUDA_HOME"),
        (
            "ImportError: /lib/libstdc++.so.6: version `GLIBCXX_3.4.32' not found",
            "newer system",
            "build it from source",
        ),
        (
            "FileNotFoundError: Could not find shared object file for TE torch lib.",
            "does not find one of its libraries",
            "source tree",
        ),
        (
            "RuntimeError: Multiple files found: [PosixPath('/a.so'), PosixPath('/b.so')]",
            "more than once",
            "pip uninstall",
        ),
        (
            "AssertionError: Transformer Engine package version mismatch. Found x v1",
            "own check of its packages",
            "==2.18.0",
        ),
        ("AssertionError: Could not find `transformer-engine`.", "own check", "pip install"),
        (
            "RuntimeError: Found empty `transformer-engine` meta package installed.",
            "empty metapackage",
            "transformer-engine[pytorch]",
        ),
        (
            "ModuleNotFoundError: No module named 'transformer_engine.pytorch'",
            "PyTorch package is not there",
            "pip install",
        ),
        (
            "ModuleNotFoundError: No module named 'onnxscript'",
            "a Python package that TransformerEngine needs is missing",
            "with pip",
        ),
        ("ValueError: something new", "cannot be imported: ValueError", "fails by itself"),
    ],
)
def test_p01_p02_p04_causes(output: str, what: str, remedy: str) -> None:
    lines = f"Traceback (most recent call last):\n  File x\n{output}\n"
    (finding,) = explain(te_probe.read_probe(1, lines))
    assert finding.level == PROBLEM
    assert what in finding.what
    assert output in finding.what  # the evidence
    assert remedy in finding.remedy


class TestCauses:
    def test_healthy(self) -> None:
        assert explain(Probe(0, imported=True)) == []
        assert (
            explain(te_probe.read_probe(0, f"a\n\n{te_probe._MARK}" + '{"imported": true}')) == []
        )

    def test_no_driver_is_a_note(self) -> None:
        output = "ImportError: libcuda.so.1: cannot open shared object file: No such file"
        (finding,) = explain(te_probe.read_probe(1, output))
        assert finding.level == NOTE

    def test_last_error_counts_first(self) -> None:
        output = "ModuleNotFoundError: No module named 'jax'\n\nOSError: undefined symbol: nvte_a\n"
        assert "core library lacks" in texts(explain(te_probe.read_probe(1, output)))

    def test_files_have_explained_it(self) -> None:
        output = "FileNotFoundError: Could not find shared object file for x"
        assert explain(te_probe.read_probe(1, output), explained=True) == []
        other = f"ImportError: {TORCH_SYMBOL}"
        assert texts(explain(te_probe.read_probe(1, other), explained=True))

    def test_error_of_the_overlay_itself(self) -> None:
        text = te_probe._MARK + '{"imported": true}\nTypeError: of ours'
        assert "imported, but then TypeError: of ours" in texts(
            explain(te_probe.read_probe(1, text))
        )
