#include "kv_cache.h"

#include <cmath>
#include <type_traits>

#include "element.h"

namespace ts {

namespace {

size_t value_bytes(KvFormat format) { return format == KvFormat::f32 ? 4 : format == KvFormat::bf16 ? 2 : 1; }

// Where dim `dim` of the key in slot `slot` of an int8 page is, in values; and of the value.
size_t key_index(int slot, int dim) { return size_t(dim / 2) * 2 * kPageTokens + slot * 2 + dim % 2; }
size_t value_index(int padded_dim, int slot, int dim) {
  return (size_t(slot / 2) * padded_dim + dim) * 2 + slot % 2;
}

template <typename To, typename From>
To convert(From value) {
  if constexpr (std::is_same_v<From, To>) {
    return value;
  } else if constexpr (std::is_same_v<To, bf16>) {
    return to_bf16(value);
  } else {
    return to_float(value);
  }
}

// Into every second of `out`. What is between belongs to another token, which another thread may be storing.
template <typename From>
void store_every_second(const From* values, int count, bf16* out) {
  int i = 0;
#if defined(__AVX512BW__)
  if constexpr (std::is_same_v<From, bf16>) {
    for (; i + 16 <= count; i += 16) {
      const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(values + i)));
      _mm512_mask_storeu_epi16(out + 2 * i, 0x55555555, wide);
    }
  }
#endif
  for (; i < count; ++i) out[2 * i] = convert<bf16>(values[i]);
}

template <typename From>
void store_f32(const KvShape& shape, uint8_t* page, int slot, const From* key, const From* value) {
  float* keys = reinterpret_cast<float*>(page) + slot;
  float* values = reinterpret_cast<float*>(page + shape.half_bytes()) + size_t(slot) * shape.padded_dim();
  for (int dim = 0; dim < shape.head_dim; ++dim) keys[dim * kPageTokens] = convert<float>(key[dim]);
  for (int dim = shape.head_dim; dim < shape.padded_dim(); ++dim) keys[dim * kPageTokens] = 0;
  convert_row(value, shape.head_dim, values);
}

// Head sizes are even: two dims that lie side by side are both there, or neither is.
template <typename From>
void store_bf16_pairs(const KvShape& shape, uint8_t* page, int slot, const From* key, const From* value) {
  bf16* keys = reinterpret_cast<bf16*>(page) + 2 * slot;
  for (int dim = 0; dim < shape.head_dim; dim += 2) {
    const bf16 pair[2] = {convert<bf16>(key[dim]), convert<bf16>(key[dim + 1])};
    std::memcpy(keys + dim * kPageTokens, pair, sizeof pair);
  }
  for (int dim = shape.head_dim; dim < shape.padded_dim(); dim += 2) {
    std::memset(keys + dim * kPageTokens, 0, 2 * sizeof(bf16));
  }
  bf16* values = reinterpret_cast<bf16*>(page + shape.half_bytes());
  store_every_second(value, shape.head_dim, values + size_t(slot / 2) * 2 * shape.padded_dim() + slot % 2);
}

// So that 1 / scale is finite.
constexpr float kSmallestScale = 1e-30f;

// largest / 127; NaN if one of the values is.
template <typename Element>
float int8_scale(const Element* values, int count) {
  float largest = 0;
  for (int i = 0; i < count; ++i) {
    const float size = std::fabs(to_float(values[i]));
    if (size > largest || size != size) largest = size;
  }
  const float scale = largest / 127.0f;
  return scale < kSmallestScale ? kSmallestScale : scale;
}

// q = round(x / scale). What is not finite becomes any q: the scale tells of it.
template <typename Element>
void store_int8(const KvShape& shape, uint8_t* page, int slot, const Element* key, const Element* value) {
  const int padded = shape.padded_dim();
  uint8_t* halves[2] = {page, page + shape.half_bytes()};
  const Element* sources[2] = {key, value};
  for (int half = 0; half < 2; ++half) {
    int8_t* out = reinterpret_cast<int8_t*>(halves[half]);
    const float scale = int8_scale(sources[half], shape.head_dim);
    for (int dim = 0; dim < padded; dim += 16) {
      const Lanes x = load_elements(sources[half] + dim, shape.head_dim - dim);
      int8_t q[16];
      store_i8(q, min(max(round(x / broadcast(scale)), broadcast(-127)), broadcast(127)));
      for (int i = 0; i < 16; ++i) {
        out[half == 0 ? key_index(slot, dim + i) : value_index(padded, slot, dim + i)] = q[i];
      }
    }
    reinterpret_cast<float*>(halves[half] + shape.scales_offset())[slot] = scale;
  }
}

}  // namespace

size_t KvShape::half_bytes() const {
  const size_t values = size_t(padded_dim()) * kPageTokens;
  return values * value_bytes(format) + (format == KvFormat::int8 ? kPageTokens * sizeof(float) : 0);
}

size_t KvShape::block_bytes() const { return page_bytes() * (block_size / kPageTokens) * kv_heads * places; }

uint8_t* KvCache::page(int block, int place, int kv_head, int page) const {
  const size_t pages = shape.block_size / kPageTokens;
  const size_t index = (size_t(place) * shape.kv_heads + kv_head) * pages + page;
  return pool + block * shape.block_bytes() + index * shape.page_bytes();
}

template <typename Element>
void store_token(const KvShape& shape, uint8_t* page, int slot, const Element* key, const Element* value) {
  switch (shape.format) {
    case KvFormat::f32: return store_f32(shape, page, slot, key, value);
    case KvFormat::bf16: return store_bf16_pairs(shape, page, slot, key, value);
    case KvFormat::int8: return store_int8(shape, page, slot, key, value);
  }
}

template void store_token(const KvShape&, uint8_t*, int, const float*, const float*);
template void store_token(const KvShape&, uint8_t*, int, const bf16*, const bf16*);

}  // namespace ts
