// SPDX-License-Identifier: Apache-2.0
//
// Launches the token-linear kernels. No framework: raw pointers in, cudaError_t out.

#ifndef TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_LAUNCH_CUH_
#define TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_LAUNCH_CUH_

#include <cuda_runtime.h>

#include "thd_kernels.cuh"
#include "thd_params.h"

namespace transformer_engine {
namespace thd_rope {

inline int64_t token_linear_grid_blocks(int64_t num_tokens) {
  return num_tokens / kWarpsPerBlock + (num_tokens % kWarpsPerBlock != 0);
}

inline size_t element_size(DataType dtype) { return dtype == DataType::kFloat32 ? 4 : 2; }

// The kernel instance that fits the parameters. `Kernels` has a static member template
// `get<T, kInterleaved, kTranspose>()` that returns a kernel.
template <typename Kernels, typename T>
auto select_kernel(const ThdRopeParams &params) {
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
template <typename Kernels>
cudaError_t launch_thd_rope(const ThdRopeParams &params, int64_t blocks, cudaStream_t stream) {
  const int64_t elements =
      params.num_tokens * static_cast<int64_t>(params.num_heads) * params.head_dim;
  if (elements == 0) return cudaSuccess;
  if (params.batch.num_sequences == 0 || params.batch.table_rows == 0) {
    return cudaMemsetAsync(params.output, 0, elements * element_size(params.dtype), stream);
  }
  if (blocks > kMaxGridBlocks) return cudaErrorInvalidConfiguration;
  void (*kernel)(const ThdRopeParams) = nullptr;
  switch (params.dtype) {
    case DataType::kFloat32:
      kernel = select_kernel<Kernels, float>(params);
      break;
    case DataType::kFloat16:
      kernel = select_kernel<Kernels, __half>(params);
      break;
    case DataType::kBFloat16:
      kernel = select_kernel<Kernels, __nv_bfloat16>(params);
      break;
    default:
      return cudaErrorInvalidValue;
  }
  kernel<<<static_cast<unsigned int>(blocks), kBlockSize, 0, stream>>>(params);
  return cudaGetLastError();
}

struct TokenLinearKernels {
  template <typename T, bool kInterleaved, bool kTranspose>
  static auto get() {
    return &thd_token_linear_kernel<T, kInterleaved, kTranspose>;
  }
};

inline cudaError_t launch_token_linear(const ThdRopeParams &params, cudaStream_t stream) {
  return launch_thd_rope<TokenLinearKernels>(params, token_linear_grid_blocks(params.num_tokens),
                                             stream);
}

}  // namespace thd_rope
}  // namespace transformer_engine

#endif  // TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_LAUNCH_CUH_
