// The kinds of rows that weights come in.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ts {

// From q8_0 on: blocks of GGUF (gguf_blocks.h).
enum class Source : int32_t { f32 = 0, bf16 = 1, fp16 = 2, q8_0 = 3, q4_0 = 4, q4_1 = 5, q4_k = 6, q6_k = 7 };

constexpr bool is_blocks(Source source) { return source >= Source::q8_0; }

// Values of a block, and its bytes. Of floats: one value.
constexpr size_t block_values(Source source) {
  if (!is_blocks(source)) return 1;
  return source == Source::q4_k || source == Source::q6_k ? 256 : 32;
}

constexpr size_t block_bytes(Source source) {
  switch (source) {
    case Source::f32: return 4;
    case Source::bf16: return 2;
    case Source::fp16: return 2;
    case Source::q8_0: return 34;
    case Source::q4_0: return 18;
    case Source::q4_1: return 20;
    case Source::q4_k: return 144;
    case Source::q6_k: return 210;
  }
  return 0;
}

constexpr size_t row_bytes(Source source, size_t columns) {
  return columns / block_values(source) * block_bytes(source);
}

}  // namespace ts
