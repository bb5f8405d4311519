// SPDX-License-Identifier: Apache-2.0
//
// The token-linear kernel for small tokens: a warp has several, a lane one column of all heads of
// one of them, and the column's angles are in its registers.

#ifndef TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_NARROW_KERNEL_CUH_
#define TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_NARROW_KERNEL_CUH_

#include <cuda_runtime.h>

#include "thd_scalar_kernel.cuh"
#include "thd_vector.cuh"

namespace transformer_engine {
namespace thd_rope {

// Table entries of the pairs of one unit.
template <typename T, bool kInterleaved>
struct UnitEntries {
  using U = Unit<T, kInterleaved>;
  float first[U::kPairs], second[U::kPairs];

  __device__ __forceinline__ void load(const float *row, int32_t column, int32_t distance) {
    const float *at = row + column * U::kWidth;
#pragma unroll
    for (int j = 0; j < U::kPairs; j += kInterleaved ? 2 : 4) {
      if (kInterleaved) {
        const float4 x = load_table4(at + 2 * j);
        first[j] = x.x, second[j] = x.y, first[j + 1] = x.z, second[j + 1] = x.w;
      } else {
        const float4 x = load_table4(at + j);
        const float4 y = load_table4(at + distance + j);
        first[j] = x.x, first[j + 1] = x.y, first[j + 2] = x.z, first[j + 3] = x.w;
        second[j] = y.x, second[j + 1] = y.y, second[j + 2] = y.z, second[j + 3] = y.w;
      }
    }
  }

  // Whether the two elements of each pair have the same angle.
  __device__ __forceinline__ bool symmetric() const {
    bool result = true;
#pragma unroll
    for (int j = 0; j < U::kPairs; ++j) result = result & same_bits(first[j], second[j]);
    return result;
  }

  __device__ __forceinline__ bool plain() const {
    bool result = true;
#pragma unroll
    for (int j = 0; j < U::kPairs; ++j) result = result & !(fabsf(first[j]) >= kPlainAngle);
    return result;
  }
};

// Sines and cosines of the pairs of one unit, both elements of a pair having the same angle.
template <int kPairs>
struct UnitAngles {
  float sine[kPairs], cosine[kPairs];

  __device__ __forceinline__ void plain(const float (&angles)[kPairs]) {
#pragma unroll
    for (int j = 0; j < kPairs; ++j) sine_cosine(angles[j], &sine[j], &cosine[j]);
  }

  // One copy of the long reduction instead of kPairs: the arrays move by one place a round, since
  // registers cannot be indexed.
  __device__ __forceinline__ void any(float (&angles)[kPairs]) {
#pragma unroll 1
    for (int i = 0; i < kPairs; ++i) {
      float next_sine, next_cosine;
      sine_cosine(angles[0], &next_sine, &next_cosine);
#pragma unroll
      for (int j = 0; j + 1 < kPairs; ++j) {
        angles[j] = angles[j + 1];
        sine[j] = sine[j + 1];
        cosine[j] = cosine[j + 1];
      }
      sine[kPairs - 1] = next_sine;
      cosine[kPairs - 1] = next_cosine;
    }
  }

  __device__ __forceinline__ PairAngles operator()(int j) const {
    return {cosine[j], sine[j], cosine[j], sine[j]};
  }
};

// A table that differs between the elements of a pair: rare, and not worth the registers that twice
// the angles would take from the others. Rotates the pairs of `column` one at a time.
template <typename T, bool kInterleaved, bool kTranspose>
__device__ __forceinline__ void rotate_asymmetric_column(const ThdRopeParams &params,
                                                         const T *input, T *output,
                                                         const float *table_row, int32_t column) {
  constexpr int kPairs = Unit<T, kInterleaved>::kPairs;
#pragma unroll 1
  for (int32_t pair = column * kPairs; pair < (column + 1) * kPairs; ++pair) {
    const PairAngles angles = load_pair_angles<kInterleaved>(table_row, pair, params.rotary_dim);
#pragma unroll 1
    for (int32_t head = 0; head < params.num_heads; ++head) {
      rotate_pair_in_memory<kInterleaved, kTranspose>(
          params, input + head * params.stride_h,
          output + static_cast<int64_t>(head) * params.head_dim, pair, angles);
    }
  }
}

// Rotates `column` of all heads, the first kHeads of which are in `units`; `loading` is the next
// one.
template <typename T, bool kInterleaved, bool kTranspose, int kHeads>
__device__ __forceinline__ void rotate_column(const ThdRopeParams &params,
                                              Unit<T, kInterleaved> (&units)[kHeads],
                                              const T *input, const T *loading, T *output,
                                              const float *table_row, int32_t column) {
  using U = Unit<T, kInterleaved>;
  const int32_t distance = pair_distance<kInterleaved>(params.rotary_dim);
  UnitEntries<T, kInterleaved> entries;
  entries.load(table_row, column, distance);
  if (!entries.symmetric()) {
    rotate_asymmetric_column<T, kInterleaved, kTranspose>(params, input, output, table_row, column);
    return;
  }
  UnitAngles<U::kPairs> angles;
  if (entries.plain()) {
    angles.plain(entries.first);
  } else {
    angles.any(entries.first);
  }
  T *storing = output + column * U::kWidth;
  int32_t head = 0;
  do {
#pragma unroll
    for (int k = 0; k < kHeads; ++k, ++head) {
      if (head < params.num_heads) {
        units[k].template rotate<kTranspose>(angles);
        units[k].store(storing, distance);
        storing += params.head_dim;
      }
      if (head + kHeads < params.num_heads) {
        units[k].load(loading, distance);
        loading += params.stride_h;
      }
    }
  } while (head < params.num_heads);
}

// A token has 1 << plan.lane_bits lanes, of which as many work as a head has units; kHeads heads
// are in flight. Needs what choose_body() checks.
template <typename T, bool kInterleaved, bool kTranspose, int kHeads>
__global__ void __launch_bounds__(kNarrowBlockSize, resident_blocks(kHeads == 2 ? 14 : 11))
    thd_token_linear_narrow_kernel(const ThdRopeParams params, const VectorPlan plan) {
  using U = Unit<T, kInterleaved>;
  const int lane = threadIdx.x % kWarpSize;
  const int group = lane >> plan.lane_bits;
  const int column = lane & ((1 << plan.lane_bits) - 1);
  const int64_t warp =
      static_cast<int64_t>(blockIdx.x) * (kNarrowBlockSize / kWarpSize) + threadIdx.x / kWarpSize;
  const int64_t warp_token = warp * (kWarpSize >> plan.lane_bits);
  if (warp_token >= params.num_tokens) return;
  const int64_t token = warp_token + group;
  const bool has_token = token < params.num_tokens;
  const bool has_unit = column < plan.rotated.columns;
  const T *input = static_cast<const T *>(params.input) + token * params.stride_t;

  U units[kHeads];
  const T *loading = input + column * U::kWidth;
#pragma unroll
  for (int k = 0; k < kHeads; ++k) {
    if (has_token && has_unit && k < params.num_heads) {
      units[k].load(loading, pair_distance<kInterleaved>(params.rotary_dim));
    }
    loading += params.stride_h;
  }
  __syncwarp();  // without it the compiler moves these loads behind the search

  const TableRow row = table_row_of_group<8>(params.batch, warp_token, group, plan.lane_bits);
  if (!has_token) return;
  T *output = token_output<T>(params, token);
  if (row.index < 0) {
    zero_token(params, output, column, 1 << plan.lane_bits);
  } else {
    if (has_unit) {
      rotate_column<T, kInterleaved, kTranspose>(params, units, input, loading, output,
                                                 params.freqs + row.index * params.rotary_dim,
                                                 column);
    }
    copy_rest(params, plan.rest, input, output, column);
  }
  if (row.faulty && column == 0) {
    if (kHeads == 2) {  // 4% at one head
      record_fault(params.batch, params.faults, token);
    } else {
      call_record_fault(params.batch, params.faults, token);
    }
  }
}

}  // namespace thd_rope
}  // namespace transformer_engine

#endif  // TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_NARROW_KERNEL_CUH_
