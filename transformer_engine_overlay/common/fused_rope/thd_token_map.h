// SPDX-License-Identifier: Apache-2.0
//
// Index math of rotary position embedding on packed (THD) batches, for host and device alike:
// which sequence owns a local token, which position the token has in that sequence under context
// parallelism, and which row of the angle table it uses. Nothing else computes these.
//
// Terms. `cu_seqlens` holds b + 1 boundaries of the *global* packed batch. A context-parallel rank
// owns rows [cu_seqlens[i] / cp_size, cu_seqlens[i + 1] / cp_size) of its local tensor for
// sequence i. Each sequence is cut into 2 * cp_size chunks; rank r holds chunks r and
// 2 * cp_size - 1 - r, in this order (the dual-chunk, or zigzag, order).

#ifndef TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_TOKEN_MAP_H_
#define TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_TOKEN_MAP_H_

#include <cstdint>

#if defined(__CUDACC__)
#define THD_ROPE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define THD_ROPE_HOST_DEVICE inline
#endif

namespace transformer_engine {
namespace thd_rope {

// The boundaries of a packed batch as one context-parallel rank sees them.
struct PackedBatch {
  const int32_t *cu_seqlens;       // [num_sequences + 1], global boundaries
  const int32_t *start_positions;  // [num_sequences], or nullptr for zeros
  int64_t num_sequences;
  int64_t table_rows;  // rows of the angle table
  int32_t cp_size;
  int32_t cp_rank;
};

// Rows of one sequence in the local tensor: [begin, end).
struct LocalRows {
  int64_t begin;
  int64_t end;
};

// The table row of a token that has none: a tail row, or a position outside of the table.
constexpr int64_t kNoTableRow = -1;

// The local row at which sequence `i` begins; for i == num_sequences, the first tail row.
THD_ROPE_HOST_DEVICE int64_t local_boundary(const PackedBatch &batch, int64_t i) {
  return batch.cu_seqlens[i] / batch.cp_size;
}

THD_ROPE_HOST_DEVICE LocalRows local_rows(const PackedBatch &batch, int64_t sequence) {
  return {local_boundary(batch, sequence), local_boundary(batch, sequence + 1)};
}

// Position of local row `row` within its sequence of which this rank holds `length` rows.
// The halving comes after the multiplication, as in TE: it matters when `length` is odd.
THD_ROPE_HOST_DEVICE int64_t position_in_sequence(const PackedBatch &batch, int64_t row,
                                                  int64_t length) {
  if (batch.cp_size == 1) return row;
  const int64_t half = length / 2;
  if (row < half) return row + batch.cp_rank * length / 2;
  return row + length * batch.cp_size - (batch.cp_rank + 1) * length / 2 - half;
}

// Table row of local token `token`, given the sequence that owns it; kNoTableRow if the token lies
// outside of the sequence or its position lies outside of the table.
THD_ROPE_HOST_DEVICE int64_t table_row(const PackedBatch &batch, int64_t token, int64_t sequence) {
  const LocalRows rows = local_rows(batch, sequence);
  if (token < rows.begin || token >= rows.end) return kNoTableRow;
  int64_t position = position_in_sequence(batch, token - rows.begin, rows.end - rows.begin);
  if (batch.start_positions != nullptr) position += batch.start_positions[sequence];
  return position >= 0 && position < batch.table_rows ? position : kNoTableRow;
}

// The search for the owner of a token narrows [low, high) until one sequence is left, keeping
// local_boundary(low) <= token < local_boundary(high). Each round cuts the range into `lanes` parts
// of `step` sequences, and lane i looks at the end of part i. The invariant, rather than the order
// of the boundaries, is what later code leans on: with boundaries that decrease somewhere, the
// sequence that is found still holds the token, though the width of the search may decide which.
struct SequenceSearch {
  int64_t low;
  int64_t high;
};

THD_ROPE_HOST_DEVICE int64_t search_step(const SequenceSearch &search, int lanes) {
  return (search.high - search.low + lanes - 1) / lanes;
}

// Whether the part of lane `lane` ends beyond the token. True for the last lane, always.
THD_ROPE_HOST_DEVICE bool ends_beyond(const PackedBatch &batch, const SequenceSearch &search,
                                      int64_t step, int lane, int64_t token) {
  const int64_t end = search.low + (lane + 1) * step;
  return end >= search.high || local_boundary(batch, end) > token;
}

// The part of the first lane that ends beyond the token. The first, not a count of lanes: with
// boundaries that decrease, lanes behind it may disagree.
THD_ROPE_HOST_DEVICE SequenceSearch part_of_lane(const SequenceSearch &search, int64_t step,
                                                 int lane) {
  const int64_t end = search.low + (lane + 1) * step;
  return {search.low + lane * step, end < search.high ? end : search.high};
}

// Owner of local token `token`: the last sequence that begins at or before it, hence never an empty
// one. Needs num_sequences >= 1. A token before the first boundary or a tail row yields a sequence
// that does not hold it, which table_row() reports. With 2 lanes it is a binary search.
template <int kLanes = 2>
THD_ROPE_HOST_DEVICE int64_t find_sequence(const PackedBatch &batch, int64_t token) {
  SequenceSearch search{0, batch.num_sequences};
  while (search.high - search.low > 1) {
    const int64_t step = search_step(search, kLanes);
    int lane = 0;
    while (!ends_beyond(batch, search, step, lane, token)) ++lane;
    search = part_of_lane(search, step, lane);
  }
  return search.low;
}

#if defined(__CUDACC__)
// The same with the lanes of a warp side by side: 3 rounds for 30,000 sequences. All 32 lanes must
// call it with the same token; all get the result.
__device__ __forceinline__ int64_t find_sequence_warp(const PackedBatch &batch, int64_t token) {
  constexpr int kLanes = 32;
  const int lane = threadIdx.x % kLanes;
  SequenceSearch search{0, batch.num_sequences};
  while (search.high - search.low > 1) {
    const int64_t step = search_step(search, kLanes);
    const bool beyond = ends_beyond(batch, search, step, lane, token);
    search = part_of_lane(search, step, __ffs(__ballot_sync(0xffffffffu, beyond)) - 1);
  }
  return search.low;
}
#endif

}  // namespace thd_rope
}  // namespace transformer_engine

#endif  // TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_TOKEN_MAP_H_
