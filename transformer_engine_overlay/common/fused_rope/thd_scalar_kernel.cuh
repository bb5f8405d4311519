// SPDX-License-Identifier: Apache-2.0
//
// The token-linear kernel for any strides and any alignment, and its body, which a kernel with
// another grid can share: a device function called by all threads of a group (a warp or a block)
// for one token.

#ifndef TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_SCALAR_KERNEL_CUH_
#define TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_SCALAR_KERNEL_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "thd_plan.h"
#include "thd_rotation.h"
#include "thd_token_map.h"

namespace transformer_engine {
namespace thd_rope {

constexpr int kWarpsPerBlock = kScalarTokensPerBlock;
constexpr int kBlockSize = kWarpSize * kWarpsPerBlock;
// Angles are kept in shared memory for this many pairs at a time: a fixed amount, any rotary_dim.
constexpr int kPairsPerChunk = 64;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// The threads that work on one token together.
struct WarpGroup {
  static constexpr int kSize = kWarpSize;
  __device__ __forceinline__ int rank() const { return threadIdx.x % kWarpSize; }
  __device__ __forceinline__ void sync() const { __syncwarp(); }
};

struct BlockGroup {
  static constexpr int kSize = kBlockSize;
  __device__ __forceinline__ int rank() const { return threadIdx.x; }
  __device__ __forceinline__ void sync() const { __syncthreads(); }
};

// Visits all (head, column) with column < columns, spread over the group.
template <typename Group, typename Visit>
__device__ __forceinline__ void for_each_head_column(const Group &group, int32_t num_heads,
                                                     int32_t columns, const Visit &visit) {
  if (columns <= 0) return;
  const int32_t head_step = Group::kSize / columns;
  const int32_t column_step = Group::kSize % columns;
  int32_t head = group.rank() / columns;
  int32_t column = group.rank() % columns;
  while (head < num_heads) {
    visit(head, column);
    head += head_step;
    column += column_step;
    if (column >= columns) {
      column -= columns;
      ++head;
    }
  }
}

template <typename T, typename Group>
__device__ __forceinline__ void zero_row(const Group &group, const ThdRopeParams &params,
                                         T *output) {
  const int64_t size = static_cast<int64_t>(params.num_heads) * params.head_dim;
  for (int64_t i = group.rank(); i < size; i += Group::kSize) output[i] = from_float<T>(0.0f);
}

// Rotates one pair of a head; `input` and `output` are the head's rows.
template <bool kInterleaved, bool kTranspose, typename T>
__device__ __forceinline__ void rotate_pair_in_memory(const ThdRopeParams &params, const T *input,
                                                      T *output, int32_t pair,
                                                      const PairAngles &angles) {
  const int32_t first = first_of_pair<kInterleaved>(pair);
  const int32_t second = first + pair_distance<kInterleaved>(params.rotary_dim);
  const PairValues values{to_float(input[first * params.stride_d]),
                          to_float(input[second * params.stride_d])};
  const PairValues rotated = rotate_pair<kTranspose>(values, angles);
  output[first] = from_float<T>(rotated.first);
  output[second] = from_float<T>(rotated.second);
}

// The scalar body: any strides, any alignment, any even rotary_dim.
template <typename T, bool kInterleaved, bool kTranspose, typename Group>
__device__ __forceinline__ void rotate_row(const Group &group, const ThdRopeParams &params,
                                           const T *input, T *output, const float *table_row,
                                           PairAngles *angles) {
  const int32_t pairs = params.rotary_dim / 2;
  for (int32_t begin = 0; begin < pairs; begin += kPairsPerChunk) {
    const int32_t count = min(kPairsPerChunk, pairs - begin);
    if (begin > 0) group.sync();  // readers of the chunk before are done
    for (int32_t i = group.rank(); i < count; i += Group::kSize) {
      angles[i] = load_pair_angles<kInterleaved>(table_row, begin + i, params.rotary_dim);
    }
    group.sync();
    for_each_head_column(group, params.num_heads, count, [&](int32_t head, int32_t i) {
      rotate_pair_in_memory<kInterleaved, kTranspose>(
          params, input + head * params.stride_h,
          output + static_cast<int64_t>(head) * params.head_dim, begin + i, angles[i]);
    });
  }
  const int32_t rest = params.head_dim - params.rotary_dim;
  for_each_head_column(group, params.num_heads, rest, [&](int32_t head, int32_t i) {
    const int32_t column = params.rotary_dim + i;
    output[static_cast<int64_t>(head) * params.head_dim + column] =
        input[head * params.stride_h + column * params.stride_d];
  });
}

// What a group does for one token, once the sequence that owns it is known.
template <typename T, bool kInterleaved, bool kTranspose, typename Group>
__device__ __forceinline__ void process_token(const Group &group, const ThdRopeParams &params,
                                              int64_t token, int64_t sequence, PairAngles *angles) {
  T *output = static_cast<T *>(params.output) +
              token * (static_cast<int64_t>(params.num_heads) * params.head_dim);
  const TableRow row = table_row(params.batch, token, sequence);
  if (row.index < 0) {
    zero_row<T>(group, params, output);
  } else {
    const T *input = static_cast<const T *>(params.input) + token * params.stride_t;
    rotate_row<T, kInterleaved, kTranspose>(group, params, input, output,
                                            params.freqs + row.index * params.rotary_dim, angles);
  }
  if (row.faulty && group.rank() == 0) call_record_fault(params.batch, params.faults, token);
}

// One warp a token; its owner is searched for once, by the whole warp.
template <typename T, bool kInterleaved, bool kTranspose>
__global__ void __launch_bounds__(kBlockSize) thd_token_linear_kernel(const ThdRopeParams params) {
  __shared__ PairAngles angles[kWarpsPerBlock][kPairsPerChunk];
  const int warp = threadIdx.x / kWarpSize;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + warp;
  if (token >= params.num_tokens) return;
  const int64_t sequence = find_sequence_warp(params.batch, token);
  process_token<T, kInterleaved, kTranspose>(WarpGroup{}, params, token, sequence, angles[warp]);
}

}  // namespace thd_rope
}  // namespace transformer_engine

#endif  // TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_SCALAR_KERNEL_CUH_
