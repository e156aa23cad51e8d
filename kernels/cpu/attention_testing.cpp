#include "attention_testing.h"

#include "attention.h"
#include "tiles.h"

namespace {

using Case = ts_test_attention_case;

ts::KvShape shape_of(const Case& c) {
  return {ts::KvFormat(c.kv_format), c.kv_heads, c.head_dim, c.block_size, c.places};
}

ts::Step step_of(const Case& c) {
  return {c.num_tokens, c.num_sequences, nullptr, c.positions, c.starts, c.block_tables, c.table_width};
}

ts::AttentionLayer layer_of(const Case& c) { return {c.place, c.group, c.window, c.scale}; }

template <typename Element>
void attend(const Case& c, uint8_t* pool, const void* queries, const void* keys, const void* values,
            void* output) {
  const ts::KvShape shape = shape_of(c);
  const ts::KvCache cache{shape, pool};
  const ts::Step step = step_of(c);
  const ts::AttentionLayer layer = layer_of(c);
  const size_t width = size_t(c.num_heads) * c.head_dim, kv_width = size_t(c.kv_heads) * c.head_dim;
  ts::ThreadPool threads(c.threads);
  ts::Attention<Element> attention(shape, c.num_heads, threads.size());
  attention.plan(step, &layer, 1);
  threads.run([&](int member) {
#if defined(__AMX_BF16__)
    ts::configure_tiles();
#endif
    attention.store(cache, layer, step, ts::share(c.num_tokens, member, threads.size()),
                    static_cast<const Element*>(keys), static_cast<const Element*>(values), kv_width);
    threads.barrier();
    attention.attend(threads, member, cache, layer, step, static_cast<const Element*>(queries), width,
                     static_cast<Element*>(output), width);
#if defined(__AMX_BF16__)
    ts::release_tiles();
#endif
  });
}

}  // namespace

size_t ts_test_attention_block_bytes(const Case* c) { return shape_of(*c).block_bytes(); }

void ts_test_attention(const Case* c, uint8_t* pool, const void* queries, const void* keys,
                       const void* values, void* output) {
  if (c->element == 0) {
    attend<float>(*c, pool, queries, keys, values, output);
  } else {
    attend<ts::bf16>(*c, pool, queries, keys, values, output);
  }
}

int32_t ts_test_attention_splits(const Case* c) {
  ts::AttentionPlan plan;
  plan.make(step_of(*c), c->window, c->kv_heads, c->num_heads / c->kv_heads, c->threads, size_t(c->head_dim));
  return int32_t(plan.splits().size());
}
