#include "kv_cache.h"

#include <cmath>

#include "element.h"

namespace ts {

namespace {

size_t value_bytes(KvFormat format) { return format == KvFormat::f32 ? 4 : format == KvFormat::bf16 ? 2 : 1; }

// Where dim `dim` of the key in slot `slot` is, in values; and of the value.
size_t key_index(bool pairs, int slot, int dim) {
  return pairs ? size_t(dim / 2) * 32 + slot * 2 + dim % 2 : size_t(dim) * kPageTokens + slot;
}
size_t value_index(bool pairs, int padded_dim, int slot, int dim) {
  return pairs ? (size_t(slot / 2) * padded_dim + dim) * 2 + slot % 2 : size_t(slot) * padded_dim + dim;
}

float convert(float value, float) { return value; }
bf16 convert(float value, bf16) { return to_bf16(value); }

// The key and the value as they are, or rounded to To.
template <typename To, typename Element>
void store_plain(const KvShape& shape, uint8_t* page, int slot, const Element* key, const Element* value) {
  constexpr bool pairs = sizeof(To) == 2;
  const int padded = shape.padded_dim();
  To* keys = reinterpret_cast<To*>(page);
  To* values = reinterpret_cast<To*>(page + shape.half_bytes());
  for (int dim = 0; dim < shape.head_dim; ++dim) {
    keys[key_index(pairs, slot, dim)] = convert(to_float(key[dim]), To());
  }
  for (int dim = shape.head_dim; dim < padded; ++dim) keys[key_index(pairs, slot, dim)] = To();
  for (int dim = 0; dim < shape.head_dim; ++dim) {
    values[value_index(pairs, padded, slot, dim)] = convert(to_float(value[dim]), To());
  }
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
        out[half == 0 ? key_index(true, slot, dim + i) : value_index(true, padded, slot, dim + i)] = q[i];
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
    case KvFormat::f32: return store_plain<float>(shape, page, slot, key, value);
    case KvFormat::bf16: return store_plain<bf16>(shape, page, slot, key, value);
    case KvFormat::int8: return store_int8(shape, page, slot, key, value);
  }
}

template void store_token(const KvShape&, uint8_t*, int, const float*, const float*);
template void store_token(const KvShape&, uint8_t*, int, const bf16*, const bf16*);

}  // namespace ts
