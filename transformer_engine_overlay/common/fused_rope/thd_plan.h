// SPDX-License-Identifier: Apache-2.0
//
// Which body the token-linear path has for a call, and how lanes share the tokens: the only place
// where this is decided. Host code without CUDA or any framework.

#ifndef TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_PLAN_H_
#define TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_PLAN_H_

#include <cstdint>

#include "thd_params.h"

namespace transformer_engine {
namespace thd_rope {

// The bodies give the same bits; they differ in what they ask for and in speed.
enum class Body : int32_t {
  kScalar = 0,   // any strides, any alignment; a warp a token
  kNarrow2 = 1,  // vectors; a warp has several tokens, a lane a column of all heads, 2 in flight
  kNarrow4 = 2,  // the same with 4 heads in flight
  kWide32 = 3,   // vectors; 32 lanes a token, angles in shared memory
  kWide64 = 4,   // the same with 64 lanes
};

constexpr int kVectorBytes = 16;

inline int32_t element_size(DataType dtype) { return dtype == DataType::kFloat32 ? 4 : 2; }

// A unit is what a lane rotates at a time: the vectors that hold whole pairs, one of first and one
// of second elements (half-split), or one of both (interleaved).
inline int32_t vectors_per_unit(const ThdRopeParams &params) { return params.interleaved ? 1 : 2; }

inline int32_t units_per_head(const ThdRopeParams &params) {
  return params.rotary_dim * element_size(params.dtype) / (vectors_per_unit(params) * kVectorBytes);
}

// Whether every row, head and half begins on a vector, in both tensors and in the table, and the
// index arithmetic inside of a row fits 32 bits.
inline bool fits_vectors(const ThdRopeParams &params) {
  const int64_t bytes = element_size(params.dtype);
  const int64_t unit = vectors_per_unit(params) * kVectorBytes;
  const auto aligned = [](const void *pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % kVectorBytes == 0;
  };
  return params.stride_d == 1 && params.stride_t * bytes % kVectorBytes == 0 &&
         params.stride_h * bytes % kVectorBytes == 0 &&
         params.head_dim * bytes % kVectorBytes == 0 && params.rotary_dim > 0 &&
         params.rotary_dim * bytes % unit == 0 && aligned(params.input) && aligned(params.output) &&
         aligned(params.freqs) &&
         static_cast<int64_t>(params.num_heads) * params.head_dim <= INT32_MAX;
}

// Angles of a token in the wide bodies' shared memory: those of neighbouring pairs lie an odd
// number of slots apart, so that neither a column of them nor a row meets in a bank.
inline int32_t angle_slot_stride(const ThdRopeParams &params) { return units_per_head(params) | 1; }

inline int32_t angle_slots(const ThdRopeParams &params) {
  const int32_t pairs_per_unit = params.rotary_dim / 2 / units_per_head(params);
  return pairs_per_unit * angle_slot_stride(params);
}

// What fits into a block's shared memory without asking for more: rotary_dim up to 6,000 or so.
constexpr int32_t kMaxAngleSlots = 48 * 1024 / 16;

// The body for a call. The thresholds were measured on an H200 (ci/results/attempts.md).
inline Body choose_body(const ThdRopeParams &params) {
  if (!fits_vectors(params)) return Body::kScalar;
  const int32_t columns = units_per_head(params);
  const int64_t vectors =
      static_cast<int64_t>(params.num_heads) * columns * vectors_per_unit(params);
  if (vectors >= 256 || columns > 32) {
    return angle_slots(params) <= kMaxAngleSlots ? Body::kWide64 : Body::kScalar;
  }
  const bool is_wide = vectors >= 160 || (vectors >= 96 && params.num_heads >= 8);
  if (is_wide && !params.interleaved) return Body::kWide32;
  return params.num_heads <= 4 ? Body::kNarrow2 : Body::kNarrow4;
}

// How a lane walks over the (head, column) of a token, `columns` columns of a vector's width a
// head, in steps of the number of lanes. Steps are elements: of the input, which has strides, and
// of the output, which is contiguous. A wrap leads from behind a head's last column into the next
// head.
struct LaneWalk {
  int32_t columns;
  int32_t reciprocal;  // lane / columns is lane * reciprocal >> 16 for lane < 64
  int32_t head_step, column_step;
  int64_t input_step, input_wrap;
  int32_t output_step, output_wrap;
};

inline LaneWalk lane_walk(const ThdRopeParams &params, int32_t columns, int32_t lanes) {
  LaneWalk walk{};
  if (columns == 0) return walk;
  const int32_t width = kVectorBytes / element_size(params.dtype);
  walk.columns = columns;
  walk.reciprocal = 65536 / columns + 1;
  walk.head_step = lanes / columns;
  walk.column_step = lanes % columns;
  walk.input_step = walk.head_step * params.stride_h + walk.column_step * width;
  walk.input_wrap = params.stride_h - static_cast<int64_t>(columns) * width;
  walk.output_step = walk.head_step * params.head_dim + walk.column_step * width;
  walk.output_wrap = params.head_dim - columns * width;
  return walk;
}

// What a vector kernel is told beside the parameters.
struct VectorPlan {
  int32_t lane_bits;    // a token has 1 << lane_bits lanes
  int32_t slot_stride;  // see angle_slot_stride(); wide bodies
  LaneWalk rotated;     // over the units that are rotated; wide bodies
  LaneWalk rest;        // over the vectors behind rotary_dim
};

inline int32_t lane_bits(const ThdRopeParams &params, Body body) {
  if (body == Body::kWide64) return 6;
  if (body == Body::kWide32) return 5;
  int32_t bits = 2;  // the search for the tokens' sequences counts on at most 8 tokens a warp
  while ((1 << bits) < units_per_head(params)) ++bits;
  return bits;
}

inline VectorPlan vector_plan(const ThdRopeParams &params, Body body) {
  VectorPlan plan;
  plan.lane_bits = lane_bits(params, body);
  const int32_t lanes = 1 << plan.lane_bits;
  const int32_t width = kVectorBytes / element_size(params.dtype);
  plan.slot_stride = angle_slot_stride(params);
  plan.rotated = lane_walk(params, units_per_head(params), lanes);
  plan.rest = lane_walk(params, (params.head_dim - params.rotary_dim) / width, lanes);
  return plan;
}

constexpr int kScalarTokensPerBlock = 4;
constexpr int kNarrowBlockSize = 64;

// Tokens that a block takes.
inline int64_t tokens_per_block(const ThdRopeParams &params, Body body) {
  if (body == Body::kScalar) return kScalarTokensPerBlock;
  if (body == Body::kWide32 || body == Body::kWide64) return 1;
  return kNarrowBlockSize >> lane_bits(params, body);
}

inline int64_t token_linear_grid_blocks(const ThdRopeParams &params) {
  const int64_t tokens = tokens_per_block(params, choose_body(params));
  return params.num_tokens / tokens + (params.num_tokens % tokens != 0);
}

}  // namespace thd_rope
}  // namespace transformer_engine

#endif  // TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_PLAN_H_
