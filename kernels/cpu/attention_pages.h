// The pages of a segment, as products take them.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "attention_plan.h"
#include "attention_softmax.h"
#include "element.h"

namespace ts {

// Where the pages of a segment lie that a task sees: [pages.begin, pages.end), counted from the segment's
// first.
struct SegmentPages {
  Stretch pages;
  const uint8_t* addresses[kSegmentPages];
};

// block_table: of the task's sequence and the layer's group.
inline SegmentPages find_pages(const KvCache& cache, int place, int kv_head, const int32_t* block_table,
                               int segment, Stretch keys) {
  const int first = segment * kSegmentPages;
  SegmentPages found;
  found.pages.begin = std::max(keys.begin / kPageTokens - first, 0);
  found.pages.end = std::min((keys.end + kPageTokens - 1) / kPageTokens - first, kSegmentPages);
  const int pages_per_block = cache.shape.block_size / kPageTokens;
  for (int page = found.pages.begin; page < found.pages.end; ++page) {
    const int block = (first + page) / pages_per_block, within = (first + page) % pages_per_block;
    found.addresses[page] = cache.page(block_table[block], place, kv_head, within);
  }
  return found;
}

// int8 numbers as bf16, which is exact.
inline void widen(const int8_t* values, int count, bf16* out) {
  for (int i = 0; i < count; i += 16) store_bf16(out + i, load_i8(values + i));
}

inline void load_pairs(const bf16* pairs, Lanes& even, Lanes& odd) { load_bf16_pairs(pairs, even, odd); }
inline void load_pairs(const int8_t* pairs, Lanes& even, Lanes& odd) {
  bf16 wide[32];
  widen(pairs, 32, wide);
  load_bf16_pairs(wide, even, odd);
}

// Pairs [height / 2][width][2] to rows [height][width].
template <typename Number>
void part_pairs(const Number* pairs, int height, int width, float* out) {
  for (int row = 0; row < height; row += 2) {
    for (int column = 0; column < width; column += 16) {
      Lanes even, odd;
      load_pairs(pairs + size_t(row) * width + column * 2, even, odd);
      store(out + size_t(row) * width + column, even);
      store(out + size_t(row + 1) * width + column, odd);
    }
  }
}

// A half of a page in another form. height, width: 16 and D, or D and 16.
inline void unpack_half(const KvShape&, const uint8_t* half, int height, int width, bf16* out) {
  widen(reinterpret_cast<const int8_t*>(half), height * width, out);
}
inline void unpack_half(const KvShape& shape, const uint8_t* half, int height, int width, float* out) {
  if (shape.format == KvFormat::bf16) {
    part_pairs(reinterpret_cast<const bf16*>(half), height, width, out);
  } else {
    part_pairs(reinterpret_cast<const int8_t*>(half), height, width, out);
  }
}

// A page's values with zeros behind the first `count` tokens: what is there is not a number of this sequence, and not
// even that of a zero probability. May be in place.
inline void copy_tokens(const float* values, int count, int padded_dim, float* out) {
  const size_t kept = size_t(count) * padded_dim;
  std::copy_n(values, kept, out);
  std::fill(out + kept, out + size_t(kPageTokens) * padded_dim, 0.0f);
}
inline void copy_tokens(const bf16* values, int count, int padded_dim, bf16* out) {
  for (int token = 0; token < kPageTokens; token += 2, values += 2 * padded_dim, out += 2 * padded_dim) {
    // Of two tokens that lie side by side, the first is in the low half of a word.
    const uint32_t kept = count - token >= 2 ? 0xffffffff : count - token == 1 ? 0x0000ffff : 0;
    for (int dim = 0; dim < padded_dim; ++dim) {
      uint32_t pair;
      std::memcpy(&pair, values + 2 * dim, sizeof pair);
      pair &= kept;
      std::memcpy(out + 2 * dim, &pair, sizeof pair);
    }
  }
}

// Keys and values of a segment in the type that they are multiplied in.
template <typename Value>
class SegmentOperands {
 public:
  const Value* keys[kSegmentPages];
  const Value* values[kSegmentPages];

  explicit SegmentOperands(const KvShape& shape) : shape_(shape) {
    const size_t half = size_t(shape.padded_dim()) * kPageTokens;
    memory_.reserve((unpacked() ? 2 * kSegmentPages : 1) * half * sizeof(Value));
  }

  // If the cache's numbers have to be brought into another form.
  bool unpacked() const {
    return shape_.format != (std::is_same_v<Value, float> ? KvFormat::f32 : KvFormat::bf16);
  }
  size_t half_bytes() const { return shape_.half_bytes(); }
  PageScales key_scales() const { return shape_.format == KvFormat::int8 ? key_scales_ : nullptr; }
  PageScales value_scales() const { return shape_.format == KvFormat::int8 ? value_scales_ : nullptr; }

  // end: tokens of the segment that are there; the last page's others are zeros, in a copy.
  void set(const SegmentPages& found, int end) {
    const size_t half_bytes = shape_.half_bytes();
    for (int page = found.pages.begin; page < found.pages.end; ++page) {
      const uint8_t* address = found.addresses[page];
      if (unpacked()) {
        unpack(page, address);
      } else {
        keys[page] = reinterpret_cast<const Value*>(address);
        values[page] = reinterpret_cast<const Value*>(address + half_bytes);
      }
    }
    const int tail = end - (found.pages.end - 1) * kPageTokens;
    if (tail < kPageTokens) clear_tail(found.pages.end - 1, tail);
  }

 private:
  Value* memory(int half) const {
    return memory_.template as<Value>() + size_t(half) * shape_.padded_dim() * kPageTokens;
  }

  void unpack(int page, const uint8_t* address) {
    const int dim = shape_.padded_dim();
    const uint8_t* second = address + shape_.half_bytes();
    unpack_half(shape_, address, dim, kPageTokens, memory(page));
    unpack_half(shape_, second, kPageTokens, dim, memory(kSegmentPages + page));
    keys[page] = memory(page);
    values[page] = memory(kSegmentPages + page);
    key_scales_[page] = reinterpret_cast<const float*>(address + shape_.scales_offset());
    value_scales_[page] = reinterpret_cast<const float*>(second + shape_.scales_offset());
  }

  void clear_tail(int page, int count) {
    Value* copy = memory(unpacked() ? kSegmentPages + page : 0);
    copy_tokens(values[page], count, shape_.padded_dim(), copy);
    values[page] = copy;
  }

  KvShape shape_;
  Memory memory_;
  const float* key_scales_[kSegmentPages];
  const float* value_scales_[kSegmentPages];
};

}  // namespace ts
