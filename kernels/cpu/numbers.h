// Number formats of 16 bits, and how they turn into floats.
#pragma once

#include <cstdint>
#include <cstring>

namespace ts {

struct bf16 {
  uint16_t bits;
};

struct fp16 {
  uint16_t bits;
};

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline float to_float(float value) { return value; }

inline float to_float(bf16 value) { return float_of(uint32_t(value.bits) << 16); }

// Rounds to nearest, ties to even; NaN stays NaN.
inline bf16 to_bf16(float value) {
  const uint32_t bits = bits_of(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return {uint16_t((bits >> 16) | 0x40)};
  return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

// Exact.
inline float to_float(fp16 value) {
  const uint32_t sign = uint32_t(value.bits & 0x8000) << 16;
  const uint32_t exponent = (value.bits >> 10) & 0x1f, fraction = value.bits & 0x3ff;
  if (exponent == 0x1f) return float_of(sign | 0x7f800000 | (fraction << 13));
  if (exponent == 0) return float_of(sign | bits_of(float(fraction) * 0x1p-24f));
  return float_of(sign | ((exponent + 112) << 23) | (fraction << 13));
}

// Rounds to nearest, ties to even; what is too large becomes infinite.
fp16 to_fp16(float value);

}  // namespace ts
