// SPDX-License-Identifier: Apache-2.0

#include "torch_arguments.h"

#include "fused_rope/thd_params.h"
#include "torch_view.h"

namespace nb = nanobind;

namespace transformer_engine {
namespace thd_rope {
namespace {

// A contiguous int32 vector on `device` with at least `min_entries` entries.
bool read_metadata(nb::handle value, int32_t device, int64_t min_entries, const int32_t **address,
                   int64_t *entries) {
  TensorView view;
  if (!view_tensor(value, &view) || view.ndim != 1 || view.dtype != ViewType::kInt32 ||
      view.device != device || view.shape[0] < min_entries || !view.is_contiguous()) {
    return false;
  }
  *entries = view.shape[0];
  *address = static_cast<const int32_t *>(view.data);
  return view.has_memory();
}

}  // namespace

bool read_table(nb::handle value, int32_t device, int64_t head_dim, AngleTable *table) {
  TensorView view;
  if (!view_tensor(value, &view) || view.ndim != 4 || view.dtype != ViewType::kFloat32 ||
      view.device != device || view.shape[1] != 1 || view.shape[2] != 1 || view.shape[3] % 2 != 0 ||
      view.shape[3] > head_dim || !view.is_contiguous() || is_negated(value)) {
    return false;
  }
  table->freqs = static_cast<const float *>(view.data);
  table->rows = view.shape[0];
  table->rotary_dim = static_cast<int32_t>(view.shape[3]);
  return view.has_memory();
}

bool read_batch(nb::handle cu_seqlens, nb::handle start_positions, int32_t device,
                PackedBatch *batch) {
  int64_t entries = 0, starts = 0;
  if (!read_metadata(cu_seqlens, device, 1, &batch->cu_seqlens, &entries)) return false;
  if (entries > kMaxSequences) return false;
  batch->num_sequences = static_cast<int32_t>(entries - 1);
  return start_positions.is_none() || read_metadata(start_positions, device, batch->num_sequences,
                                                    &batch->start_positions, &starts);
}

bool read_ranks(nb::handle cp_size, nb::handle cp_rank, PackedBatch *batch) {
  if (!PyLong_CheckExact(cp_size.ptr()) || !PyLong_CheckExact(cp_rank.ptr())) return false;
  int overflow = 0;
  const int64_t size = PyLong_AsLongLongAndOverflow(cp_size.ptr(), &overflow);
  if (overflow != 0 || size < 1 || size > INT32_MAX) return false;
  const int64_t rank = PyLong_AsLongLongAndOverflow(cp_rank.ptr(), &overflow);
  if (overflow != 0 || rank < 0 || rank >= size) return false;
  batch->cp_size = static_cast<int32_t>(size);
  batch->cp_rank = static_cast<int32_t>(rank);
  return true;
}

}  // namespace thd_rope
}  // namespace transformer_engine
