// SPDX-License-Identifier: Apache-2.0
//
// Fused calls with torch tensors, from C++.

#ifndef TRANSFORMER_ENGINE_OVERLAY_NATIVE_TORCH_FUSED_CALL_H_
#define TRANSFORMER_ENGINE_OVERLAY_NATIVE_TORCH_FUSED_CALL_H_

#include <nanobind/nanobind.h>

namespace transformer_engine {
namespace thd_rope {

// The arguments, borrowed. Tensors are views [t, groups, heads, dim] of what is read and written.
struct TorchFusedCall {
  nanobind::handle query, query_output, key, key_output;
  nanobind::handle value, value_output;  // None for query and key alone
  nanobind::handle query_freqs, key_freqs;
  nanobind::handle start_positions, cu_seqlens, cp_size, cp_rank;
  bool interleaved;
  bool transpose;
};

// Writes the outputs in one launch, if the fused kernels take the call; false if they do not, and
// nothing was done.
bool rotate_fused(const TorchFusedCall &call);

}  // namespace thd_rope
}  // namespace transformer_engine

#endif  // TRANSFORMER_ENGINE_OVERLAY_NATIVE_TORCH_FUSED_CALL_H_
