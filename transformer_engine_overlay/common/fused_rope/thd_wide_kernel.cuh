// SPDX-License-Identifier: Apache-2.0
//
// The token-linear kernel for large tokens: a block has one, and its angles are in shared memory.

#ifndef TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_WIDE_KERNEL_CUH_
#define TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_WIDE_KERNEL_CUH_

#include <cuda_runtime.h>

#include "thd_vector.cuh"

namespace transformer_engine {
namespace thd_rope {

// Where the angles of a pair go: pair p of unit c to slot p * slot_stride + c.
template <int kPairsPerUnit>
__device__ __forceinline__ PairAngles *angle_slot(PairAngles *angles, int32_t slot_stride,
                                                  int32_t pair) {
  return angles + pair % kPairsPerUnit * slot_stride + pair / kPairsPerUnit;
}

// Angles of pairs [0, count) from the table entries at `first` and `second`, `entry_stride` apart,
// kBatch pairs of a lane together; `store` is given a pair and its angles.
template <int kLanes, int kBatch, typename Store>
__device__ __forceinline__ void store_angles(const float *first, const float *second,
                                             int32_t entry_stride, int32_t count, int32_t rank,
                                             const Store &store) {
  for (int32_t begin = rank; begin < count; begin += kLanes * kBatch) {
    float a[kBatch];
    bool plain = true;
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int32_t pair = begin + k * kLanes;
      a[k] = 0.0f;
      float b = 0.0f;
      if (pair < count) {
        a[k] = load_table(first + pair * entry_stride);
        b = load_table(second + pair * entry_stride);
      }
      plain = plain & same_bits(a[k], b) & !(fabsf(a[k]) >= kPlainAngle);
    }
    if (plain) {
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int32_t pair = begin + k * kLanes;
        float sine, cosine;
        sine_cosine(a[k], &sine, &cosine);
        if (pair < count) store(pair, PairAngles{cosine, sine, cosine, sine});
      }
    } else {
#pragma unroll 1
      for (int32_t pair = begin; pair < min(begin + kBatch * kLanes, count); pair += kLanes) {
        store(pair, pair_angles(first[pair * entry_stride], second[pair * entry_stride]));
      }
    }
  }
}

// kLanes lanes, the whole block, take a token. Needs what choose_body() checks.
template <typename T, bool kInterleaved, bool kTranspose, int kLanes>
__global__ void __launch_bounds__(kLanes, resident_blocks(1024 / kLanes))
    thd_token_linear_wide_kernel(const ThdRopeParams params, const VectorPlan plan) {
  using U = Unit<T, kInterleaved>;
  constexpr int kUnits = 4 / U::kVectors;  // in flight
  constexpr int kAngleBatch = 64 / kLanes;
  extern __shared__ PairAngles angles[];
  const int rank = threadIdx.x;
  const int64_t token = blockIdx.x;
  const int32_t distance = pair_distance<kInterleaved>(params.rotary_dim);
  const T *input = static_cast<const T *>(params.input) + token * params.stride_t;
  T *output = token_output<T>(params, token);

  U units[kUnits];
  Walk<const T> loading(plan.rotated, rank, input, params.stride_h);
  const auto load_next = [&](U *unit) {
    if (loading.head < params.num_heads) unit->load(loading.data, distance);
    loading.advance(plan.rotated);
  };
#pragma unroll
  for (int k = 0; k < kUnits; ++k) load_next(&units[k]);
  __syncwarp();  // without it the compiler moves these loads behind the search

  const TableRow row = table_row_of_group<1>(params.batch, token, 0, 5);
  if (row.index < 0) {
    zero_token(params, output, rank, kLanes);
    if (row.faulty && rank == 0) call_record_fault(params.batch, params.faults, token);
    return;
  }
  const float *first = params.freqs + row.index * params.rotary_dim;
  store_angles<kLanes, kAngleBatch>(
      first, first + distance, kInterleaved ? 2 : 1, params.rotary_dim / 2, rank,
      [=](int32_t pair, const PairAngles &of_pair) {
        *angle_slot<U::kPairs>(angles, plan.slot_stride, pair) = of_pair;
      });
  __syncthreads();

  Walk<T> storing(plan.rotated, rank, output, params.head_dim);
  do {
#pragma unroll
    for (int k = 0; k < kUnits; ++k, storing.advance(plan.rotated)) {
      if (storing.head < params.num_heads) {
        const PairAngles *of_unit = angles + storing.column;
        units[k].template rotate<kTranspose>(
            [=](int j) -> const PairAngles & { return of_unit[j * plan.slot_stride]; });
        units[k].store(storing.data, distance);
      }
      load_next(&units[k]);
    }
  } while (storing.head < params.num_heads);
  copy_rest(params, plan.rest, input, output, rank);
  if (row.faulty && rank == 0) call_record_fault(params.batch, params.faults, token);
}

}  // namespace thd_rope
}  // namespace transformer_engine

#endif  // TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_WIDE_KERNEL_CUH_
