# SPDX-License-Identifier: Apache-2.0
"""The installed kernels against ci/kernel_budget.py, and that it fails when it should."""

from __future__ import annotations

import re
import shutil
import subprocess
from copy import deepcopy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ci_scripts import ci_script, cuda_tools

COMMON = Path(__file__).resolve().parents[1] / "transformer_engine_overlay" / "common"
CHIPS = ("sm_80", "sm_90", "sm_100")
OTHER_CHIPS = ("sm_75", "sm_86", "sm_89", "sm_120")
KEY = ("sm_90", "wide64", "bfloat16", "half-split", "forward")
USAGE = {"registers": 60, "stack": 0, "shared": 1024, "spills": 0, "split_stores": 0}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    cuda_tools("cuobjdump", "nvdisasm")
    return ci_script("kernel_budget")


@pytest.fixture(scope="module")
def module(script: ModuleType) -> Path:
    path = script.installed_module()
    assert path is not None
    return path


class TestInstalledModule:
    @pytest.mark.parametrize(
        "chip", [*CHIPS, *(pytest.param(chip, marks=pytest.mark.slow) for chip in OTHER_CHIPS)]
    )
    def test_kernels(self, script: ModuleType, module: Path, chip: str) -> None:
        build, problems = script.read_module(module, {chip})
        if not build.usage:
            pytest.skip(f"the installed module has no code for {chip}")
        assert not problems
        assert not list(script.compare(build, script.read_budget()))

    def test_sizes(self, script: ModuleType, module: Path) -> None:
        build, _ = script.read_module(module, chips=())
        assert not list(script.compare_sizes(build, script.read_budget()))

    def test_budget_is_for_the_chips_of_a_default_build(self, script: ModuleType) -> None:
        assert {*script.read_budget().chips} == {*CHIPS, *OTHER_CHIPS}


def build_of(script: ModuleType, nvcc: str = "13.0", **figures: int) -> Any:
    return script.Build(nvcc, {"module": 1000, "packed": 500}, ["sm_90"], {KEY: USAGE | figures})


class TestComparison:
    @pytest.mark.parametrize("name", USAGE)
    def test_more_of_anything(self, script: ModuleType, name: str) -> None:
        budget = build_of(script)
        assert not list(script.compare(build_of(script), budget))
        (problem,) = script.compare(build_of(script, **{name: USAGE[name] + 1}), budget)
        assert f"{name} {USAGE[name] + 1} (nvcc 13.0), more than {USAGE[name]}" in problem

    @pytest.mark.parametrize(
        ("figures", "problems"),
        [
            ({"registers": 64, "stack": 32, "shared": 2048}, 0),
            ({"registers": 65}, 1),
            ({"spills": 1}, 1),
            ({"split_stores": 4}, 1),
        ],
    )
    def test_another_compiler_has_ceilings(
        self, script: ModuleType, figures: dict[str, int], problems: int
    ) -> None:
        build = build_of(script, "12.8", **figures)
        assert len(list(script.compare(build, build_of(script)))) == problems

    def test_missing_kernels(self, script: ModuleType) -> None:
        build, budget = build_of(script), build_of(script)
        other = ("sm_90", "scalar", *KEY[2:])
        build.usage[other] = USAGE
        (problem,) = script.compare(build, budget)
        assert "not in the budget" in problem
        (problem,) = script.compare(budget, build)
        assert "not in the module" in problem
        # A chip that only one of them has says nothing.
        build.usage = {KEY: USAGE, ("sm_103", *KEY[1:]): USAGE}
        assert not list(script.compare(build, budget))

    def test_size(self, script: ModuleType) -> None:
        build, budget = build_of(script), build_of(script)
        build.sizes = {"module": 1050, "packed": 526}
        (problem,) = script.compare_sizes(build, budget)
        assert problem == "packed: 526 bytes, more than 525"
        build.chips = ["sm_80", "sm_90"]  # other code: the limit only
        assert not list(script.compare_sizes(build, budget))
        build.sizes["packed"] = 20_000_001
        (problem,) = script.compare_sizes(build, budget)
        assert problem == "packed: 20,000,001 bytes, more than 20,000,000"

    def test_update_refuses_new_flaws_and_lost_chips(self, script: ModuleType) -> None:
        budget = build_of(script)
        build = build_of(script, spills=2, registers=100)
        (problem,) = script.refusals(build, budget, accept_flaws=False)
        assert "2 spills, 0 before" in problem
        assert not list(script.refusals(build, budget, accept_flaws=True))
        build.chips = []
        (problem,) = script.refusals(build, budget, accept_flaws=True)
        assert "no code for sm_90" in problem

    def test_budget_is_read_as_it_was_written(self, script: ModuleType, tmp_path: Path) -> None:
        budget = build_of(script, stack=8)
        script.write_budget(budget, tmp_path / "budget.csv")
        assert script.read_budget(tmp_path / "budget.csv") == budget

    def test_unknown_kernel(self, script: ModuleType) -> None:
        with pytest.raises(SystemExit, match="unknown kernel tall8"):
            script.vectors_in_flight(("sm_90", "tall8", *KEY[2:]))


NARROW = "narrow_kernel<__nv_bfloat16, false, false, 2>"
WIDE = "wide_kernel<float, true, false, 64>"


def compiled(
    script: ModuleType, folder: Path, kernel: str, *mutations: tuple[str, str, str]
) -> Any:
    """Compile one kernel for sm_90, with mistakes; what is wrong with it, and what it uses."""
    tools = cuda_tools("nvcc", "nvdisasm")
    shutil.copytree(COMMON, folder / "common")
    for header, original, replacement in mutations:
        path = folder / "common" / "fused_rope" / header
        text = path.read_text(encoding="utf-8")
        assert text.count(original) == 1
        path.write_text(text.replace(original, replacement), encoding="utf-8")
    source, cubin = folder / "one.cu", folder / "one.cubin"
    source.write_text(
        f'#include "fused_rope/thd_{kernel.partition("<")[0]}.cuh"\n'
        "namespace transformer_engine::thd_rope {\n"
        f"template __global__ void thd_token_linear_{kernel}(ThdRopeParams, VectorPlan);\n"
        "}\n",
        encoding="utf-8",
    )
    command = [tools["nvcc"], "-std=c++17", "-cubin", "-arch=sm_90", "-Icommon", "-Xptxas=-v"]
    done = subprocess.run(
        [*command, source, "-o", cubin],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    listing = script.disassemble(cubin, [tools["nvdisasm"]])
    (usage,) = script.usage_of(cubin, listing, "sm_90").values()
    return list(script.listing_problems(listing, "sm_90")), usage, done.stdout


class TestCompiledMistakes:
    """One kernel each; the same kernels without the mistake are in the installed module."""

    def test_none(self, script: ModuleType, tmp_path: Path) -> None:
        problems, usage, log = compiled(script, tmp_path, WIDE)
        assert not problems
        said = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", log)
        assert said is not None
        assert (int(said[1]), int(said[2]) > 0) == (usage["stack"], usage["spills"] > 0)
        assert f"Used {usage['registers']} registers" in log

    def test_loads_behind_the_search(self, script: ModuleType, tmp_path: Path) -> None:
        sync = "  __syncwarp();  // without it the compiler moves these loads behind the search\n"
        problems, _, _ = compiled(script, tmp_path, NARROW, ("thd_narrow_kernel.cuh", sync, ""))
        (problem,) = problems
        assert "issues 0 of 4 unit loads (LDG.E.128) before the search" in problem

    @pytest.mark.parametrize("kernel", [NARROW, WIDE])
    def test_other_contraction(self, script: ModuleType, tmp_path: Path, kernel: str) -> None:
        mutation = (
            "thd_rotation.h",
            "return __fmaf_rn(x, cos, __fmul_rn(partner, sin));",
            "return __fmaf_rn(partner, sin, __fmul_rn(x, cos));",
        )
        problems, _, _ = compiled(script, tmp_path, kernel, mutation)
        (problem,) = problems
        assert "has sine_fused rotations" in problem

    def test_spills(self, script: ModuleType, tmp_path: Path) -> None:
        bounds = ("thd_wide_kernel.cuh", "1024 / kLanes)", "2048 / kLanes)")
        problems, usage, log = compiled(script, tmp_path, WIDE, bounds)
        assert not problems
        assert usage["registers"] == 32
        assert usage["spills"] > 0
        assert re.search(r" [1-9]\d* bytes spill stores", log)
        budget = build_of(script)
        build = deepcopy(budget)
        build.usage[KEY] = usage
        assert any("spills" in problem for problem in script.compare(build, budget))

    def test_small_stores(self, script: ModuleType, tmp_path: Path) -> None:
        mutation = (
            "thd_vector.cuh",
            "store_vector(output + i * distance, vectors[i].bits);",
            "reinterpret_cast<uint2 *>(output + i * distance)[0] = "
            "make_uint2(vectors[i].bits.x, vectors[i].bits.y);\n"
            "      reinterpret_cast<volatile uint2 *>(output + i * distance)[1].x = "
            "vectors[i].bits.z;\n"
            "      reinterpret_cast<volatile uint2 *>(output + i * distance)[1].y = "
            "vectors[i].bits.w;",
        )
        problems, usage, _ = compiled(script, tmp_path, WIDE, mutation)
        (problem,) = problems
        assert "stores no rotated values by 16 bytes" in problem
        assert usage["split_stores"] >= 12
