// SPDX-License-Identifier: Apache-2.0
//
// The branch at the top of TransformerEngine's fused_rope_forward and fused_rope_backward: takes a
// THD call to the token-linear kernels, or leaves it to the code below. For fused_rope.cu of a
// patched tree alone, behind the headers that declare NVTE_QKV_Format, DType, NVTE_ERROR and
// NVTE_CHECK_CUDA.

#ifndef TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_TE_BRANCH_CUH_
#define TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_TE_BRANCH_CUH_

#include <cstdint>

#include "thd_launch.cuh"
#include "thd_params.h"

// The version of the overlay that the library was patched with, such as "0.1.0". Also the sign of
// a patched library: its launcher needs no router in Python.
extern "C" const char *nvte_fused_rope_thd_overlay_version();

namespace transformer_engine {
namespace thd_rope {

constexpr const char *kOverlayVersion = "0.1.0";

// The arguments of the two functions that are no tensors, by the names that they have there.
struct LauncherArguments {
  bool interleaved;
  int cp_size, cp_rank;
  int b, h, d, d2;
  int stride_t, stride_h, stride_d;
};

inline PathRequest checked_path_request() {
  const PathRequest request = path_request_from_environment();
  if (request == PathRequest::kInvalid) {
    NVTE_ERROR(kPathVariable, " is '", std::getenv(kPathVariable),
               "'; it must be 1 (token-linear), 0 (the launch without the overlay) or unset "
               "(automatic)");
  }
  return request;
}

// Whether the kernels cover the call, and if so, its parameters. What they do not cover is left to
// the code below with all its errors: other types, tensors without metadata, ranks that make no
// sense. A rank other than 0 of cp_size 1 is not looked at there.
template <typename TensorType>
bool read_call(const TensorType &input, const TensorType &cu_seqlens, const TensorType &freqs,
               const TensorType &start_positions, const TensorType &output,
               const LauncherArguments &call, ThdRopeParams *params) {
  switch (input.data.dtype) {
    case DType::kFloat32:
      params->dtype = DataType::kFloat32;
      break;
    case DType::kFloat16:
      params->dtype = DataType::kFloat16;
      break;
    case DType::kBFloat16:
      params->dtype = DataType::kBFloat16;
      break;
    default:
      return false;
  }
  const bool has_starts = start_positions.data.dptr != nullptr;
  if (cu_seqlens.data.dptr == nullptr || cu_seqlens.data.dtype != DType::kInt32 ||
      freqs.data.dtype != DType::kFloat32 || output.data.dtype != input.data.dtype ||
      (has_starts && start_positions.data.dtype != DType::kInt32)) {
    return false;
  }
  if (call.b < 0 || call.b > kMaxSequences || call.h < 0 || call.d2 < 1 || call.d2 % 2 != 0 ||
      call.d2 > call.d || call.cp_size < 1 || call.cp_rank < 0 || call.cp_rank >= call.cp_size) {
    return false;
  }
  if (input.data.shape.size() != 3 || freqs.data.shape.size() == 0 ||
      freqs.data.numel() != freqs.data.shape[0] * call.d2) {
    return false;
  }
  params->input = input.data.dptr;
  params->output = output.data.dptr;
  params->freqs = reinterpret_cast<const float *>(freqs.data.dptr);
  params->batch.cu_seqlens = reinterpret_cast<const int32_t *>(cu_seqlens.data.dptr);
  params->batch.start_positions =
      reinterpret_cast<const int32_t *>(has_starts ? start_positions.data.dptr : nullptr);
  params->batch.table_rows = static_cast<int64_t>(freqs.data.shape[0]);
  params->batch.num_sequences = call.b;
  params->batch.cp_size = call.cp_size;
  params->batch.cp_rank = call.cp_rank;
  // The rows of the tensor, which is local to the rank; cu_seqlens counts those of all ranks.
  params->num_tokens = static_cast<int64_t>(input.data.shape[0]);
  params->stride_t = call.stride_t;
  params->stride_h = call.stride_h;
  params->stride_d = call.stride_d;
  params->num_heads = call.h;
  params->head_dim = call.d;
  params->rotary_dim = call.d2;
  params->interleaved = call.interleaved;
  return true;
}

// Returns whether the call was taken.
template <typename TensorType>
bool launch_if_token_linear(const TensorType &input, const TensorType &cu_seqlens,
                            const TensorType &freqs, const TensorType &start_positions,
                            const TensorType &output, NVTE_QKV_Format qkv_format,
                            const LauncherArguments &call, bool transpose, cudaStream_t stream) {
  if (qkv_format != NVTE_QKV_Format::NVTE_THD) return false;
  const PathRequest request = checked_path_request();
  if (choose_path(request) != Path::kTokenLinear) return false;
  ThdRopeParams params{};
  if (!read_call(input, cu_seqlens, freqs, start_positions, output, call, &params)) return false;
  params.transpose = transpose;
  NVTE_CHECK_CUDA(launch_token_linear(params, stream));
  return true;
}

}  // namespace thd_rope
}  // namespace transformer_engine

#endif  // TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_TE_BRANCH_CUH_
