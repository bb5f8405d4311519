// SPDX-License-Identifier: Apache-2.0
//
// A call that rotates query and key of a packed batch together, and copies the value if they are
// parts of one projection: what it is given, whether the kernels take it, and how lanes share it.
// Host code without CUDA or any framework.

#ifndef TRANSFORMER_ENGINE_OVERLAY_NATIVE_FUSED_QKV_H_
#define TRANSFORMER_ENGINE_OVERLAY_NATIVE_FUSED_QKV_H_

#include <cstdint>

#include "fused_rope/thd_plan.h"

namespace transformer_engine {
namespace thd_rope {

// Where the heads of one part lie: ``[tokens, groups, heads_per_group, dim]``, the last dimension
// contiguous. In elements; a token's row spans less than 2^31.
struct HeadStrides {
  int64_t token;
  int32_t group, head;
};

// Query, key or value. A part without heads is absent.
struct QkvPart {
  const void *input;
  void *output;
  HeadStrides in, out;
  int32_t groups, heads_per_group;
};

THD_ROPE_HOST_DEVICE int32_t num_heads(const QkvPart &part) {
  return part.groups * part.heads_per_group;
}

struct FusedQkvParams {
  QkvPart query, key;                    // rotated, head_dim wide
  QkvPart value;                         // copied, value_dim wide
  const float *query_freqs, *key_freqs;  // tables of one shape, often the same
  PackedBatch batch;
  FaultSink faults;
  int64_t num_tokens;
  int32_t head_dim, value_dim, rotary_dim;
  DataType dtype;
  bool interleaved;
  bool transpose;
};

// Divides by multiplication: n / divisor for n * divisor < 2^31.
struct Divider {
  int32_t divisor;
  uint32_t reciprocal;

  THD_ROPE_HOST_DEVICE int32_t quotient(int32_t n) const {
    return static_cast<int32_t>(
        (static_cast<uint64_t>(2 * static_cast<uint32_t>(n)) * reciprocal) >> 32);
  }
};

inline Divider divider(int32_t divisor) {
  const int32_t at_least_one = divisor > 0 ? divisor : 1;
  return {at_least_one, (1u << 31) / at_least_one + 1};
}

// Offset of a head within a token: head * stride, and `wrap` more for each group before it.
struct HeadOffsets {
  Divider group;
  int32_t in_head, in_wrap, out_head, out_wrap;
};

inline HeadOffsets head_offsets(const QkvPart &part) {
  const int32_t heads = part.heads_per_group;
  return {divider(heads), part.in.head, part.in.group - heads * part.in.head, part.out.head,
          part.out.group - heads * part.out.head};
}

// What the kernels are told beside the parameters. Columns are vectors of a head, units of the
// rotated part of one (see units_per_head()).
struct FusedQkvPlan {
  int32_t lane_bits;
  int32_t slot_stride;    // see angle_slot_stride()
  int32_t key_slots;      // where the angles of the key's table begin; 0 if it is the query's
  int32_t rotated_heads;  // of query and key
  int32_t units_count, rest_count, value_count;
  Divider units, rest_columns, value_columns;
  HeadOffsets query, key, value;
};

// The parts of a token as a call of the plain kernels would see them, for what depends on the
// shape alone.
inline ThdRopeParams shape_of(const FusedQkvParams &params) {
  ThdRopeParams shape{};
  shape.num_tokens = params.num_tokens;
  shape.num_heads = num_heads(params.query) + num_heads(params.key);
  shape.head_dim = params.head_dim;
  shape.rotary_dim = params.rotary_dim;
  shape.dtype = params.dtype;
  shape.interleaved = params.interleaved;
  return shape;
}

inline bool is_aligned(const void *pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kVectorBytes == 0;
}

inline bool fits_vectors(const QkvPart &part, int32_t width) {
  const auto divides = [=](const HeadStrides &strides) {
    return strides.token % width == 0 && strides.group % width == 0 && strides.head % width == 0;
  };
  return num_heads(part) == 0 || (is_aligned(part.input) && is_aligned(part.output) &&
                                  divides(part.in) && divides(part.out));
}

// Whether the kernels below take a call; the plain ones take any.
inline bool fits_fused_kernels(const FusedQkvParams &params) {
  const ThdRopeParams shape = shape_of(params);
  const int32_t width = kVectorBytes / element_size(params.dtype);
  const int32_t unit = width * vectors_per_unit(shape);
  if (params.rotary_dim == 0 || params.rotary_dim % unit != 0 || params.head_dim % width != 0 ||
      params.value_dim % width != 0 || !fits_vectors(params.query, width) ||
      !fits_vectors(params.key, width) || !fits_vectors(params.value, width) ||
      !is_aligned(params.query_freqs) || !is_aligned(params.key_freqs)) {
    return false;
  }
  // For Divider; a row has far fewer vectors.
  const int64_t widest = params.head_dim > params.value_dim ? params.head_dim : params.value_dim;
  const int64_t heads = shape.num_heads + num_heads(params.value);
  const int64_t columns = widest / width;
  if (heads * columns > INT32_MAX / (heads > columns ? heads : columns)) return false;
  const bool shares = params.query_freqs == params.key_freqs;
  return angle_slots(shape) * (shares ? 1 : 2) <= kMaxAngleSlots;
}

// One of the vector bodies, by thresholds of its own (ci/results/attempts.md).
inline Body choose_fused_body(const FusedQkvParams &params) {
  const ThdRopeParams shape = shape_of(params);
  const int32_t columns = units_per_head(shape);
  const int64_t vectors = static_cast<int64_t>(shape.num_heads) * columns * vectors_per_unit(shape);
  if (vectors >= 320 || columns > 32) return Body::kWide64;
  return vectors >= 112 ? Body::kWide32 : Body::kNarrow2;
}

inline FusedQkvPlan fused_qkv_plan(const FusedQkvParams &params, Body body) {
  const ThdRopeParams shape = shape_of(params);
  const int32_t width = kVectorBytes / element_size(params.dtype);
  FusedQkvPlan plan;
  plan.lane_bits = lane_bits(shape, body);
  plan.slot_stride = angle_slot_stride(shape);
  plan.key_slots = params.query_freqs == params.key_freqs ? 0 : angle_slots(shape);
  plan.rotated_heads = shape.num_heads;
  const int32_t rest_columns = (params.head_dim - params.rotary_dim) / width;
  const int32_t value_columns = params.value_dim / width;
  plan.units_count = shape.num_heads * units_per_head(shape);
  plan.rest_count = shape.num_heads * rest_columns;
  plan.value_count = num_heads(params.value) * value_columns;
  plan.units = divider(units_per_head(shape));
  plan.rest_columns = divider(rest_columns);
  plan.value_columns = divider(value_columns);
  plan.query = head_offsets(params.query);
  plan.key = head_offsets(params.key);
  plan.value = head_offsets(params.value);
  return plan;
}

inline int64_t fused_grid_blocks(const FusedQkvParams &params, Body body) {
  const int64_t tokens = tokens_per_block(shape_of(params), body);
  return params.num_tokens / tokens + (params.num_tokens % tokens != 0);
}

}  // namespace thd_rope
}  // namespace transformer_engine

#endif  // TRANSFORMER_ENGINE_OVERLAY_NATIVE_FUSED_QKV_H_
