// Attention by itself, for tests. Not part of the engine's interface, and free to change with it.
#pragma once

#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(default)
extern "C" {

typedef struct {
  int32_t element;    // of queries, keys, values and output: 0 fp32, 1 bf16
  int32_t kv_format;  // kv_cache.h
  int32_t num_heads, kv_heads, head_dim, block_size, places, num_groups;
  int32_t place, group, window;  // the layer's
  float scale;
  int32_t threads;
  int32_t num_tokens, num_sequences, table_width;
  const int32_t *positions, *starts, *block_tables;  // step.h
} ts_test_attention_case;

size_t ts_test_attention_block_bytes(const ts_test_attention_case*);

// Stores keys and values [T][kv_heads][head_dim] into the pool [num_blocks][block_bytes], then writes the
// attention of queries [T][num_heads][head_dim] to output, likewise.
void ts_test_attention(const ts_test_attention_case*, uint8_t* pool, const void* queries, const void* keys,
                       const void* values, void* output);

// The number of tasks whose segments several threads share.
int32_t ts_test_attention_splits(const ts_test_attention_case*);

}  // extern "C"
#pragma GCC visibility pop
