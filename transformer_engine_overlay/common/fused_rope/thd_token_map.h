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
  int64_t table_rows;              // rows of the angle table
  int32_t num_sequences;
  int32_t cp_size;
  int32_t cp_rank;
};

// Rows of one sequence in the local tensor: [begin, end).
struct LocalRows {
  int64_t begin;
  int64_t end;
};

// Where a token finds its angles. `index` is negative if nowhere: for a tail row, which is no
// fault, and for a row before the first boundary or a position outside of the table, which are.
struct TableRow {
  int64_t index;
  bool faulty;  // also where a boundary is not divisible by 2 * cp_size
};

constexpr int64_t kNoTableRow = -1;

// The local row at which a sequence begins whose global boundary is `boundary`; for the last
// boundary, the first tail row.
THD_ROPE_HOST_DEVICE int64_t local_boundary(const PackedBatch &batch, int32_t boundary) {
  return batch.cp_size == 1 ? boundary : boundary / batch.cp_size;
}

THD_ROPE_HOST_DEVICE LocalRows local_rows(const PackedBatch &batch, int32_t begin, int32_t end) {
  return {local_boundary(batch, begin), local_boundary(batch, end)};
}

THD_ROPE_HOST_DEVICE LocalRows local_rows(const PackedBatch &batch, int32_t sequence) {
  return local_rows(batch, batch.cu_seqlens[sequence], batch.cu_seqlens[sequence + 1]);
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

// Position of local token `token`, start position included, which selects the table row.
THD_ROPE_HOST_DEVICE int64_t sequence_position(const PackedBatch &batch, int64_t token,
                                               int32_t sequence, const LocalRows &rows) {
  const int64_t position = position_in_sequence(batch, token - rows.begin, rows.end - rows.begin);
  return batch.start_positions == nullptr ? position : position + batch.start_positions[sequence];
}

// Whether both of a sequence's boundaries divide by 2 * cp_size; `rows` are those of (begin, end).
THD_ROPE_HOST_DEVICE bool divides(const PackedBatch &batch, int32_t begin, int32_t end,
                                  const LocalRows &rows) {
  return rows.begin * batch.cp_size == begin && rows.end * batch.cp_size == end &&
         ((rows.begin | rows.end) & 1) == 0;
}

// Table row of local token `token`, given the sequence that owns it and its boundaries.
THD_ROPE_HOST_DEVICE TableRow table_row(const PackedBatch &batch, int64_t token, int32_t sequence,
                                        int32_t begin, int32_t end) {
  const LocalRows rows = local_rows(batch, begin, end);
  if (token >= rows.end) return {kNoTableRow, false};
  if (token < rows.begin) return {kNoTableRow, true};
  const int64_t position = sequence_position(batch, token, sequence, rows);
  if (position < 0 || position >= batch.table_rows) return {kNoTableRow, true};
  return {position, batch.cp_size != 1 && !divides(batch, begin, end, rows)};
}

THD_ROPE_HOST_DEVICE TableRow table_row(const PackedBatch &batch, int64_t token, int32_t sequence) {
  return table_row(batch, token, sequence, batch.cu_seqlens[sequence],
                   batch.cu_seqlens[sequence + 1]);
}

// The search for the owner of a token narrows [low, high) until one sequence is left, keeping
// local_boundary(low) <= token < local_boundary(high). Each round cuts the range into `lanes` parts
// of `step` sequences, and lane i looks at the end of part i. The invariant, rather than the order
// of the boundaries, is what later code leans on: with boundaries that decrease somewhere, the
// sequence that is found still holds the token, though the width of the search may decide which.
struct SequenceSearch {
  int32_t low;
  int32_t high;
};

// local_boundary(i) > token is the same as cu_seqlens[i] > last_before(token): no division.
THD_ROPE_HOST_DEVICE int32_t last_before(const PackedBatch &batch, int64_t token) {
  const int64_t last = (token + 1) * batch.cp_size - 1;
  return static_cast<int32_t>(last < INT32_MAX ? last : INT32_MAX);
}

THD_ROPE_HOST_DEVICE int32_t search_step(const SequenceSearch &search, int lanes) {
  return static_cast<int32_t>(static_cast<uint32_t>(search.high - search.low + lanes - 1) / lanes);
}

// Whether the part of lane `lane` ends beyond the token. True for the last lane, always.
THD_ROPE_HOST_DEVICE bool ends_beyond(const PackedBatch &batch, const SequenceSearch &search,
                                      int32_t step, int lane, int32_t last) {
  const int32_t end = search.low + (lane + 1) * step;
  const int32_t boundary = batch.cu_seqlens[end < search.high ? end : search.high];
  return end >= search.high || boundary > last;
}

// The part of the first lane that ends beyond the token. The first, not a count of lanes: with
// boundaries that decrease, lanes behind it may disagree.
THD_ROPE_HOST_DEVICE SequenceSearch part_of_lane(const SequenceSearch &search, int32_t step,
                                                 int lane) {
  const int32_t end = search.low + (lane + 1) * step;
  return {search.low + lane * step, end < search.high ? end : search.high};
}

// Owner of local token `token`: the last sequence that begins at or before it, hence never an empty
// one. Needs num_sequences >= 1. A token before the first boundary or a tail row yields a sequence
// that does not hold it, which table_row() reports. With 2 lanes it is a binary search.
template <int kLanes = 2>
THD_ROPE_HOST_DEVICE int32_t find_sequence(const PackedBatch &batch, int64_t token) {
  const int32_t last = last_before(batch, token);
  SequenceSearch search{0, batch.num_sequences};
  while (search.high - search.low > 1) {
    const int32_t step = search_step(search, kLanes);
    int lane = 0;
    while (!ends_beyond(batch, search, step, lane, last)) ++lane;
    search = part_of_lane(search, step, lane);
  }
  return search.low;
}

#if defined(__CUDACC__)
constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// One round of the search with the lanes of a warp side by side.
__device__ __forceinline__ SequenceSearch narrow_by_warp(const PackedBatch &batch,
                                                         const SequenceSearch &search,
                                                         int32_t last) {
  const int32_t step = search_step(search, kWarpSize);
  const bool beyond = ends_beyond(batch, search, step, threadIdx.x % kWarpSize, last);
  return part_of_lane(search, step, __ffs(__ballot_sync(kAllLanes, beyond)) - 1);
}

// find_sequence() by a warp, from a range that keeps the invariant: 3 rounds for 30,000 sequences.
// All 32 lanes must call it with the same arguments; all get the result.
__device__ __forceinline__ int32_t find_sequence_warp(const PackedBatch &batch,
                                                      SequenceSearch search, int32_t last) {
  while (search.high - search.low > 1) search = narrow_by_warp(batch, search, last);
  return search.low;
}

__device__ __forceinline__ int32_t find_sequence_warp(const PackedBatch &batch, int64_t token) {
  return find_sequence_warp(batch, SequenceSearch{0, batch.num_sequences},
                            last_before(batch, token));
}

// Table rows of the tokens of a warp, which are consecutive from `first_token` on: each belongs to
// a group of 1 << lane_bits lanes, of which there are at most kMaxGroups; `group` is the lane's.
// All 32 lanes must call it; those of a group get the same result.
//
// The search for the first token ends when 31 sequences are left. Each lane then holds one of the
// 32 boundaries around them, and these tell all owners and their rows without another load: a load
// here would share a scoreboard with those of the input, and wait for them. A token behind the 31
// sequences is searched for by itself.
template <int kMaxGroups>
__device__ __forceinline__ TableRow table_row_of_group(const PackedBatch &batch,
                                                       int64_t first_token, int group,
                                                       int lane_bits) {
  const int lane = threadIdx.x % kWarpSize;
  const int64_t token = first_token + group;
  const int32_t last = last_before(batch, token);
  SequenceSearch search{0, batch.num_sequences};
  if (search.high >= kWarpSize) {
    const int32_t first_last = __shfl_sync(kAllLanes, last, 0);
    do {
      search = narrow_by_warp(batch, search, first_last);
    } while (search.high - search.low >= kWarpSize);
  }
  const int32_t index = min(search.low + lane, batch.num_sequences);
  const int32_t boundary = batch.cu_seqlens[index];
  // Where sequence low + lane - 1 ends, and whether that is beyond a token.
  const bool is_last = search.low + lane >= batch.num_sequences;
  unsigned beyond = 0;
#pragma unroll
  for (int i = 0; i < kMaxGroups; ++i) {
    const int32_t other = __shfl_sync(kAllLanes, last, i << lane_bits);
    const unsigned mask = __ballot_sync(kAllLanes, is_last || boundary > other);
    if (group == i) beyond = mask;
  }
  const int ends_at = max(__ffs(beyond) - 1, 1);
  const int32_t begin = __shfl_sync(kAllLanes, boundary, ends_at - 1);
  const int32_t end = __shfl_sync(kAllLanes, boundary, ends_at);
  TableRow row = table_row(batch, token, search.low + ends_at - 1, begin, end);
  if (__any_sync(kAllLanes, beyond == 0)) {
    const SequenceSearch rest{min(search.low + kWarpSize - 1, batch.num_sequences - 1),
                              batch.num_sequences};
#pragma unroll 1
    for (int i = 0; i < kMaxGroups; ++i) {
      const int32_t other = __shfl_sync(kAllLanes, last, i << lane_bits);
      const TableRow far =
          table_row(batch, first_token + i, find_sequence_warp(batch, rest, other));
      if (group == i && beyond == 0) row = far;
    }
  }
  return row;
}
#endif

}  // namespace thd_rope
}  // namespace transformer_engine

#endif  // TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_TOKEN_MAP_H_
