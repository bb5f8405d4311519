# SPDX-License-Identifier: Apache-2.0
"""That ci/sass_contraction.py tells the orders apart, on kernels whose order is forced."""

from __future__ import annotations

import csv
import re
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from ci_scripts import ci_script, cuda_tools

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "ci" / "results" / "sass_contraction.csv"
CHIPS = (75, 80, 86, 89, 90, 100, 120)
COSINE_FUSED = "fma(x, cos, x_partner*sin)"
SINE_FUSED = "fma(x_partner, sin, x*cos)"

# The two ways to keep angles in shared memory, and the one to keep them in registers, each with the
# arithmetic that ROTATE says. The first five parameters and the places of the others are those of
# the kernels that are read.
SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace forced {

__device__ float cosine_fused(float x, float c, float partner, float s) {
  return __fmaf_rn(x, c, __fmul_rn(partner, s));
}
__device__ float sine_fused(float x, float c, float partner, float s) {
  return __fmaf_rn(partner, s, __fmul_rn(x, c));
}
__device__ float unfused(float x, float c, float partner, float s) {
  return __fadd_rn(__fmul_rn(x, c), __fmul_rn(partner, s));
}
__device__ float left_to_compiler(float x, float c, float partner, float s) {
  return x * c + partner * s;
}

template <bool kTranspose, typename T>
__device__ void rotate_apart(const T *in, const float *table, T *out, bool adjacent, int heads,
                             int width, int rotary) {
  extern __shared__ float cosines[];
  float *sines = cosines + rotary;
  for (int i = threadIdx.x; i < rotary; i += blockDim.x) {
    sincosf(table[blockIdx.x * rotary + i], sines + i, cosines + i);
  }
  __syncthreads();
  for (int head = threadIdx.y; head < heads; head += blockDim.y) {
    const int row = (blockIdx.x * heads + head) * width;
    for (int i = threadIdx.x; i < rotary; i += blockDim.x) {
      const int half = rotary / 2;
      const int j = adjacent ? i ^ 1 : i < half ? i + half : i - half;
      const float partner = in[row + j];
      float y;
      if (kTranspose) {
        const float s = i < j ? sines[j] : -sines[j];
        y = ROTATE(float(in[row + i]), cosines[i], partner, s);
      } else {
        y = ROTATE(float(in[row + i]), cosines[i], i < j ? -partner : partner, sines[i]);
      }
      out[row + i] = T(y);
    }
  }
}

template <typename T>
__global__ void fused_rope_forward_kernel(const T *in, const int *, const float *table, const int *,
                                          T *out, bool adjacent, int, int, int, int heads,
                                          int width, int rotary) {
  rotate_apart<false>(in, table, out, adjacent, heads, width, rotary);
}

template <typename T>
__global__ void fused_rope_backward_kernel(const T *in, const int *, const float *table,
                                           const int *, T *out, bool adjacent, int, int, int,
                                           int heads, int width, int rotary) {
  rotate_apart<true>(in, table, out, adjacent, heads, width, rotary);
}

template <typename T, bool kTranspose>
__global__ void thd_token_linear_kernel(const T *in, const float *table, T *out, int heads,
                                        int pairs, bool adjacent) {
  __shared__ float4 angles[64];
  for (int i = threadIdx.x; i < pairs; i += 32) {
    float4 a;
    sincosf(table[i], &a.y, &a.x);
    sincosf(table[i + pairs], &a.w, &a.z);
    angles[i] = a;
  }
  __syncwarp();
  for (int k = threadIdx.x; k < heads * pairs; k += 32) {
    const int first = k / pairs * 2 * pairs + k % pairs;
    const float4 a = angles[k % pairs];
    const float x = in[first], y = in[first + pairs];
    out[first] = T(ROTATE(x, a.x, kTranspose ? y : -y, kTranspose ? a.w : a.y));
    out[first + pairs] = T(ROTATE(y, a.z, x, kTranspose ? -a.y : a.w));
  }
}

template <typename T, bool kTranspose>
__global__ void thd_token_linear_narrow_kernel(const T *in, const float *table, T *out, int heads,
                                               int pairs, bool adjacent) {
  float s[2], c[2];
  for (int i = 0; i < 2; ++i) sincosf(table[threadIdx.x + i * pairs], s + i, c + i);
  for (int k = threadIdx.x; k < heads * pairs; k += pairs) {
    const float x = in[k], y = in[k + heads * pairs];
    out[k] = T(ROTATE(x, c[0], kTranspose ? y : -y, kTranspose ? s[1] : s[0]));
    out[k + heads * pairs] = T(ROTATE(y, c[1], x, kTranspose ? -s[0] : s[1]));
  }
}

template <typename T>
void *instance(int i) {
  void *all[] = {(void *)fused_rope_forward_kernel<T>, (void *)fused_rope_backward_kernel<T>,
                 (void *)thd_token_linear_kernel<T, false>,
                 (void *)thd_token_linear_kernel<T, true>,
                 (void *)thd_token_linear_narrow_kernel<T, false>,
                 (void *)thd_token_linear_narrow_kernel<T, true>};
  return all[i];
}
template void *instance<float>(int);
template void *instance<__half>(int);
template void *instance<__nv_bfloat16>(int);

}  // namespace forced
"""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return ci_script("sass_contraction")


@pytest.fixture(scope="module")
def tools() -> dict[str, str]:
    return cuda_tools("nvcc", "cuobjdump", "nvdisasm")


@pytest.fixture(scope="module")
def chips(tools: dict[str, str]) -> list[int]:
    listed = subprocess.run(
        [tools["nvcc"], "--list-gpu-code"], stdout=subprocess.PIPE, text=True, check=True
    )
    known = {int(number) for number in re.findall(r"sm_(\d+)$", listed.stdout, re.MULTILINE)}
    return [chip for chip in CHIPS if chip in known]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rotate", "options", "order", "sincos"),
    [
        ("cosine_fused(__VA_ARGS__)", [], COSINE_FUSED, "precise"),
        ("sine_fused(__VA_ARGS__)", [], SINE_FUSED, "precise"),
        ("unfused(__VA_ARGS__)", [], "unfused", "precise"),
        ("left_to_compiler(__VA_ARGS__)", ["-fmad=false"], "unfused", "precise"),
        (
            "adjacent ? cosine_fused(__VA_ARGS__) : sine_fused(__VA_ARGS__)",
            [],
            "mixed",
            "precise",
        ),
        ("sine_fused(__VA_ARGS__)", ["-use_fast_math"], SINE_FUSED, "fast"),
    ],
)
def test_forced_order(
    script: ModuleType,
    tools: dict[str, str],
    chips: list[int],
    tmp_path: Path,
    rotate: str,
    options: list[str],
    order: str,
    sincos: str,
) -> None:
    source = tmp_path / "forced.cu"
    source.write_text(f"#define ROTATE(...) ({rotate})\n{SOURCE}", encoding="utf-8")
    library = tmp_path / "forced.so"
    targets = [f"-gencode=arch=compute_{chip},code=sm_{chip}" for chip in chips]
    shared = ["-shared", "-Xcompiler", "-fPIC", "-o", library]
    subprocess.run([tools["nvcc"], *shared, *targets, *options, source], check=True)

    rows, ptx = script.analyse(library, tools["cuobjdump"], [tools["nvdisasm"]])

    assert ptx == "none"
    instances = {(row["chip"], row["kernel"], row["dtype"], row["variant"]) for row in rows}
    assert len(rows) == len(instances) == len(chips) * 3 * 6
    assert {int(row["chip"].removeprefix("sm_")) for row in rows} == set(chips)
    assert {(row["order"], row["unclear"], row["sincos"]) for row in rows} == {(order, 0, sincos)}


def test_rows_of_a_library_are_replaced(script: ModuleType, tmp_path: Path) -> None:
    table = tmp_path / "table.csv"
    row = dict.fromkeys(script.COLUMNS, "1")
    script.append(table, {"command": "old"}, [{**row, "library": "a"}, {**row, "library": "b"}])
    script.append(table, {"command": "new"}, [{**row, "library": "a", "chip": "2"}])
    lines = table.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "# command: new"
    kept = list(csv.DictReader(lines[1:]))
    assert [(one["library"], one["chip"]) for one in kept] == [("b", "1"), ("a", "2")]


def test_every_kernel_in_the_table_has_our_order() -> None:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("# ")))
    assert {(row["order"], row["sincos"]) for row in rows} == {(COSINE_FUSED, "precise")}
