// SPDX-License-Identifier: Apache-2.0
//
// A legacy-grid kernel of our own: one block per table row and sequence, the second path where
// there is no TransformerEngine to provide one.

#ifndef TRANSFORMER_ENGINE_OVERLAY_NATIVE_LEGACY_GRID_CUH_
#define TRANSFORMER_ENGINE_OVERLAY_NATIVE_LEGACY_GRID_CUH_

#include "fused_rope/thd_launch.cuh"
#include "fused_rope/thd_scalar_kernel.cuh"

namespace transformer_engine {
namespace thd_rope {

// The grid is flat, (sequence, table row) row-major, so that the number of sequences is not held to
// gridDim.y. A block takes every table_rows-th row of its sequence: one, unless rows outnumber the
// table. The first and the last sequence also take the rows before and behind all sequences, which
// own no table row and become zeros.
template <typename T, bool kInterleaved, bool kTranspose>
__global__ void __launch_bounds__(kBlockSize, 8)
    thd_legacy_grid_kernel(const ThdRopeParams params) {
  __shared__ PairAngles angles[kPairsPerChunk];
  const int64_t table_rows = params.batch.table_rows;
  const int64_t last_sequence = params.batch.num_sequences - 1;
  const int64_t sequence = blockIdx.x / table_rows;
  LocalRows rows = local_rows(params.batch, sequence);
  if (sequence == 0 || rows.begin < 0) rows.begin = 0;
  if (sequence == last_sequence || rows.end > params.num_tokens) rows.end = params.num_tokens;
  for (int64_t token = rows.begin + blockIdx.x % table_rows; token < rows.end;
       token += table_rows) {
    process_token<T, kInterleaved, kTranspose>(BlockGroup{}, params, token, sequence, angles);
    __syncthreads();  // before the next token's angles overwrite these
  }
}

struct LegacyGridKernels {
  template <typename T, bool kInterleaved, bool kTranspose>
  static auto get() {
    return &thd_legacy_grid_kernel<T, kInterleaved, kTranspose>;
  }
};

inline cudaError_t launch_legacy_grid(const ThdRopeParams &params, cudaStream_t stream) {
  return launch_thd_rope<LegacyGridKernels>(
      params, {legacy_grid_blocks(params.batch), kBlockSize, 0}, stream);
}

}  // namespace thd_rope
}  // namespace transformer_engine

#endif  // TRANSFORMER_ENGINE_OVERLAY_NATIVE_LEGACY_GRID_CUH_
