// SPDX-License-Identifier: Apache-2.0
//
// The rotation of one pair of elements, for host and device alike: which elements make a pair, and
// the exact order of the arithmetic. Nothing else computes these.

#ifndef TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_ROTATION_H_
#define TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_ROTATION_H_

#include <cmath>
#include <cstdint>
#include <cstring>

#include "thd_token_map.h"

namespace transformer_engine {
namespace thd_rope {

// Cosine and sine of the two table entries that belong to a pair. A table may have halves that
// differ, so the two elements of a pair have angles of their own.
struct PairAngles {
  float cos_first, sin_first;
  float cos_second, sin_second;
};

struct PairValues {
  float first, second;
};

// Index of the first element of pair `pair`, in the row and in the table alike.
template <bool kInterleaved>
THD_ROPE_HOST_DEVICE int32_t first_of_pair(int32_t pair) {
  return kInterleaved ? 2 * pair : pair;
}

// Distance from the first to the second element of a pair.
template <bool kInterleaved>
THD_ROPE_HOST_DEVICE int32_t pair_distance(int32_t rotary_dim) {
  return kInterleaved ? 1 : rotary_dim / 2;
}

// x * cos + partner * sin, the product with the sine rounded first and then fused into the product
// with the cosine. This is the order in TE's compiled kernels; written out, because a compiler that
// is left to contract the expression may fuse the other product and change the last bit.
THD_ROPE_HOST_DEVICE float rotate_element(float x, float cos, float partner, float sin) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(x, cos, __fmul_rn(partner, sin));
#else
  const float product = partner * sin;
  return std::fma(x, cos, product);
#endif
}

// Rotates a pair by its angles; `kTranspose` applies the transposed matrix, which is the gradient.
// The sine in the transpose is the one of the partner.
template <bool kTranspose>
THD_ROPE_HOST_DEVICE PairValues rotate_pair(const PairValues &x, const PairAngles &a) {
  if (kTranspose) {
    return {rotate_element(x.first, a.cos_first, x.second, a.sin_second),
            rotate_element(x.second, a.cos_second, x.first, -a.sin_first)};
  }
  return {rotate_element(x.first, a.cos_first, -x.second, a.sin_first),
          rotate_element(x.second, a.cos_second, x.first, a.sin_second)};
}

// Precise sine and cosine of a float32 angle, never the fast-math ones: positions reach millions.
THD_ROPE_HOST_DEVICE void sine_cosine(float angle, float *sine, float *cosine) {
#if defined(__CUDA_ARCH__) || defined(_GNU_SOURCE)
  sincosf(angle, sine, cosine);
#else
  *sine = std::sin(angle);
  *cosine = std::cos(angle);
#endif
}

THD_ROPE_HOST_DEVICE bool same_bits(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(a) == __float_as_uint(b);
#else
  return std::memcmp(&a, &b, sizeof(a)) == 0;
#endif
}

// Angles of a pair from its two table entries. Nearly all tables repeat an entry for the second
// element; then its sine and cosine are those of the first. By bits, not by value: -0.0 equals 0.0.
THD_ROPE_HOST_DEVICE PairAngles pair_angles(float first, float second) {
  PairAngles a;
  sine_cosine(first, &a.sin_first, &a.cos_first);
  a.sin_second = a.sin_first;
  a.cos_second = a.cos_first;
  if (!same_bits(first, second)) sine_cosine(second, &a.sin_second, &a.cos_second);
  return a;
}

template <bool kInterleaved>
THD_ROPE_HOST_DEVICE PairAngles load_pair_angles(const float *table_row, int32_t pair,
                                                 int32_t rotary_dim) {
  const int32_t first = first_of_pair<kInterleaved>(pair);
  return pair_angles(table_row[first], table_row[first + pair_distance<kInterleaved>(rotary_dim)]);
}

}  // namespace thd_rope
}  // namespace transformer_engine

#endif  // TRANSFORMER_ENGINE_OVERLAY_FUSED_ROPE_THD_ROTATION_H_
