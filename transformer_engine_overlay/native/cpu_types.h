// SPDX-License-Identifier: Apache-2.0
//
// float16 and bfloat16 on the host: storage, and conversion with one rounding to nearest even.

#ifndef TRANSFORMER_ENGINE_OVERLAY_NATIVE_CPU_TYPES_H_
#define TRANSFORMER_ENGINE_OVERLAY_NATIVE_CPU_TYPES_H_

#include <cstdint>
#include <cstring>

namespace transformer_engine {
namespace thd_rope {

struct Float16 {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

inline float to_float(float x) { return x; }

inline float to_float(BFloat16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }

inline float to_float(Float16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t exponent = x.bits & 0x7c00u;
  const uint32_t mantissa = x.bits & 0x03ffu;
  if (exponent == 0) {  // zero or subnormal: mantissa counts units of 2^-24
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return float_of(sign | bits_of(magnitude));
  }
  if (exponent == 0x7c00u) return float_of(sign | 0x7f800000u | (mantissa << 13));
  return float_of(sign | (((exponent | mantissa) << 13) + ((127u - 15u) << 23)));
}

template <typename T>
T from_float(float x);

template <>
inline float from_float<float>(float x) {
  return x;
}

template <>
inline BFloat16 from_float<BFloat16>(float x) {
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};  // NaN, as the GPU writes it
  const uint32_t round = 0x7fffu + ((bits >> 16) & 1u);
  return {static_cast<uint16_t>((bits + round) >> 16)};
}

template <>
inline Float16 from_float<Float16>(float x) {
  const uint16_t sign = static_cast<uint16_t>((bits_of(x) >> 16) & 0x8000u);
  const uint32_t magnitude = bits_of(x) & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {0x7fff};  // NaN, as the GPU writes it
  if (magnitude >= bits_of(65520.0f)) return {static_cast<uint16_t>(sign | 0x7c00u)};
  uint32_t half;
  if (magnitude < bits_of(0x1p-14f)) {
    // Subnormal: adding 0.5, whose unit in the last place is 2^-24, rounds to that unit.
    half = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  } else {
    const uint32_t rebiased = magnitude - ((127u - 15u) << 23);
    half = (rebiased + 0x0fffu + ((rebiased >> 13) & 1u)) >> 13;
  }
  return {static_cast<uint16_t>(sign | half)};
}

}  // namespace thd_rope
}  // namespace transformer_engine

#endif  // TRANSFORMER_ENGINE_OVERLAY_NATIVE_CPU_TYPES_H_
