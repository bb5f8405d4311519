// SPDX-License-Identifier: Apache-2.0
//
// Launches the token-linear kernels. No framework: raw pointers in, cudaError_t out.

#ifndef TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_LAUNCH_CUH_
#define TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_LAUNCH_CUH_

#include <cuda_runtime.h>

#include "thd_narrow_kernel.cuh"
#include "thd_plan.h"
#include "thd_scalar_kernel.cuh"
#include "thd_wide_kernel.cuh"

namespace transformer_engine {
namespace thd_rope {

struct Launch {
  int64_t blocks;
  int block_size;
  size_t shared_bytes;
};

// What a kernel is launched with: the parameters, and for the vector kernels their plan.
template <typename... Plan>
using Kernel = void (*)(const ThdRopeParams, const Plan...);

// The kernel instance that fits the parameters. `Kernels` has a static member template
// `get<T, kInterleaved, kTranspose>()` that returns a kernel.
template <typename Kernels, typename T>
auto select_variant(const ThdRopeParams &params) {
  if (params.interleaved) {
    return params.transpose ? Kernels::template get<T, true, true>()
                            : Kernels::template get<T, true, false>();
  }
  return params.transpose ? Kernels::template get<T, false, true>()
                          : Kernels::template get<T, false, false>();
}

// Launches one of `Kernels` with `blocks` blocks on `stream`, or answers what needs no kernel:
// nothing to do, or an output of zeros because no sequence or no table row exists. A grid that CUDA
// cannot launch is refused here, before its size is narrowed.
template <typename Kernels, typename... Plan>
cudaError_t launch_thd_rope(const ThdRopeParams &params, const Launch &launch, cudaStream_t stream,
                            const Plan &...plan) {
  const int64_t elements =
      params.num_tokens * static_cast<int64_t>(params.num_heads) * params.head_dim;
  if (elements == 0) return cudaSuccess;
  if (params.batch.num_sequences == 0 || params.batch.table_rows == 0) {
    return cudaMemsetAsync(params.output, 0, elements * element_size(params.dtype), stream);
  }
  if (launch.blocks > kMaxGridBlocks) return cudaErrorInvalidConfiguration;
  Kernel<Plan...> kernel = nullptr;
  switch (params.dtype) {
    case DataType::kFloat32:
      kernel = select_variant<Kernels, float>(params);
      break;
    case DataType::kFloat16:
      kernel = select_variant<Kernels, __half>(params);
      break;
    case DataType::kBFloat16:
      kernel = select_variant<Kernels, __nv_bfloat16>(params);
      break;
    default:
      return cudaErrorInvalidValue;
  }
  kernel<<<static_cast<unsigned int>(launch.blocks), launch.block_size, launch.shared_bytes,
           stream>>>(params, plan...);
  return cudaGetLastError();
}

struct ScalarKernels {
  template <typename T, bool kInterleaved, bool kTranspose>
  static auto get() {
    return &thd_token_linear_kernel<T, kInterleaved, kTranspose>;
  }
};

template <int kHeads>
struct NarrowKernels {
  template <typename T, bool kInterleaved, bool kTranspose>
  static auto get() {
    return &thd_token_linear_narrow_kernel<T, kInterleaved, kTranspose, kHeads>;
  }
};

template <int kLanes>
struct WideKernels {
  template <typename T, bool kInterleaved, bool kTranspose>
  static auto get() {
    return &thd_token_linear_wide_kernel<T, kInterleaved, kTranspose, kLanes>;
  }
};

inline cudaError_t launch_token_linear(const ThdRopeParams &params, cudaStream_t stream) {
  const Body body = choose_body(params);
  const int64_t blocks = token_linear_grid_blocks(params);
  if (body == Body::kScalar) {
    return launch_thd_rope<ScalarKernels>(params, {blocks, kBlockSize, 0}, stream);
  }
  const VectorPlan plan = vector_plan(params, body);
  const Launch narrow{blocks, kNarrowBlockSize, 0};
  const Launch wide{blocks, 1 << plan.lane_bits, angle_slots(params) * sizeof(PairAngles)};
  switch (body) {
    case Body::kNarrow2:
      return launch_thd_rope<NarrowKernels<2>>(params, narrow, stream, plan);
    case Body::kNarrow4:
      return launch_thd_rope<NarrowKernels<4>>(params, narrow, stream, plan);
    case Body::kWide32:
      return launch_thd_rope<WideKernels<32>>(params, wide, stream, plan);
    default:
      return launch_thd_rope<WideKernels<64>>(params, wide, stream, plan);
  }
}

}  // namespace thd_rope
}  // namespace transformer_engine

#endif  // TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_LAUNCH_CUH_
