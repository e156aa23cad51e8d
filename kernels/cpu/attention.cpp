#include "attention.h"

#include <algorithm>

#include "attention_worker.h"

namespace ts {

template <typename Element>
Attention<Element>::Attention(const KvShape& shape, int num_heads, int threads)
    : shape_(shape), group_size_(num_heads / shape.kv_heads) {
  for (int member = 0; member < threads; ++member) workers_.emplace_back(shape, group_size_);
}

template <typename Element>
Attention<Element>::~Attention() = default;

template <typename Element>
void Attention<Element>::plan(const Step& step, const AttentionLayer* layers, int num_layers) {
  const size_t part_row = Partial::row_floats(shape_.padded_dim());
  size_t part_floats = 0;
  num_plans_ = 0;
  for (int i = 0; i < num_layers; ++i) {
    const auto same_window = [&](const AttentionPlan& plan) { return plan.window() == layers[i].window; };
    const auto made_end = plans_.begin() + num_plans_;
    if (std::any_of(plans_.begin(), made_end, same_window)) continue;
    if (num_plans_ == int(plans_.size())) plans_.emplace_back();
    AttentionPlan& plan = plans_[num_plans_++];
    plan.make(step, layers[i].window, shape_.kv_heads, group_size_, int(workers_.size()), part_row);
    part_floats = std::max(part_floats, plan.part_floats());
  }
  parts_.reserve(part_floats * sizeof(float));
}

template <typename Element>
const AttentionPlan& Attention<Element>::plan_of(int window) const {
  int index = 0;
  while (plans_[index].window() != window) ++index;
  return plans_[index];
}

template <typename Element>
void Attention<Element>::store(const KvCache& cache, const AttentionLayer& layer, const Step& step, Span rows,
                               const Element* keys, const Element* values, size_t stride) {
  const int32_t* ends = step.starts + 1;
  int sequence = int(std::upper_bound(ends, ends + step.num_sequences, rows.begin) - ends);
  const int pages_per_block = shape_.block_size / kPageTokens;
  for (int row = rows.begin; row < rows.end; ++row) {
    while (row >= ends[sequence]) ++sequence;
    const size_t table = size_t(layer.group) * step.num_sequences + sequence;
    const int position = step.positions[row], page = position / kPageTokens;
    const int block = step.block_tables[table * step.table_width + page / pages_per_block];
    for (int head = 0; head < shape_.kv_heads; ++head) {
      const size_t offset = row * stride + size_t(head) * shape_.head_dim;
      uint8_t* address = cache.page(block, layer.place, head, page % pages_per_block);
      store_token(shape_, address, position % kPageTokens, keys + offset, values + offset);
    }
  }
}

template <typename Element>
void Attention<Element>::attend(ThreadPool& pool, int member, const KvCache& cache,
                                const AttentionLayer& layer, const Step& step, const Element* queries,
                                size_t query_stride, Element* output, size_t output_stride) {
  const AttentionPlan& plan = plan_of(layer.window);
  const AttentionInput<Element> input{cache,   layer,        step,   plan,          group_size_,
                                      queries, query_stride, output, output_stride, parts_.as<float>()};
  workers_[member].attend(input, member);
  if (plan.splits().empty()) return;
  pool.barrier();
  workers_[member].merge_splits(input, member, int(workers_.size()));
}

template class Attention<float>;
template class Attention<bf16>;

}  // namespace ts
