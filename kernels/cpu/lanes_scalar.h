// Lanes in plain C++. What they mean: lanes.h.
#pragma once

#include <cmath>

#include "numbers.h"

namespace ts {

struct Lanes {
  float values[16];
};

// Lane i: function(i).
template <typename Function>
inline Lanes each(Function&& function) {
  Lanes out;
  for (int i = 0; i < 16; ++i) out.values[i] = function(i);
  return out;
}

inline Lanes broadcast(float value) {
  return each([=](int) { return value; });
}
inline Lanes zero() { return broadcast(0.0f); }

inline Lanes load(const float* values) {
  return each([=](int i) { return values[i]; });
}
inline void store(float* out, Lanes a) { std::memcpy(out, a.values, sizeof a.values); }

inline Lanes load_first(const float* values, int count) {
  return each([=](int i) { return i < count ? values[i] : 0.0f; });
}
inline void store_first(float* out, Lanes a, int count) {
  for (int i = 0; i < 16 && i < count; ++i) out[i] = a.values[i];
}

inline Lanes load_bf16(const bf16* values) {
  return each([=](int i) { return to_float(values[i]); });
}
inline void store_bf16(bf16* out, Lanes a) {
  for (int i = 0; i < 16; ++i) out[i] = to_bf16(a.values[i]);
}

inline Lanes load_first_bf16(const bf16* values, int count) {
  return each([=](int i) { return i < count ? to_float(values[i]) : 0.0f; });
}
inline void store_first_bf16(bf16* out, Lanes a, int count) {
  for (int i = 0; i < 16 && i < count; ++i) out[i] = to_bf16(a.values[i]);
}

inline void load_bf16_pairs(const bf16* values, Lanes& even, Lanes& odd) {
  even = each([=](int i) { return to_float(values[2 * i]); });
  odd = each([=](int i) { return to_float(values[2 * i + 1]); });
}

inline Lanes load_fp16(const fp16* values) {
  return each([=](int i) { return to_float(values[i]); });
}
inline Lanes load_u8(const uint8_t* values) {
  return each([=](int i) { return float(values[i]); });
}
inline Lanes load_i8(const int8_t* values) {
  return each([=](int i) { return float(values[i]); });
}
inline void store_i8(int8_t* out, Lanes a) {
  for (int i = 0; i < 16; ++i) out[i] = int8_t(a.values[i]);
}

inline Lanes operator+(Lanes a, Lanes b) {
  return each([&](int i) { return a.values[i] + b.values[i]; });
}
inline Lanes operator-(Lanes a, Lanes b) {
  return each([&](int i) { return a.values[i] - b.values[i]; });
}
inline Lanes operator*(Lanes a, Lanes b) {
  return each([&](int i) { return a.values[i] * b.values[i]; });
}
inline Lanes operator/(Lanes a, Lanes b) {
  return each([&](int i) { return a.values[i] / b.values[i]; });
}
// Rounded twice: processors of this tier have no instruction for it, and std::fma would be a call.
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return a * b + c; }
inline Lanes max(Lanes a, Lanes b) {
  return each([&](int i) { return a.values[i] > b.values[i] ? a.values[i] : b.values[i]; });
}
inline Lanes min(Lanes a, Lanes b) {
  return each([&](int i) { return a.values[i] < b.values[i] ? a.values[i] : b.values[i]; });
}
inline Lanes abs(Lanes a) {
  return each([&](int i) { return std::fabs(a.values[i]); });
}
inline Lanes copy_sign(Lanes a, Lanes sign) {
  return each([&](int i) { return std::copysign(a.values[i], sign.values[i]); });
}
// From 2^23 on floats have no fraction; below, adding 2^23 leaves no room for one.
inline Lanes round(Lanes a) {
  return each([&](int i) {
    const float x = a.values[i], shift = std::copysign(8388608.0f, x);
    return std::fabs(x) < 8388608.0f ? (x + shift) - shift : x;
  });
}
// In two steps, each a factor that a float can hold.
inline Lanes scale_by_power_of_two(Lanes x, Lanes n) {
  return each([&](int i) {
    const float limited = n.values[i] < 252.0f ? (n.values[i] > -252.0f ? n.values[i] : -252.0f) : 252.0f;
    const int whole = int(limited), half = whole / 2;
    return x.values[i] * float_of(uint32_t(half + 127) << 23) * float_of(uint32_t(whole - half + 127) << 23);
  });
}
inline Lanes floor(Lanes a) {
  return each([&](int i) { return std::floor(a.values[i]); });
}
// From 2^23 on floats have no fraction.
inline Lanes fraction(Lanes a) {
  const Lanes near = min(broadcast(8388608.0f), max(broadcast(-8388608.0f), a));
  return near - floor(near);
}
inline Lanes scale_by_floor(Lanes x, Lanes n) { return scale_by_power_of_two(x, floor(n)); }

inline Lanes select_below(int count, Lanes a, Lanes b) {
  return each([&](int i) { return i < count ? a.values[i] : b.values[i]; });
}

inline Lanes swap_halves(Lanes a) {
  return each([&](int i) { return a.values[i ^ 8]; });
}
inline Lanes reciprocal_coarse(Lanes a) { return broadcast(1.0f) / a; }
inline Lanes low_halves(Lanes a, Lanes b) {
  return each([&](int i) { return i < 8 ? a.values[i] : b.values[i - 8]; });
}
inline Lanes high_halves(Lanes a, Lanes b) {
  return each([&](int i) { return i < 8 ? a.values[i + 8] : b.values[i]; });
}

inline float sum(Lanes a) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) a.values[i] += a.values[i + half];
  return a.values[0];
}

inline float highest(Lanes a) {
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i)
      if (!(a.values[i] > a.values[i + half])) a.values[i] = a.values[i + half];
  return a.values[0];
}

inline bool any_reaches(Lanes a, float bound) {
  for (const float value : a.values)
    if (value >= bound) return true;
  return false;
}

inline void store_low_half(float* out, Lanes a) { std::memcpy(out, a.values, 8 * sizeof(float)); }
inline void store_low_half_bf16(bf16* out, Lanes a) {
  for (int i = 0; i < 8; ++i) out[i] = to_bf16(a.values[i]);
}

}  // namespace ts
