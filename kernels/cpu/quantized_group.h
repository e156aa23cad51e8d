// 32 quantized weights of one row, between what they were stored as and what they are packed to.
#pragma once

#include "format.h"
#include "lanes.h"

namespace ts {

struct QuantizedGroup {
  alignas(32) uint8_t quants[kColumnMultiple];
  float scales[2];  // of the first and the last 16 weights
  float minimum;    // 4 bits only
};

// w = scale (q - 128), or scale q + minimum.
inline void weights_of(const QuantizedGroup& group, bool has_minimum, float* out) {
  for (int part = 0; part < 2; ++part) {
    const Lanes scale = broadcast(group.scales[part]);
    const Lanes quants = load_u8(group.quants + 16 * part);
    const Lanes weights = has_minimum ? fma(quants, scale, broadcast(group.minimum))
                                      : scale * (quants - broadcast(128.0f));
    store(out + 16 * part, weights);
  }
}

}  // namespace ts
