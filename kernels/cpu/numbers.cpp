#include "numbers.h"

namespace ts {

fp16 to_fp16(float value) {
  const uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return {uint16_t(sign | 0x7e00)};   // NaN
  if (magnitude >= 0x477ff000) return {uint16_t(sign | 0x7c00)};  // from 65,520 on
  if (magnitude < 0x38800000) {
    // Below 2^-14 an fp16 is a multiple of 2^-24, and so is a float between 0.5 and 1.
    return {uint16_t(sign | (bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f)))};
  }
  const uint32_t rounded = magnitude + 0xfff + ((magnitude >> 13) & 1);
  return {uint16_t(sign | ((rounded >> 13) - (112 << 10)))};
}

}  // namespace ts
