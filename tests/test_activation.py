# SPDX-License-Identifier: Apache-2.0
"""``TE_OVERLAY_ENABLE=1 python train.py``: the start-up hook, in processes of all kinds."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from te_stub import write_stub

# A test process may lack CUDA in the build and in the machine: the stub does not need it.
PRELUDE = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s", stream=sys.stdout)
def pretend():
    from transformer_engine_overlay import _native
    _native.WITH_CUDA = True
    _native.cuda_versions = lambda: (0, 13000)
"""

REPORT = """
def report(label):
    from transformer_engine_overlay import status
    s = status()
    print(label, "enabled" if s.enabled else "not enabled", "|", s.activation, flush=True)
"""


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    return write_stub(tmp_path / "stub")


def run(
    code: str, stub: Path, *options: str, enable: str | None = "1", check: bool = True
) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TE_OVERLAY_ENABLE"}
    if enable is not None:
        environment["TE_OVERLAY_ENABLE"] = enable
    script = stub / "train.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(stub)!r})\n{PRELUDE}{REPORT}{code}")
    done = subprocess.run(
        [sys.executable, *options, str(script)],
        env=environment,
        cwd=stub,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )
    assert not check or done.returncode == 0, done.stdout
    return done


def test_enables_when_te_is_imported(stub: Path) -> None:
    done = run("pretend()\nimport transformer_engine.pytorch\nreport('main')\n", stub)
    assert "main enabled | TE_OVERLAY_ENABLE=1, and the start-up hook ran" in done.stdout
    # one line a process, at INFO
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("INFO overlay enabled")]
    assert "TransformerEngine 2.18.0" in line
    assert "WARNING" not in done.stdout


def test_te_itself_imports_its_torch_package(stub: Path) -> None:
    code = "pretend()\nfrom transformer_engine.pytorch.rope import forward\nreport('main')\n"
    assert "main enabled" in run(code, stub).stdout


@pytest.mark.parametrize("value", [None, "0", ""])
def test_does_nothing_without_the_variable(stub: Path, value: str | None) -> None:
    code = (
        "assert 'te_overlay_activate' not in sys.modules\n"
        "import transformer_engine.pytorch\n"
        "assert 'transformer_engine_overlay' not in sys.modules\n"
        "report('main')\n"
    )
    done = run(code, stub, enable=value)
    assert "main not enabled | TE_OVERLAY_ENABLE is not set" in done.stdout


def test_imports_no_torch_by_itself(stub: Path) -> None:
    code = (
        "heavy = [m for m in sys.modules if m.split('.')[0] in "
        "('torch', 'numpy', 'transformer_engine', 'transformer_engine_overlay')]\n"
        "assert 'te_overlay_activate' in sys.modules and not heavy, heavy\n"
    )
    run(code, stub)


def test_another_value_is_named(stub: Path) -> None:
    done = run("print('runs')\n", stub, enable="yes")
    assert "TE_OVERLAY_ENABLE is 'yes'; it must be 1 (enable), 0 or unset" in done.stdout
    assert "runs" in done.stdout


def test_refusal_does_not_break_te(tmp_path: Path) -> None:
    old = write_stub(tmp_path / "old", version="2.9.0")
    done = run("pretend()\nimport transformer_engine.pytorch\nreport('main')\n", old)
    assert "WARNING overlay not enabled" in done.stdout
    assert "TransformerEngine 2.9.0 is older than 2.10" in done.stdout
    assert "main not enabled" in done.stdout


def test_error_in_the_overlay_does_not_break_te(stub: Path) -> None:
    code = (
        "sys.modules['transformer_engine_overlay'] = None\n"
        "import transformer_engine.pytorch\nprint('te imported')\n"
    )
    done = run(code, stub)
    assert "te imported" in done.stdout
    assert "te_overlay_activate: the overlay could not be enabled: " in done.stdout


def test_error_in_te_comes_back_as_it_is(stub: Path) -> None:
    file = stub / "transformer_engine" / "pytorch" / "__init__.py"
    file.write_text("raise OSError('undefined symbol')\n")
    done = run("import transformer_engine.pytorch\n", stub, check=False)
    assert done.returncode == 1
    assert done.stdout.strip().endswith("OSError: undefined symbol")


def test_module_keeps_its_loader(stub: Path) -> None:
    code = (
        "pretend()\nimport inspect, transformer_engine.pytorch as te\n"
        "assert type(te.__loader__).__name__ == 'SourceFileLoader', te.__loader__\n"
        "assert te.__spec__.loader is te.__loader__\n"
        "assert 'spec_from_file_location' in inspect.getsource(te)\n"
        "import te_overlay_activate\nassert te_overlay_activate._waiter not in sys.meta_path\n"
    )
    run(code, stub)


def test_another_import_hook_is_respected(stub: Path) -> None:
    code = (
        "seen = []\n"
        "class Other:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        seen.append(name)\n"
        "sys.meta_path.insert(0, Other())\n"
        "pretend()\nimport transformer_engine.pytorch\n"
        "assert 'transformer_engine.pytorch' in seen\nreport('main')\n"
    )
    assert "main enabled" in run(code, stub).stdout


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_p14_worker_processes(stub: Path, method: str) -> None:
    code = f"""
def work():
    pretend()
    import transformer_engine.pytorch
    report("worker")

if __name__ == "__main__":
    import multiprocessing
    process = multiprocessing.get_context({method!r}).Process(target=work)
    process.start()
    process.join()
    assert process.exitcode == 0
"""
    assert "worker enabled" in run(code, stub).stdout


def test_fork_after_enabling(stub: Path) -> None:
    code = """
import os
pretend()
import transformer_engine.pytorch
child = os.fork()
if child:  # reports second, so that the lines do not mix
    assert os.waitpid(child, 0)[1] == 0
report("child" if child == 0 else "parent")
"""
    done = run(code, stub)
    assert "child enabled" in done.stdout
    assert "parent enabled" in done.stdout


def test_subprocess_inherits(stub: Path) -> None:
    code = """
import os, subprocess
if os.environ.get("INNER"):
    pretend()
    import transformer_engine.pytorch
    report("inner")
else:
    subprocess.run([sys.executable, __file__], env={**os.environ, "INNER": "1"}, check=True)
"""
    assert "inner enabled" in run(code, stub).stdout


def test_p14_without_site_the_status_says_that_the_hook_did_not_run(stub: Path) -> None:
    """Under -S no .pth file is read; -I leaves out only a user's own site folder."""
    paths = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
    if not any(
        (Path(path) / "transformer_engine_overlay" / "__init__.py").exists() for path in paths
    ):
        pytest.skip("an editable install cannot be imported under -S")
    code = (
        f"sys.path += {list(paths)!r}\n"
        "pretend()\nimport transformer_engine.pytorch\nreport('main')\n"
    )
    done = run(code, stub, "-S")
    assert "main not enabled" in done.stdout
    assert "the start-up hook did not run in this process" in done.stdout
    assert "call transformer_engine_overlay.enable()" in done.stdout


def test_p14_isolated_mode_in_an_environment_still_enables(stub: Path) -> None:
    code = "pretend()\nimport transformer_engine.pytorch\nreport('main')\n"
    done = run(code, stub, "-I")
    assert ("main enabled" in done.stdout) == ("hook ran" in done.stdout)
    assert "main enabled" in done.stdout or "hook did not run" in done.stdout


def test_p14_torchrun_workers(stub: Path) -> None:
    code = (
        "import os\npretend()\nimport transformer_engine.pytorch\n"
        "from transformer_engine_overlay import status\n"
        "file = os.path.join(os.path.dirname(__file__), 'rank' + os.environ['RANK'])\n"
        "open(file, 'w').write(f'{status().enabled} {status().activation}')\n"
    )
    done = run(code, stub, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    for rank in range(2):
        report = (stub / f"rank{rank}").read_text()
        assert report == "True TE_OVERLAY_ENABLE=1, and the start-up hook ran", done.stdout
    assert "LOCAL_RANK 1" in done.stdout  # in the line that each process logs
