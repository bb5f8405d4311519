// SPDX-License-Identifier: Apache-2.0
//
// What the vector kernels share: a unit of 16-byte vectors, a lane's walk over a token, and the
// rows that are copied or zeroed.

#ifndef TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_VECTOR_CUH_
#define TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_VECTOR_CUH_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "thd_plan.h"
#include "thd_rotation.h"

namespace transformer_engine {
namespace thd_rope {

// What __launch_bounds__ may ask for: chips differ in how many blocks a multiprocessor holds, and
// more is a warning.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ == 750 || __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 870
constexpr int kMaxResidentBlocks = 16;
#elif __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
constexpr int kMaxResidentBlocks = 24;
#else
constexpr int kMaxResidentBlocks = 32;
#endif

constexpr int resident_blocks(int wanted) {
  return wanted < kMaxResidentBlocks ? wanted : kMaxResidentBlocks;
}

// Loads from the angle table that ask the L2 to keep it: other sequences come back to the same rows
// when as much input and output as the L2 holds has gone by. Worth 2% with 8 sequences.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
__device__ __forceinline__ uint64_t keep_in_l2() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ float load_table(const float *entry) {
  float x;
  asm("ld.global.L2::cache_hint.f32 %0, [%1], %2;" : "=f"(x) : "l"(entry), "l"(keep_in_l2()));
  return x;
}

__device__ __forceinline__ float4 load_table4(const float *entry) {
  float4 x;
  asm("ld.global.L2::cache_hint.v4.f32 {%0, %1, %2, %3}, [%4], %5;"
      : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
      : "l"(entry), "l"(keep_in_l2()));
  return x;
}
#else
__device__ __forceinline__ float load_table(const float *entry) { return *entry; }

__device__ __forceinline__ float4 load_table4(const float *entry) {
  return *reinterpret_cast<const float4 *>(entry);
}
#endif

// A store that stays one: for chips before sm_100 the compiler may take that of a uint4 apart into
// four of 4 bytes.
__device__ __forceinline__ void store_vector(void *address, const uint4 &x) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(x.x), "r"(x.y),
               "r"(x.z), "r"(x.w));
}

// Two neighbouring elements of a vector, converted together: one instruction for 16-bit types.
__device__ __forceinline__ float2 to_float2(float2 x) { return x; }
__device__ __forceinline__ float2 to_float2(__half2 x) { return __half22float2(x); }
__device__ __forceinline__ float2 to_float2(__nv_bfloat162 x) { return __bfloat1622float2(x); }

template <typename T>
struct TwoOf;
template <>
struct TwoOf<float> {
  using type = float2;
  static __device__ __forceinline__ type round(float2 x) { return x; }
};
template <>
struct TwoOf<__half> {
  using type = __half2;
  static __device__ __forceinline__ type round(float2 x) { return __float22half2_rn(x); }
};
template <>
struct TwoOf<__nv_bfloat16> {
  using type = __nv_bfloat162;
  static __device__ __forceinline__ type round(float2 x) { return __float22bfloat162_rn(x); }
};

// What a lane loads, rotates and stores at a time (see units_per_head()).
template <typename T, bool kInterleaved>
struct Unit {
  static constexpr int kWidth = kVectorBytes / sizeof(T);
  static constexpr int kVectors = kInterleaved ? 1 : 2;
  static constexpr int kPairs = kWidth * kVectors / 2;

  union Vector {
    uint4 bits;
    typename TwoOf<T>::type two[kWidth / 2];
  };
  Vector vectors[kVectors];

  __device__ __forceinline__ Unit() {}

  __device__ __forceinline__ void load(const T *input, int32_t distance) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      vectors[i].bits = *reinterpret_cast<const uint4 *>(input + i * distance);
    }
  }

  __device__ __forceinline__ void store(T *output, int32_t distance) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      store_vector(output + i * distance, vectors[i].bits);
    }
  }

  // `angles(j)` gives those of the unit's pair j.
  template <bool kTranspose, typename Angles>
  __device__ __forceinline__ void rotate(const Angles &angles) {
#pragma unroll
    for (int j = 0; j < kWidth / 2; ++j) {
      if (kInterleaved) {
        const float2 x = to_float2(vectors[0].two[j]);
        const PairValues y = rotate_pair<kTranspose>(PairValues{x.x, x.y}, angles(j));
        vectors[0].two[j] = TwoOf<T>::round(make_float2(y.first, y.second));
      } else {
        const float2 first = to_float2(vectors[0].two[j]);
        const float2 second = to_float2(vectors[kVectors - 1].two[j]);
        const PairValues y0 = rotate_pair<kTranspose>(PairValues{first.x, second.x}, angles(2 * j));
        const PairValues y1 =
            rotate_pair<kTranspose>(PairValues{first.y, second.y}, angles(2 * j + 1));
        vectors[0].two[j] = TwoOf<T>::round(make_float2(y0.first, y1.first));
        vectors[kVectors - 1].two[j] = TwoOf<T>::round(make_float2(y0.second, y1.second));
      }
    }
  }
};

// Where a lane is on its walk; `T` is const for the input.
template <typename T>
struct Walk {
  T *data;
  int32_t head, column;

  __device__ __forceinline__ Walk(const LaneWalk &walk, int32_t rank, T *token, int64_t head_stride)
      : head(rank * walk.reciprocal >> 16), column(rank - head * walk.columns) {
    constexpr int kWidth = kVectorBytes / sizeof(T);
    data = token + head * head_stride + column * kWidth;
  }

  __device__ __forceinline__ void advance(const LaneWalk &walk) {
    const bool is_input = std::is_const<T>::value;
    head += walk.head_step;
    column += walk.column_step;
    data += is_input ? walk.input_step : walk.output_step;
    if (column >= walk.columns) {
      column -= walk.columns;
      ++head;
      data += is_input ? walk.input_wrap : walk.output_wrap;
    }
  }
};

// Below this magnitude sincosf needs no reduction by many words. With the comparison in this form
// the compiler drops that part of it; the result does not depend on the number.
constexpr float kPlainAngle = 105615.0f;

template <typename T>
__device__ __forceinline__ T *token_output(const ThdRopeParams &params, int64_t token) {
  return static_cast<T *>(params.output) +
         token * (static_cast<int64_t>(params.num_heads) * params.head_dim);
}

// Copies what lies behind rotary_dim in each head of a token; `lane` is one out of those that
// `walk` was made for.
template <typename T>
__device__ __forceinline__ void copy_rest(const ThdRopeParams &params, const LaneWalk &walk,
                                          const T *input, T *output, int32_t lane) {
  if (walk.columns == 0) return;
  constexpr int kInFlight = 4;
  Walk<const T> loading(walk, lane, input + params.rotary_dim, params.stride_h);
  Walk<T> storing(walk, lane, output + params.rotary_dim, params.head_dim);
  while (storing.head < params.num_heads) {
    uint4 vectors[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k, loading.advance(walk)) {
      if (loading.head < params.num_heads) {
        vectors[k] = *reinterpret_cast<const uint4 *>(loading.data);
      }
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k, storing.advance(walk)) {
      if (storing.head < params.num_heads) store_vector(storing.data, vectors[k]);
    }
  }
}

// Zeros for a token that has no table row.
template <typename T>
__device__ __forceinline__ void zero_token(const ThdRopeParams &params, T *output, int32_t lane,
                                           int lanes) {
  const int32_t vectors = params.num_heads * (params.head_dim / (kVectorBytes / sizeof(T)));
#pragma unroll 1
  for (int32_t i = lane; i < vectors; i += lanes) {
    store_vector(reinterpret_cast<uint4 *>(output) + i, make_uint4(0, 0, 0, 0));
  }
}

}  // namespace thd_rope
}  // namespace transformer_engine

#endif  // TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_VECTOR_CUH_
