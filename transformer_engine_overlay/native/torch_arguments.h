// SPDX-License-Identifier: Apache-2.0
//
// The arguments that all calls have, read from torch. Each answers false where an argument is not
// as the kernels take it; checks.py then converts it, or has the words.

#ifndef TRANSFORMER_ENGINE_OVERLAY_NATIVE_TORCH_ARGUMENTS_H_
#define TRANSFORMER_ENGINE_OVERLAY_NATIVE_TORCH_ARGUMENTS_H_

#include <nanobind/nanobind.h>

#include <cstdint>

#include "fused_rope/thd_token_map.h"

namespace transformer_engine {
namespace thd_rope {

struct AngleTable {
  const float *freqs;
  int64_t rows;
  int32_t rotary_dim;
};

// A contiguous float32 table [s, 1, 1, d2] on `device`, d2 even and at most head_dim.
bool read_table(nanobind::handle value, int32_t device, int64_t head_dim, AngleTable *table);

// Boundaries and start positions (or None), contiguous int32 vectors on `device`.
bool read_batch(nanobind::handle cu_seqlens, nanobind::handle start_positions, int32_t device,
                PackedBatch *batch);

// Two ints, 0 <= cp_rank < cp_size.
bool read_ranks(nanobind::handle cp_size, nanobind::handle cp_rank, PackedBatch *batch);

}  // namespace thd_rope
}  // namespace transformer_engine

#endif  // TRANSFORMER_ENGINE_OVERLAY_NATIVE_TORCH_ARGUMENTS_H_
