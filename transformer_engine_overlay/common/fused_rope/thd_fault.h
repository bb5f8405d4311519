// SPDX-License-Identifier: Apache-2.0
//
// Faults that a kernel meets in its metadata, and the record that tells the host of the first one
// without a synchronisation. A fault never changes what is computed: a row without a table row is
// zeros, and a boundary that does not divide keeps TE's positions.

#ifndef TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_FAULT_H_
#define TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_FAULT_H_

#include <cstdint>

#include "thd_token_map.h"

namespace transformer_engine {
namespace thd_rope {

enum class FaultKind : int32_t {
  kNone = 0,
  kPosition = 1,  // a position that the table has no row for
  kBoundary = 2,  // a boundary not divisible by 2 * cp_size
  kBefore = 3,    // a row before the first boundary
  kDisorder = 4,  // boundaries that decrease, so that the owner depends on how one looks for it
};

// What is known of a fault. `value` is the position, the boundary, or the row; `limit` what it had
// to be below, a multiple of, or not below.
struct Fault {
  int32_t kind;
  int32_t sequence;
  int32_t cp_size;
  int32_t cp_rank;
  int64_t value;
  int64_t limit;
};

// In memory that host and device see: written once, `valid` last.
struct FaultRecord {
  Fault fault;
  uint32_t valid;
};

// Where a kernel reports. The latch, on the device, lets the first fault win; null: nowhere.
struct FaultSink {
  unsigned int *latch;
  FaultRecord *record;
};

// The fault of a token whose row is faulty(), looked up anew: nobody waits for this.
THD_ROPE_HOST_DEVICE Fault find_fault(const PackedBatch &batch, int64_t token) {
  const int32_t sequence = find_sequence(batch, token);
  const int32_t begin = batch.cu_seqlens[sequence];
  const int32_t end = batch.cu_seqlens[sequence + 1];
  const LocalRows rows = local_rows(batch, begin, end);
  Fault fault{0, sequence, batch.cp_size, batch.cp_rank, 0, 0};
  if (token < rows.begin) {
    fault.kind = static_cast<int32_t>(FaultKind::kBefore);
    fault.value = token;
    fault.limit = rows.begin;
    return fault;
  }
  const int64_t position = sequence_position(batch, token, sequence, rows);
  if (position < 0 || position >= batch.table_rows) {
    fault.kind = static_cast<int32_t>(FaultKind::kPosition);
    fault.value = position;
    fault.limit = batch.table_rows;
    return fault;
  }
  const bool uneven = batch.cp_size != 1 && !divides(batch, begin, end, rows);
  fault.kind = static_cast<int32_t>(uneven ? FaultKind::kBoundary : FaultKind::kDisorder);
  fault.limit = 2 * static_cast<int64_t>(batch.cp_size);
  fault.value = begin % fault.limit != 0 ? begin : end;
  return fault;
}

#if defined(__CUDACC__)
// Called by one lane for a faulty token.
__device__ __forceinline__ void record_fault(const PackedBatch &batch, const FaultSink &sink,
                                             int64_t token) {
  volatile unsigned int *latch = sink.latch;
  if (latch == nullptr || *latch != 0 || atomicCAS(sink.latch, 0u, 1u) != 0) return;
  sink.record->fault = find_fault(batch, token);
  __threadfence_system();
  *const_cast<volatile uint32_t *>(&sink.record->valid) = 1;
}

// The same as a call, for kernels that have no registers for it. As the last thing that a lane
// does: then the call saves no register. By value: a reference would move the kernel's parameters
// into local memory.
__device__ __noinline__ void call_record_fault(PackedBatch batch, FaultSink sink, int64_t token) {
  record_fault(batch, sink, token);
}
#endif

}  // namespace thd_rope
}  // namespace transformer_engine

#endif  // TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_FAULT_H_
