// Our own quantization of 32 floats, to q8 or q4.
//
// q8: scale = largest / 127, q = w / scale rounded to the nearest, ties to even, plus 128. q4: minimum = the
// lowest, scale = (the highest - minimum) / 15, q = (w - minimum) / scale, rounded likewise.
//
// Scale and minimum are rounded to fp16, as they are stored, before anything is computed from them.
#pragma once

#include <algorithm>

#include "quantized_group.h"

namespace ts {

inline float through_fp16(float value) {
  constexpr float kHighest = 65504;
  return to_float(to_fp16(std::clamp(value, -kHighest, kHighest)));
}

// values / scale, to whole numbers from `low` to `high`; 0 if the scale is.
inline Lanes in_steps(Lanes values, float scale, float low, float high) {
  if (scale == 0) return zero();
  return min(max(round(values / broadcast(scale)), broadcast(low)), broadcast(high));
}

inline void quantize_to_q8(Lanes first, Lanes last, QuantizedGroup& out) {
  const float scale = through_fp16(highest(max(abs(first), abs(last))) / 127);
  out.scales[0] = out.scales[1] = scale;
  int8_t quants[kColumnMultiple];
  store_i8(quants, in_steps(first, scale, -127, 127));
  store_i8(quants + 16, in_steps(last, scale, -127, 127));
  for (int i = 0; i < kColumnMultiple; ++i) out.quants[i] = uint8_t(quants[i]) ^ 0x80;
}

inline void quantize_to_q4(Lanes first, Lanes last, QuantizedGroup& out) {
  out.minimum = through_fp16(-highest(max(zero() - first, zero() - last)));
  const float scale = through_fp16(std::max(highest(max(first, last)) - out.minimum, 0.0f) / 15);
  out.scales[0] = out.scales[1] = scale;
  int8_t* quants = reinterpret_cast<int8_t*>(out.quants);
  store_i8(quants, in_steps(first - broadcast(out.minimum), scale, 0, 15));
  store_i8(quants + 16, in_steps(last - broadcast(out.minimum), scale, 0, 15));
}

template <Format format>
inline void quantize(const float* values, QuantizedGroup& out) {
  static_assert(format == Format::q8 || format == Format::q4);
  if constexpr (format == Format::q8) {
    quantize_to_q8(load(values), load(values + 16), out);
  } else {
    quantize_to_q4(load(values), load(values + 16), out);
  }
}

}  // namespace ts
