// SPDX-License-Identifier: Apache-2.0
//
// Query and key of a token rotated together, and the value copied: one launch, one search for the
// token's sequence, one set of angles. Same bits as the plain kernels. Heads are counted through:
// those of the query first, then those of the key.

#ifndef TRANSFORMER_ENGINE_OVERLAY_NATIVE_FUSED_QKV_KERNEL_CUH_
#define TRANSFORMER_ENGINE_OVERLAY_NATIVE_FUSED_QKV_KERNEL_CUH_

#include <cuda_runtime.h>

#include "fused_qkv.h"
#include "fused_rope/thd_launch.cuh"

namespace transformer_engine {
namespace thd_rope {

// The angles that make rotate_pair<false>() apply the transposed matrix, bit for bit: the sines
// change places and signs, and a sign does not change how a product is rounded.
__device__ __forceinline__ PairAngles oriented(const PairAngles &a, bool transpose) {
  return transpose ? PairAngles{a.cos_first, -a.sin_second, a.cos_second, -a.sin_first} : a;
}

// The heads of query and key of one token.
template <typename T>
struct RotatedHeads {
  const FusedQkvParams &params;
  const FusedQkvPlan &plan;
  int64_t token;

  __device__ __forceinline__ bool is_key(int32_t head) const {
    return head >= num_heads(params.query);
  }

  // What is chosen here are operands, not branches: the lanes of a warp have heads of both parts.
  __device__ __forceinline__ const T *input(int32_t head) const {
    const bool of_key = is_key(head);
    const void *base = of_key ? params.key.input : params.query.input;
    const int64_t row = token * (of_key ? params.key.in.token : params.query.in.token);
    return static_cast<const T *>(base) + row +
           offset(head, of_key, of_key ? plan.key.in_head : plan.query.in_head,
                  of_key ? plan.key.in_wrap : plan.query.in_wrap);
  }

  __device__ __forceinline__ T *output(int32_t head) const {
    const bool of_key = is_key(head);
    void *base = of_key ? params.key.output : params.query.output;
    const int64_t row = token * (of_key ? params.key.out.token : params.query.out.token);
    return static_cast<T *>(base) + row +
           offset(head, of_key, of_key ? plan.key.out_head : plan.query.out_head,
                  of_key ? plan.key.out_wrap : plan.query.out_wrap);
  }

 private:
  __device__ __forceinline__ int32_t offset(int32_t head, bool of_key, int32_t stride,
                                            int32_t wrap) const {
    const int32_t local = of_key ? head - num_heads(params.query) : head;
    const Divider group{0, of_key ? plan.key.group.reciprocal : plan.query.group.reciprocal};
    return local * stride + group.quotient(local) * wrap;
  }
};

// Copies the vectors of `lane` out of `lanes`; `input` and `output` give the address of vector i.
template <typename Input, typename Output>
__device__ __forceinline__ void copy_vectors(int32_t count, int32_t lane, int32_t lanes,
                                             const Input &input, const Output &output) {
  constexpr int kInFlight = 4;
  for (int32_t begin = lane; begin < count; begin += lanes * kInFlight) {
    uint4 vectors[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int32_t i = begin + k * lanes;
      if (i < count) vectors[k] = *reinterpret_cast<const uint4 *>(input(i));
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int32_t i = begin + k * lanes;
      if (i < count) store_vector(output(i), vectors[k]);
    }
  }
}

// Zeros for query and key of a token that has no table row.
template <typename T>
__device__ __forceinline__ void zero_rotated(const RotatedHeads<T> &heads, int32_t lane,
                                             int32_t lanes) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
#pragma unroll 1
  for (int32_t head = 0; head < heads.plan.rotated_heads; ++head) {
    T *output = heads.output(head);
#pragma unroll 1
    for (int32_t i = lane * kWidth; i < heads.params.head_dim; i += lanes * kWidth) {
      store_vector(output + i, make_uint4(0, 0, 0, 0));
    }
  }
}

// What is not rotated of a token: the value, and of query and key the part behind rotary_dim.
template <typename T>
__device__ __forceinline__ void finish_token(const RotatedHeads<T> &heads, bool has_row,
                                             int32_t lane, int32_t lanes) {
  constexpr int kWidth = kVectorBytes / sizeof(T);
  const FusedQkvParams &params = heads.params;
  const FusedQkvPlan &plan = heads.plan;
  if (!has_row) {
    zero_rotated(heads, lane, lanes);
  } else if (plan.rest_count > 0) {
    const auto head_of = [&](int32_t i) { return plan.rest_columns.quotient(i); };
    const auto offset = [&](int32_t i) {
      return params.rotary_dim + (i - head_of(i) * plan.rest_columns.divisor) * kWidth;
    };
    copy_vectors(
        plan.rest_count, lane, lanes,
        [&](int32_t i) { return heads.input(head_of(i)) + offset(i); },
        [&](int32_t i) { return heads.output(head_of(i)) + offset(i); });
  }
  if (plan.value_count == 0) return;
  const QkvPart &value = params.value;
  const auto offset = [&](int32_t i, int32_t stride, int32_t wrap) {
    const int32_t head = plan.value_columns.quotient(i);
    return head * stride + plan.value.group.quotient(head) * wrap +
           (i - head * plan.value_columns.divisor) * kWidth;
  };
  const T *input = static_cast<const T *>(value.input) + heads.token * value.in.token;
  T *output = static_cast<T *>(value.output) + heads.token * value.out.token;
  copy_vectors(
      plan.value_count, lane, lanes,
      [&](int32_t i) { return input + offset(i, plan.value.in_head, plan.value.in_wrap); },
      [&](int32_t i) { return output + offset(i, plan.value.out_head, plan.value.out_wrap); });
}

// A block has a token, kLanes lanes; its angles are in shared memory.
template <typename T, bool kInterleaved, int kLanes>
__global__ void __launch_bounds__(kLanes, resident_blocks(1024 / kLanes))
    thd_fused_qkv_wide_kernel(const FusedQkvParams params, const FusedQkvPlan plan) {
  using U = Unit<T, kInterleaved>;
  constexpr int kUnits = 4 / U::kVectors;  // in flight
  constexpr int kAngleBatch = 64 / kLanes;
  extern __shared__ PairAngles angles[];
  const int rank = threadIdx.x;
  const RotatedHeads<T> heads{params, plan, static_cast<int64_t>(blockIdx.x)};
  const int32_t distance = pair_distance<kInterleaved>(params.rotary_dim);

  U units[kUnits];
  int32_t loading = rank;
  const auto load_next = [&](U *unit) {
    if (loading < plan.units_count) {
      const int32_t head = plan.units.quotient(loading);
      const int32_t column = loading - head * plan.units.divisor;
      unit->load(heads.input(head) + column * U::kWidth, distance);
    }
    loading += kLanes;
  };
#pragma unroll
  for (int k = 0; k < kUnits; ++k) load_next(&units[k]);
  __syncwarp();  // without it the compiler moves these loads behind the search

  const TableRow row = table_row_of_group<1>(params.batch, heads.token, 0, 5);
  if (row.index >= 0) {
    const auto store_table = [&](const float *freqs, PairAngles *slots) {
      const float *first = freqs + row.index * params.rotary_dim;
      store_angles<kLanes, kAngleBatch>(first, first + distance, kInterleaved ? 2 : 1,
                                        params.rotary_dim / 2, rank,
                                        [=](int32_t pair, const PairAngles &of_pair) {
                                          *angle_slot<U::kPairs>(slots, plan.slot_stride, pair) =
                                              oriented(of_pair, params.transpose);
                                        });
    };
#pragma unroll 1
    for (int table = 0; table < (plan.key_slots > 0 ? 2 : 1); ++table) {
      store_table(table == 0 ? params.query_freqs : params.key_freqs,
                  angles + table * plan.key_slots);
    }
    __syncthreads();
    int32_t storing = rank;
    do {
#pragma unroll
      for (int k = 0; k < kUnits; ++k, storing += kLanes) {
        if (storing < plan.units_count) {
          const int32_t head = plan.units.quotient(storing);
          const int32_t column = storing - head * plan.units.divisor;
          const PairAngles *of_unit = angles + column + (heads.is_key(head) ? plan.key_slots : 0);
          units[k].template rotate<false>(
              [=](int j) -> const PairAngles & { return of_unit[j * plan.slot_stride]; });
          units[k].store(heads.output(head) + column * U::kWidth, distance);
        }
        load_next(&units[k]);
      }
    } while (storing < plan.units_count);
  }
  finish_token(heads, row.index >= 0, rank, kLanes);
  if (row.faulty && rank == 0) call_record_fault(params.batch, params.faults, heads.token);
}

// Rotates one column of heads [begin, end) of a token by the angles of `table_row`; `units` has
// those of the first heads.
template <typename T, bool kInterleaved, int kHeads>
__device__ __forceinline__ void rotate_fused_column(const RotatedHeads<T> &heads,
                                                    Unit<T, kInterleaved> (&units)[kHeads],
                                                    int32_t begin, int32_t end,
                                                    const float *table_row, int32_t column) {
  using U = Unit<T, kInterleaved>;
  const FusedQkvParams &params = heads.params;
  const int32_t distance = pair_distance<kInterleaved>(params.rotary_dim);
  UnitEntries<T, kInterleaved> entries;
  entries.load(table_row, column, distance);
  if (!entries.symmetric()) {
#pragma unroll 1
    for (int32_t pair = column * U::kPairs; pair < (column + 1) * U::kPairs; ++pair) {
      const PairAngles angles = load_pair_angles<kInterleaved>(table_row, pair, params.rotary_dim);
#pragma unroll 1
      for (int32_t head = begin; head < end; ++head) {
        ThdRopeParams contiguous{};
        contiguous.rotary_dim = params.rotary_dim;
        contiguous.stride_d = 1;
        rotate_pair_in_memory<kInterleaved, false>(contiguous, heads.input(head),
                                                   heads.output(head), pair,
                                                   oriented(angles, params.transpose));
      }
    }
    return;
  }
  UnitAngles<U::kPairs> angles;
  if (entries.plain()) {
    angles.plain(entries.first);
  } else {
    angles.any(entries.first);
  }
  const float sign = params.transpose ? -1.0f : 1.0f;
#pragma unroll
  for (int j = 0; j < U::kPairs; ++j) angles.sine[j] *= sign;
  int32_t head = begin;
  do {
#pragma unroll
    for (int k = 0; k < kHeads; ++k, ++head) {
      if (head < end) {
        units[k].template rotate<false>(angles);
        units[k].store(heads.output(head) + column * U::kWidth, distance);
      }
      if (head + kHeads < end) {
        units[k].load(heads.input(head + kHeads) + column * U::kWidth, distance);
      }
    }
  } while (head < end);
}

// A warp has several tokens, a lane one column of all their heads.
template <typename T, bool kInterleaved>
__global__ void __launch_bounds__(kNarrowBlockSize, resident_blocks(12))
    thd_fused_qkv_narrow_kernel(const FusedQkvParams params, const FusedQkvPlan plan) {
  using U = Unit<T, kInterleaved>;
  constexpr int kHeads = 2;  // in flight
  const int lane = threadIdx.x % kWarpSize;
  const int group = lane >> plan.lane_bits;
  const int lanes = 1 << plan.lane_bits;
  const int column = lane & (lanes - 1);
  const int64_t warp =
      static_cast<int64_t>(blockIdx.x) * (kNarrowBlockSize / kWarpSize) + threadIdx.x / kWarpSize;
  const int64_t warp_token = warp * (kWarpSize >> plan.lane_bits);
  if (warp_token >= params.num_tokens) return;
  const RotatedHeads<T> heads{params, plan, warp_token + group};
  const bool has_token = heads.token < params.num_tokens;
  const bool has_unit = column < plan.units.divisor;
  const int32_t distance = pair_distance<kInterleaved>(params.rotary_dim);

  U units[kHeads];
  const auto load_first = [&](int32_t begin) {
#pragma unroll
    for (int k = 0; k < kHeads; ++k) {
      if (has_token && has_unit && begin + k < plan.rotated_heads) {
        units[k].load(heads.input(begin + k) + column * U::kWidth, distance);
      }
    }
  };
  load_first(0);
  __syncwarp();  // without it the compiler moves these loads behind the search

  const TableRow row = table_row_of_group<8>(params.batch, warp_token, group, plan.lane_bits);
  if (!has_token) return;
  if (row.index >= 0 && has_unit) {
    const bool shares = plan.key_slots == 0;
    int32_t begin = 0;
#pragma unroll 1
    do {
      const bool is_key = begin > 0;
      const int32_t end =
          shares || heads.is_key(begin) ? plan.rotated_heads : num_heads(params.query);
      if (is_key) load_first(begin);
      rotate_fused_column<T, kInterleaved, kHeads>(
          heads, units, begin, end,
          (heads.is_key(begin) ? params.key_freqs : params.query_freqs) +
              row.index * params.rotary_dim,
          column);
      begin = end;
    } while (begin < plan.rotated_heads);
  }
  finish_token(heads, row.index >= 0, column, lanes);
  if (row.faulty && column == 0) call_record_fault(params.batch, params.faults, heads.token);
}

template <typename T, bool kInterleaved>
void launch_fused_qkv_variant(const FusedQkvParams &params, cudaStream_t stream) {
  const Body body = choose_fused_body(params);
  const FusedQkvPlan plan = fused_qkv_plan(params, body);
  const auto blocks = static_cast<unsigned int>(fused_grid_blocks(params, body));
  const int tables = plan.key_slots > 0 ? 2 : 1;
  const size_t shared = angle_slots(shape_of(params)) * tables * sizeof(PairAngles);
  if (body == Body::kWide64) {
    thd_fused_qkv_wide_kernel<T, kInterleaved, 64><<<blocks, 64, shared, stream>>>(params, plan);
  } else if (body == Body::kWide32) {
    thd_fused_qkv_wide_kernel<T, kInterleaved, 32><<<blocks, 32, shared, stream>>>(params, plan);
  } else {
    thd_fused_qkv_narrow_kernel<T, kInterleaved>
        <<<blocks, kNarrowBlockSize, 0, stream>>>(params, plan);
  }
}

template <typename T>
void launch_fused_qkv_of(const FusedQkvParams &params, cudaStream_t stream) {
  if (params.interleaved) {
    launch_fused_qkv_variant<T, true>(params, stream);
  } else {
    launch_fused_qkv_variant<T, false>(params, stream);
  }
}

// Needs fits_fused_kernels(), tokens, sequences and table rows.
inline cudaError_t launch_fused_qkv(const FusedQkvParams &params, cudaStream_t stream) {
  switch (params.dtype) {
    case DataType::kFloat32:
      launch_fused_qkv_of<float>(params, stream);
      break;
    case DataType::kFloat16:
      launch_fused_qkv_of<__half>(params, stream);
      break;
    default:
      launch_fused_qkv_of<__nv_bfloat16>(params, stream);
  }
  return cudaGetLastError();
}

}  // namespace thd_rope
}  // namespace transformer_engine

#endif  // TRANSFORMER_ENGINE_OVERLAY_NATIVE_FUSED_QKV_KERNEL_CUH_
