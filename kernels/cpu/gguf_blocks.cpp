#include "gguf_blocks.h"

namespace ts {

namespace {

float read_fp16(const uint8_t* bytes) {
  fp16 value;
  std::memcpy(&value, bytes, sizeof value);
  return to_float(value);
}

// 16 bytes: the low nibbles are weights 0 to 15, the high ones 16 to 31.
void read_nibbles(const uint8_t* bytes, QuantizedGroup& out) {
  for (int i = 0; i < 16; ++i) {
    out.quants[i] = bytes[i] & 15;
    out.quants[16 + i] = bytes[i] >> 4;
  }
}

void set_scale(float scale, QuantizedGroup& out) { out.scales[0] = out.scales[1] = scale; }

template <Source source>
void dequantize_groups(const uint8_t* blocks, size_t count, float* out) {
  QuantizedGroup group;
  for (size_t first = 0; first < count; first += kColumnMultiple) {
    parse_group<source>(blocks, int(first / kColumnMultiple), group);
    weights_of(group, has_minima(source), out + first);
  }
}

// Of group `group` of 8, 6 bits each: scales in bytes 0 to 3, minima in bytes 4 to 7 for the first four
// groups; of the last four the low 4 bits in bytes 8 to 11 (scales low, minima high), the high 2 in the upper
// bits of bytes 0 to 7.
void read_six_bits(const uint8_t* packed, int group, int& scale, int& minimum) {
  if (group < 4) {
    scale = packed[group] & 63;
    minimum = packed[group + 4] & 63;
  } else {
    scale = (packed[group + 4] & 15) | (packed[group - 4] >> 6 << 4);
    minimum = (packed[group + 4] >> 4) | (packed[group] >> 6 << 4);
  }
}

}  // namespace

// Block of 32: scale fp16, q int8 [32].
template <>
void parse_group<Source::q8_0>(const uint8_t* row, int group, QuantizedGroup& out) {
  const uint8_t* block = row + size_t(group) * block_bytes(Source::q8_0);
  set_scale(read_fp16(block), out);
  for (int i = 0; i < kColumnMultiple; ++i) out.quants[i] = block[2 + i] ^ 0x80;
}

// Block of 32: scale fp16, nibbles [16]; w = scale (q - 8).
template <>
void parse_group<Source::q4_0>(const uint8_t* row, int group, QuantizedGroup& out) {
  const uint8_t* block = row + size_t(group) * block_bytes(Source::q4_0);
  set_scale(read_fp16(block), out);
  out.minimum = -8.0f * out.scales[0];
  read_nibbles(block + 2, out);
}

// Block of 32: scale fp16, minimum fp16, nibbles [16].
template <>
void parse_group<Source::q4_1>(const uint8_t* row, int group, QuantizedGroup& out) {
  const uint8_t* block = row + size_t(group) * block_bytes(Source::q4_1);
  set_scale(read_fp16(block), out);
  out.minimum = read_fp16(block + 2);
  read_nibbles(block + 4, out);
}

// Block of 256: d fp16, dmin fp16, 6 bits of scale and minimum for each of 8 groups in 12 bytes, nibbles
// [4][32]: the low ones of 32 bytes are a group, the high ones the next. w = d scale q - dmin minimum.
template <>
void parse_group<Source::q4_k>(const uint8_t* row, int group, QuantizedGroup& out) {
  const uint8_t* block = row + size_t(group / 8) * block_bytes(Source::q4_k);
  int scale, minimum;
  read_six_bits(block + 4, group % 8, scale, minimum);
  set_scale(read_fp16(block) * float(scale), out);
  out.minimum = -(read_fp16(block + 2) * float(minimum));
  const uint8_t* nibbles = block + 16 + group % 8 / 2 * 32;
  const int shift = group % 2 * 4;
  for (int i = 0; i < kColumnMultiple; ++i) out.quants[i] = (nibbles[i] >> shift) & 15;
}

// Block of 256: low 4 bits [2][64], high 2 bits [2][32], scales int8 [16], d fp16. Each half of the block is
// 4 groups of 32: the low bits of two groups lie in the low nibbles of 64 bytes, those of the other two in
// the high ones; the high bits of all four in 2 bits each of 32 bytes. w = d scale (q - 32), a scale for 16
// weights.
template <>
void parse_group<Source::q6_k>(const uint8_t* row, int group, QuantizedGroup& out) {
  const uint8_t* block = row + size_t(group / 8) * block_bytes(Source::q6_k);
  const int half = group % 8 / 4, quarter = group % 4;
  const uint8_t* low = block + half * 64 + quarter % 2 * 32;
  const uint8_t* high = block + 128 + half * 32;
  const int low_shift = quarter / 2 * 4, high_shift = quarter * 2;
  for (int i = 0; i < kColumnMultiple; ++i) {
    const int q = ((low[i] >> low_shift) & 15) | (((high[i] >> high_shift) & 3) << 4);
    out.quants[i] = uint8_t(q - 32 + 128);
  }
  const float d = read_fp16(block + 208);
  const int8_t* scales = reinterpret_cast<const int8_t*>(block + 192) + group % 8 * 2;
  out.scales[0] = d * float(scales[0]);
  out.scales[1] = d * float(scales[1]);
}

void dequantize(Source source, const void* blocks, size_t count, float* out) {
  const uint8_t* bytes = static_cast<const uint8_t*>(blocks);
  switch (source) {
    case Source::q8_0: return dequantize_groups<Source::q8_0>(bytes, count, out);
    case Source::q4_0: return dequantize_groups<Source::q4_0>(bytes, count, out);
    case Source::q4_1: return dequantize_groups<Source::q4_1>(bytes, count, out);
    case Source::q4_k: return dequantize_groups<Source::q4_k>(bytes, count, out);
    case Source::q6_k: return dequantize_groups<Source::q6_k>(bytes, count, out);
    default: return;
  }
}

}  // namespace ts
