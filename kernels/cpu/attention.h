// Causal grouped-query attention over the paged cache, for prefill and decode alike.
#pragma once

#include <vector>

#include "attention_plan.h"
#include "kv_cache.h"
#include "step.h"
#include "thread_pool.h"

namespace ts {

// One layer's attention.
struct AttentionLayer {
  int place;    // within its group's blocks
  int group;    // whose block table it uses
  int window;   // tokens that it sees, the newest included; 0: all
  float scale;  // of query times key
};

template <typename Element>
class AttentionWorker;

// Shares the work of a step among threads, and does it.
//
// Keys are walked in segments of kSegmentTokens from position 0: each segment's softmax is its own, and
// segments are merged in order. So the result of a row depends neither on the rows beside it nor on who does
// what: a long sequence may be split over threads at segments.
//
// Within a segment: all scores, the highest of them, all probabilities, and then the sum of values, so that
// nothing that was summed is scaled again. Unseen keys have a probability of exactly 0, and what lies in
// their place is never looked at: it may be anything, even NaN.
//
// Element: float or bf16, of queries and outputs. Queries: [T][query_stride], head h at h * head_dim;
// rotated.
template <typename Element>
class Attention {
 public:
  Attention(const KvShape& shape, int num_heads, int threads);
  ~Attention();

  // Once per step, in one thread: what does not depend on the layer's weights.
  void plan(const Step& step, const AttentionLayer* layers, int num_layers);

  // Keys and values of rows `rows` into the cache; [T][stride], head h at h * head_dim.
  void store(const KvCache& cache, const AttentionLayer& layer, const Step& step, Span rows,
             const Element* keys, const Element* values, size_t stride);

  // In every member of the pool, after a barrier behind `store`: meets at the pool's barrier inside where
  // segments are merged. Writes output rows, [T][output_stride], head h at h * head_dim; the caller puts a
  // barrier behind it.
  void attend(ThreadPool& pool, int member, const KvCache& cache, const AttentionLayer& layer,
              const Step& step, const Element* queries, size_t query_stride, Element* output,
              size_t output_stride);

 private:
  const AttentionPlan& plan_of(int window) const;

  KvShape shape_;
  int group_size_;     // query heads of a kv head
  int num_plans_ = 0;  // one for each window among the layers
  std::vector<AttentionPlan> plans_;
  std::vector<AttentionWorker<Element>> workers_;  // one for each member
  Memory parts_;
};

}  // namespace ts
