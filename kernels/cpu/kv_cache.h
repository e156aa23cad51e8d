// The paged KV cache.
//
// A block holds the keys and values of `block_size` tokens (a multiple of 16) in all layers of a group:
//
//   block [places][kv_heads][block_size / 16] of pages; a page: keys of 16 tokens, then their values
//
//            keys                        values
//   f32      [D][16]                     [16][D]
//   bf16     [D / 2][16][2]              [8][D][2]              pairs of dims; pairs of tokens
//   int8     [D / 2][16][2], and fp32    [8][D][2], and fp32    as bf16; x = scale q, one scale per token
//            scales [16]                 scales [16]
//
// so that both are, as they lie there (int8: once widened), the second factor of a tile product. D is the
// head size padded to a multiple of 32; keys' padding is zero once a token is stored, values' padding is
// anything. Blocks are contiguous: a block that is first written touches one stretch of memory. The pool's
// memory is zero until then and taken page by page.
#pragma once

#include "memory.h"
#include "numbers.h"

namespace ts {

enum class KvFormat : int32_t { f32 = 0, bf16 = 1, int8 = 2 };

constexpr int kPageTokens = 16;

struct KvShape {
  KvFormat format;
  int kv_heads, head_dim;
  int block_size;  // tokens, a multiple of 16
  int places;      // layers of a group

  int padded_dim() const { return (head_dim + 31) / 32 * 32; }
  size_t half_bytes() const;  // the keys of a page; or the values
  size_t page_bytes() const { return 2 * half_bytes(); }
  size_t block_bytes() const;
  // Where a half of an int8 page has its scales.
  size_t scales_offset() const { return size_t(padded_dim()) * kPageTokens; }
};

struct KvCache {
  KvShape shape;
  uint8_t* pool;  // [num_blocks][block_bytes]

  uint8_t* page(int block, int place, int kv_head, int page) const;
};

// One token's key and value of one head, [head_dim] each, into slot 0..15 of a page. Different slots of a
// page may be stored by different threads at the same time.
template <typename Element>
void store_token(const KvShape& shape, uint8_t* page, int slot, const Element* key, const Element* value);

}  // namespace ts
