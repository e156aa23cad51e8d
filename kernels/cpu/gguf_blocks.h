// Blocks of GGUF files: how ggml stores quantized rows. A row is its blocks, one after the other.
#pragma once

#include "quantized_group.h"
#include "source.h"

namespace ts {

// If w = scale q + minimum; else w = scale (q - 128).
constexpr bool has_minima(Source source) {
  return source == Source::q4_0 || source == Source::q4_1 || source == Source::q4_k;
}

// The format that holds such blocks without loss.
constexpr Format lossless_format(Source source) {
  switch (source) {
    case Source::q8_0: return Format::q8;
    case Source::q4_0: return Format::q4;
    case Source::q4_1: return Format::q4;
    case Source::q4_k: return Format::q4_wide;
    case Source::q6_k: return Format::q8_16;
    default: return Format::f32;
  }
}

// Weights [32 group, 32 group + 32) of a row of blocks.
template <Source source>
void parse_group(const uint8_t* row, int group, QuantizedGroup& out);

// `count` values of blocks as floats; a multiple of 32.
void dequantize(Source source, const void* blocks, size_t count, float* out);

}  // namespace ts
