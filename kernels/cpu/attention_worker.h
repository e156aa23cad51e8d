// What one thread does of a layer's attention.
#pragma once

#include "attention.h"
#include "attention_pages.h"
#include "attention_partial.h"
#include "attention_products.h"
#include "attention_softmax.h"
#include "attention_tiles.h"

namespace ts {

// The type in which an element's queries and probabilities are multiplied, and by what.
template <typename Element>
struct ProductsOf {
  using Type = LaneProducts<FloatSteps>;
};
#if defined(__AMX_BF16__)
template <>
struct ProductsOf<bf16> {
  using Type = TileProducts;
};
#elif defined(__AVX512BF16__)
template <>
struct ProductsOf<bf16> {
  using Type = LaneProducts<Bf16Steps>;
};
#endif

// What a layer's attention is given, the same for all threads.
template <typename Element>
struct AttentionInput {
  KvCache cache;
  AttentionLayer layer;
  const Step& step;
  const AttentionPlan& plan;
  int group_size;
  const Element* queries;
  size_t query_stride;
  Element* output;
  size_t output_stride;
  float* parts;  // of tasks that are split: AttentionTask::parts
};

// A thread's own memory, and the work on it.
template <typename Element>
class AttentionWorker {
 public:
  using Products = typename ProductsOf<Element>::Type;
  using Value = typename Products::Value;

  AttentionWorker(const KvShape& shape, int group_size)
      : dim_(shape.padded_dim()), head_dim_(shape.head_dim), ahead_(shape.half_bytes()), operands_(shape) {
    const size_t rows = (std::max(kTaskRows, group_size) + kRowTile - 1) / kRowTile * kRowTile;
    queries_.reserve(rows * dim_ * sizeof(Value));
    state_.reserve(rows * Partial::row_floats(dim_) * sizeof(float));
    scores_.reserve(kRowTile * kSegmentTokens * sizeof(float));
    probabilities_.reserve(kRowTile * kSegmentTokens * sizeof(Value));
    partial_.reserve(kRowTile * Partial::row_floats(dim_) * sizeof(float));
  }

  // The runs of `member`; outputs of tasks that are not split.
  void attend(const AttentionInput<Element>& input, int member) {
    const AttentionRun* end = input.plan.runs_end(member);
    const AttentionRun* run = input.plan.runs_begin(member);
    if (run == end) return;
    next_ = pages_of(input, *run, run->first_segment);
    for (; run != end; ++run) attend_run(input, *run, run + 1 == end ? nullptr : run + 1);
    Products::end();
  }

  // This member's share of the rows of split tasks, once all members have attended.
  void merge_splits(const AttentionInput<Element>& input, int member, int members) const {
    for (int index : input.plan.splits()) {
      const AttentionTask& task = input.plan.tasks()[index];
      const int rows = task.num_tokens * input.group_size;
      const Span own = share(rows, member, members);
      const Partial whole = part(input, task, 0);
      for (int p = 1; p <= task.end_segment - task.first_run_end; ++p) {
        merge(whole.from_row(own.begin), part(input, task, p).from_row(own.begin), own.end - own.begin);
      }
      for (int row = own.begin; row < own.end; ++row) put_row(input, task, row, whole);
    }
  }

 private:
  using Input = AttentionInput<Element>;

  Partial part(const Input& input, const AttentionTask& task, int index) const {
    const int rows = task.num_tokens * input.group_size;
    return Partial::at(input.parts + task.parts + index * rows * Partial::row_floats(dim_), rows, dim_);
  }

  SegmentPages pages_of(const Input& input, const AttentionRun& run, int segment) const {
    const AttentionTask& task = input.plan.tasks()[run.task];
    const Step& step = input.step;
    const int32_t* tables =
        step.block_tables + size_t(input.layer.group) * step.num_sequences * step.table_width;
    return find_pages(input.cache, input.layer.place, task.kv_head,
                      tables + size_t(task.sequence) * step.table_width, segment, keys_of(input, task));
  }

  // All keys that a row of the task sees.
  static Stretch keys_of(const Input& input, const AttentionTask& task) {
    return {input.plan.visible(task.first_position).begin, task.first_position + task.num_tokens};
  }

  void attend_run(const Input& input, const AttentionRun& run, const AttentionRun* following) {
    const AttentionTask& task = input.plan.tasks()[run.task];
    const int rows = task.num_tokens * input.group_size;
    const bool has_first = run.first_segment == task.first_segment;
    const Partial state =
        task.split && has_first ? part(input, task, 0) : Partial::at(state_.template as<float>(), rows, dim_);
    copy_queries(input, task);
    Products::begin(std::min(rows, kRowTile));
    for (int segment = run.first_segment; segment < run.end_segment; ++segment) {
      const SegmentPages pages = next_;
      if (segment + 1 < run.end_segment) {
        next_ = pages_of(input, run, segment + 1);
      } else if (following != nullptr) {
        next_ = pages_of(input, *following, following->first_segment);
      } else {
        next_.pages.end = next_.pages.begin;
      }
      const bool merges = has_first && segment > run.first_segment;
      const Partial target = has_first ? state : part(input, task, 1 + segment - task.first_run_end);
      attend_segment(input, task, segment, pages, target, merges);
    }
    if (!task.split) {
      for (int row = 0; row < rows; ++row) put_row(input, task, row, state);
    }
  }

  void attend_segment(const Input& input, const AttentionTask& task, int segment, const SegmentPages& pages,
                      const Partial& target, bool merges) {
    operands_.set(pages, keys_of(input, task).end - segment * kSegmentTokens);
    look_ahead(pages);
    const int rows = task.num_tokens * input.group_size;
    const Partial partial = Partial::at(partial_.template as<float>(), kRowTile, dim_);
    for (int row = 0; row < rows; row += kRowTile) {
      const RowTile tile = look(input, task, segment, row, std::min(kRowTile, rows - row));
      const Partial own = target.from_row(row);
      if (tile.pages.begin < tile.pages.end) {
        attend_tile(tile, input.layer.scale * kLog2E, partial);
        merges ? merge(own, partial, tile.rows) : copy(own, partial, tile.rows);
      } else if (!merges) {
        ts::clear(own, tile.rows);
      }
    }
  }

  // What is to be brought closer while the segment's first tile of rows is worked on.
  void look_ahead(const SegmentPages& pages) {
    const size_t half_bytes = operands_.half_bytes();
    ahead_.clear();
    if (!operands_.unpacked()) {
      for (int page = pages.pages.begin; page < pages.pages.end; ++page)
        ahead_.add(pages.addresses[page] + half_bytes);
    }
    for (int page = next_.pages.begin; page < next_.pages.end; ++page) {
      ahead_.add(next_.addresses[page]);
      if (operands_.unpacked()) ahead_.add(next_.addresses[page] + half_bytes);
    }
  }

  // Neighbouring rows of a task against a segment.
  struct RowTile {
    int first_row, rows;
    Stretch pages;              // that any of them sees; none: empty
    Stretch visible[kRowTile];  // tokens of the segment, by row; none: an empty stretch at the first page
  };

  static RowTile look(const Input& input, const AttentionTask& task, int segment, int first_row, int rows) {
    RowTile tile{first_row, rows, {}, {}};
    const int begin = segment * kSegmentTokens;
    Stretch all{kSegmentTokens, 0};
    for (int row = 0; row < rows; ++row) {
      const int position = task.first_position + (first_row + row) / input.group_size;
      const Stretch keys = input.plan.visible(position);
      Stretch& own = tile.visible[row];
      own = {std::max(keys.begin - begin, 0), std::min(keys.end - begin, kSegmentTokens)};
      if (own.begin < own.end) all = {std::min(all.begin, own.begin), std::max(all.end, own.end)};
    }
    tile.pages = {all.begin / kPageTokens, (all.end + kPageTokens - 1) / kPageTokens};
    const int first = tile.pages.begin * kPageTokens;
    for (int row = 0; row < rows; ++row) {
      if (tile.visible[row].begin >= tile.visible[row].end) tile.visible[row] = {first, first};
    }
    return tile;
  }

  void attend_tile(const RowTile& tile, float scale, const Partial& partial) {
    const ProductSizes sizes{tile.rows, dim_, tile.pages};
    float* scores = scores_.template as<float>();
    Value* probabilities = probabilities_.template as<Value>();
    const Value* queries = queries_.template as<Value>() + size_t(tile.first_row) * dim_;
    Products::scores(sizes, queries, operands_.keys, scores, ahead_);
    for (int row = 0; row < tile.rows; ++row) {
      const ScoreRow own{scores + row * kSegmentTokens, scale, operands_.key_scales(),
                         operands_.value_scales(), tile.visible[row]};
      const float highest = highest_score(own);
      partial.highest[row] = highest;
      partial.sums[row] = store_probabilities(own, tile.pages, highest, probabilities + row * kSegmentTokens);
    }
    Products::weigh(sizes, probabilities, operands_.values, partial.values, ahead_);
  }

  static void copy(const Partial& target, const Partial& source, int rows) {
    std::copy_n(source.highest, rows, target.highest);
    std::copy_n(source.sums, rows, target.sums);
    std::copy_n(source.values, size_t(rows) * source.dim, target.values);
  }

  void copy_queries(const Input& input, const AttentionTask& task) {
    Value* out = queries_.template as<Value>();
    for (int token = 0; token < task.num_tokens; ++token) {
      const Element* row = input.queries + (task.first_token + token) * input.query_stride +
                           size_t(task.kv_head) * input.group_size * head_dim_;
      for (int head = 0; head < input.group_size; ++head, row += head_dim_, out += dim_) {
        convert_row(row, head_dim_, out);
        std::fill(out + head_dim_, out + dim_, Value());
      }
    }
  }

  void put_row(const Input& input, const AttentionTask& task, int row, const Partial& partial) const {
    const int token = task.first_token + row / input.group_size;
    const int head = task.kv_head * input.group_size + row % input.group_size;
    Element* out = input.output + token * input.output_stride + size_t(head) * head_dim_;
    const Lanes factor = broadcast(1.0f / partial.sums[row]);
    const float* values = partial.values + size_t(row) * dim_;
    // To add zero makes one zero of two, whatever was added to a sum before it.
    for (int d = 0; d < head_dim_; d += 16) {
      store_elements(out + d, load(values + d) * factor + zero(), head_dim_ - d);
    }
  }

  static constexpr float kLog2E = 1.442695041f;

  int dim_, head_dim_;
  Ahead ahead_;
  SegmentOperands<Value> operands_;
  SegmentPages next_;  // the segment that comes next
  Memory queries_, state_, scores_, probabilities_, partial_;
};

}  // namespace ts
