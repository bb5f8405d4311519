# SPDX-License-Identifier: Apache-2.0
"""The branch for TransformerEngine's launcher, compiled against stand-ins of what it reads."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from te_tree import FUSED_ROPE, load_refresh, write_tree

from transformer_engine_overlay import __version__
from transformer_engine_overlay.patch_series import read_series
from transformer_engine_overlay.source_tree import apply_series

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc on PATH"),
]

PATH_VARIABLE = "NVTE_FUSED_ROPE_THD_TOKEN_LINEAR"

# What fused_rope.cu includes, as far as the branch uses it.
COMMON = r"""
#include <cstddef>
#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <vector>
#include <cuda_runtime.h>
enum class NVTE_QKV_Format { NVTE_SBHD = 0, NVTE_THD = 2 };
namespace transformer_engine {
enum class DType { kInt32 = 2, kInt64, kFloat32, kFloat16, kBFloat16, kFloat8E4M3 };
struct SimpleTensor {
  void *dptr = nullptr;
  std::vector<size_t> shape{0};
  DType dtype = DType::kFloat32;
  size_t numel() const {
    size_t count = 1;
    for (size_t extent : shape) count *= extent;
    return count;
  }
};
struct Tensor { SimpleTensor data; };
template <typename... T>
std::string joined(const T &...parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}
}
#define NVTE_ERROR(...) throw std::runtime_error(::transformer_engine::joined(__VA_ARGS__))
#define NVTE_CHECK_CUDA(call) \
  do { if ((call) != cudaSuccess) NVTE_ERROR("launched"); } while (false)
"""

FUNCTION = r"""
void {name}(const Tensor &{input}, const Tensor &cu_seqlens, const Tensor &freqs,
            const Tensor &start_positions, Tensor *{output}, const NVTE_QKV_Format qkv_format,
            const bool interleaved, const int cp_size, const int cp_rank, const int s, const int b,
            const int h, const int d, const int d2, const int stride_s_or_t, const int stride_b,
            const int stride_h, const int stride_d, cudaStream_t stream) {{
  left_to_the_code_below = true;
}}
"""

# Asks the patched functions about one call a line; no device is needed, as none can be launched on.
MAIN = r"""
}
#include <cstdio>
#include <functional>
using namespace transformer_engine;
struct Call {
  Tensor t, cu_seqlens, freqs, starts, out;
  NVTE_QKV_Format format = NVTE_QKV_Format::NVTE_THD;
  int cp_size = 1, cp_rank = 0, b = 2, h = 2, d = 8, d2 = 8;
};
void ask(const char *name, const std::function<void(Call *)> &change) {
  static float memory[4096];
  Call call;
  call.t.data = {memory, {6, 2, 8}, DType::kFloat32};
  call.out.data = call.t.data;
  call.cu_seqlens.data = {memory, {3}, DType::kInt32};
  call.freqs.data = {memory, {16, 1, 1, 8}, DType::kFloat32};
  change(&call);
  for (auto *function : {fused_rope_forward, fused_rope_backward}) {
    left_to_the_code_below = false;
    const char *outcome = "taken";
    std::string error;
    try {
      function(call.t, call.cu_seqlens, call.freqs, call.starts, &call.out, call.format, false,
               call.cp_size, call.cp_rank, 16, call.b, call.h, call.d, call.d2, 16, 0, 8, 1, 0);
    } catch (const std::exception &caught) {
      error = caught.what();
      outcome = error == "launched" ? "taken" : error.c_str();
    }
    std::printf("%s: %s\n", name, left_to_the_code_below ? "left" : outcome);
  }
}
int main() {
  ask("plain", [](Call *) {});
  ask("no rows", [](Call *c) { c->t.data.shape = {0, 2, 8}; });
  ask("starts", [](Call *c) { c->starts.data = {c->t.data.dptr, {2}, DType::kInt32}; });
  ask("sbhd", [](Call *c) { c->format = NVTE_QKV_Format::NVTE_SBHD; });
  ask("float8", [](Call *c) { c->t.data.dtype = DType::kFloat8E4M3; });
  ask("other output", [](Call *c) { c->out.data.dtype = DType::kFloat16; });
  ask("no boundaries", [](Call *c) { c->cu_seqlens.data.dptr = nullptr; });
  ask("int64 boundaries", [](Call *c) { c->cu_seqlens.data.dtype = DType::kInt64; });
  ask("int64 starts", [](Call *c) { c->starts.data = {c->t.data.dptr, {2}, DType::kInt64}; });
  ask("half table", [](Call *c) { c->freqs.data.dtype = DType::kFloat16; });
  ask("flat table", [](Call *c) { c->freqs.data.shape = {128}; });
  ask("flat input", [](Call *c) { c->t.data.shape = {96}; });
  ask("odd rotary", [](Call *c) { c->d2 = 7; });
  ask("wide rotary", [](Call *c) { c->d2 = 10; });
  ask("rank", [](Call *c) { c->cp_rank = 1; });
  ask("size", [](Call *c) { c->cp_size = 0; });
  std::printf("version: %s\n", nvte_fused_rope_thd_overlay_version());
}
"""

TAKEN = {"plain", "no rows", "starts"}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a stand-in fused_rope.cu with the series in it."""
    folder = tmp_path_factory.mktemp("branch")
    tree = write_tree(folder / "tree")
    names = {
        "fused_rope_forward": ("input", "output"),
        "fused_rope_backward": ("output_grads", "input_grads"),
    }
    functions = "".join(FUNCTION.format(name=n, input=i, output=o) for n, (i, o) in names.items())
    (tree / FUSED_ROPE).write_text(
        f'#include "../common.h"\n#include "../utils.cuh"\nnamespace transformer_engine {{\n'
        f"bool left_to_the_code_below = false;\n{functions}{MAIN}"
    )
    common = (tree / FUSED_ROPE).parents[1]
    (common / "common.h").write_text(COMMON)
    (common / "utils.cuh").touch()
    load_refresh().refresh([tree], folder / "patches")
    apply_series(tree, read_series(folder / "patches"))
    # PTX alone: nothing is run on a device, and the assembler takes longest.
    command = ["nvcc", "-std=c++17", "--expt-relaxed-constexpr", "-Werror=all-warnings"]
    command += ["-Xcompiler=-Wall", "-gencode=arch=compute_80,code=compute_80", "-cudart=static"]
    done = subprocess.run(
        [*command, str(tree / FUSED_ROPE), "-o", str(folder / "program")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "program"


def outcomes(program: Path, value: str | None) -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k != PATH_VARIABLE}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    if value is not None:
        environment[PATH_VARIABLE] = value
    done = subprocess.run([program], env=environment, capture_output=True, text=True, check=True)
    lines = [line.partition(": ") for line in done.stdout.splitlines()]
    found = {name: text for name, _, text in lines}
    # forward and backward alike
    assert all(found[name] == text for name, _, text in lines)
    return found


@pytest.mark.parametrize("value", [None, "1"])
def test_what_the_kernels_cover_is_taken(program: Path, value: str | None) -> None:
    found = outcomes(program, value)
    assert found.pop("version") == __version__
    assert found == {name: "taken" if name in TAKEN else "left" for name in found}
    assert len(found) == 16


def test_zero_leaves_everything(program: Path) -> None:
    found = outcomes(program, "0")
    del found["version"]
    assert set(found.values()) == {"left"}


@pytest.mark.parametrize("value", ["", "yes", "2"])
def test_other_values_are_refused_for_thd_alone(program: Path, value: str) -> None:
    found = outcomes(program, value)
    assert found["sbhd"] == "left"
    assert found["plain"] == (
        f"{PATH_VARIABLE} is '{value}'; it must be 1 (token-linear), 0 (the launch without the "
        "overlay) or unset (automatic)"
    )
