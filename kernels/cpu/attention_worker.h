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

// A thread's own memory, and the work on it. Workers lie side by side, and what one writes all the time must
// not share a cache line, or a pair of lines that are fetched together, with what its neighbour reads.
template <typename Element>
class alignas(128) AttentionWorker {
 public:
  using Products = typename ProductsOf<Element>::Type;
  using Value = typename Products::Value;

  AttentionWorker(const KvShape& shape, int group_size)
      : dim_(shape.padded_dim()), head_dim_(shape.head_dim), ahead_(shape.half_bytes()), operands_(shape) {
    const size_t rows = (std::max(kTaskRows, group_size) + kRowTile - 1) / kRowTile * kRowTile;
    queries_.reserve(rows * dim_ * sizeof(Value));
    state_.reserve(rows * Partial::row_floats(dim_) * sizeof(float));
    scores_.reserve(2 * kRowTile * kSegmentTokens * sizeof(float));
    probabilities_.reserve(2 * kRowTile * kSegmentTokens * sizeof(Value));
    partials_.reserve(2 * kRowTile * Partial::row_floats(dim_) * sizeof(float));
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
      put_rows(input, task, own, whole);
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
    if (!task.split) put_rows(input, task, {0, rows}, state);
  }

  // The products of one tile of rows go on while the probabilities of another are computed: values of the
  // tile before it, scores of the tile behind it.
  void attend_segment(const Input& input, const AttentionTask& task, int segment, const SegmentPages& pages,
                      const Partial& target, bool merges) {
    operands_.set(pages, keys_of(input, task).end - segment * kSegmentTokens);
    look_ahead(pages);
    const int rows = task.num_tokens * input.group_size;
    begin_tile(input, task, segment, 0, rows);
    take_steps(scores_left_);
    for (int row = 0, index = 0; row < rows; row += kRowTile, ++index) {
      if (row + kRowTile < rows) begin_tile(input, task, segment, index + 1, rows);
      compute_probabilities(index, input.layer.scale * kLog2E, place_of(index, task, target, merges));
      if (index > 0) finish_tile(index - 1, task, target, merges);
      begin_weighing(index, place_of(index, task, target, merges));
    }
    take_steps(weighed_left_);
    finish_tile((rows - 1) / kRowTile, task, target, merges);
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

  static void look(const Input& input, const AttentionTask& task, int segment, RowTile& tile) {
    const int begin = segment * kSegmentTokens;
    int token = tile.first_row / input.group_size, head = tile.first_row % input.group_size;
    Stretch all{kSegmentTokens, 0};
    for (int row = 0; row < tile.rows; ++row) {
      const Stretch keys = input.plan.visible(task.first_position + token);
      Stretch& own = tile.visible[row];
      own = {std::max(keys.begin - begin, 0), std::min(keys.end - begin, kSegmentTokens)};
      if (own.begin < own.end) all = {std::min(all.begin, own.begin), std::max(all.end, own.end)};
      if (++head == input.group_size) head = 0, ++token;
    }
    if (all.begin >= all.end) all = {0, 0};
    tile.pages = {all.begin / kPageTokens, (all.end + kPageTokens - 1) / kPageTokens};
    const int first = tile.pages.begin * kPageTokens;
    for (int row = 0; row < tile.rows; ++row) {
      if (tile.visible[row].begin >= tile.visible[row].end) tile.visible[row] = {first, first};
    }
  }

  float* scores_of(int index) const {
    return scores_.template as<float>() + size_t(index % 2) * kRowTile * kSegmentTokens;
  }
  Value* probabilities_of(int index) const {
    return probabilities_.template as<Value>() + size_t(index % 2) * kRowTile * kSegmentTokens;
  }

  // Where a tile's result is computed: in its place at once, if nothing is to be added to and there is room
  // for whole tiles of rows.
  Partial place_of(int index, const AttentionTask& task, const Partial& target, bool merges) const {
    if (!merges && !task.split) return target.from_row(index * kRowTile);
    const size_t floats = kRowTile * Partial::row_floats(dim_);
    return Partial::at(partials_.template as<float>() + size_t(index % 2) * floats, kRowTile, dim_);
  }

  void begin_tile(const Input& input, const AttentionTask& task, int segment, int index, int rows) {
    RowTile& tile = tiles_[index % 3];
    tile.first_row = index * kRowTile;
    tile.rows = std::min(kRowTile, rows - tile.first_row);
    look(input, task, segment, tile);
    const Value* queries = queries_.template as<Value>() + size_t(tile.first_row) * dim_;
    tile_scores_ = {{tile.rows, dim_, tile.pages}, queries, operands_.keys, scores_of(index)};
    scores_left_ = tile_scores_.steps();
  }

  void begin_weighing(int index, const Partial& place) {
    const RowTile& tile = tiles_[index % 3];
    weighed_ = {{tile.rows, dim_, tile.pages}, probabilities_of(index), operands_.values, place.values};
    weighed_left_ = weighed_.steps();
  }

  void take_steps(int count) {
    for (; count > 0 && weighed_left_ > 0; --count, --weighed_left_) weighed_.step(ahead_);
    for (; count > 0 && scores_left_ > 0; --count, --scores_left_) tile_scores_.step(ahead_);
  }

  void compute_probabilities(int index, float scale, const Partial& place) {
    operands_.key_scales() == nullptr ? compute_probabilities_of<false>(index, scale, place)
                                      : compute_probabilities_of<true>(index, scale, place);
  }

  // First the highest scores of all rows, then their probabilities: a row by itself is a chain of operations
  // that wait for each other, neighbouring rows are not.
  template <bool kScaled>
  void compute_probabilities_of(int index, float scale, const Partial& place) {
    const RowTile& tile = tiles_[index % 3];
    Value* probabilities = probabilities_of(index);
    const auto scores = [&](int row) {
      return ScoreRow<kScaled>{scores_of(index) + row * kSegmentTokens, scale, operands_.key_scales(),
                               operands_.value_scales(), tile.visible[row]};
    };
    for (int row = 0; row < tile.rows; ++row) place.highest[row] = highest_score(scores(row));
    for (int row = 0; row < tile.rows; ++row) {
      take_steps((weighed_left_ + scores_left_) / (tile.rows - row));
      place.sums[row] = store_probabilities(scores(row), tile.pages, place.highest[row],
                                            probabilities + row * kSegmentTokens);
    }
  }

  // Once its values are weighed.
  void finish_tile(int index, const AttentionTask& task, const Partial& target, bool merges) const {
    const RowTile& tile = tiles_[index % 3];
    const Partial own = target.from_row(tile.first_row), place = place_of(index, task, target, merges);
    if (tile.pages.begin >= tile.pages.end) {
      if (!merges) ts::clear(own, tile.rows);
    } else if (merges) {
      merge(own, place, tile.rows);
    } else if (task.split) {
      copy(own, place, tile.rows);
    }
  }

  static void copy(const Partial& target, const Partial& source, int rows) {
    std::copy_n(source.highest, rows, target.highest);
    std::copy_n(source.sums, rows, target.sums);
    std::copy_n(source.values, size_t(rows) * source.dim, target.values);
  }

  void copy_queries(const Input& input, const AttentionTask& task) {
    Value* out = queries_.template as<Value>();
    const size_t width = size_t(input.group_size) * head_dim_;
    for (int token = 0; token < task.num_tokens; ++token) {
      const Element* row =
          input.queries + (task.first_token + token) * input.query_stride + size_t(task.kv_head) * width;
      for (int head = 0; head < input.group_size; ++head, row += head_dim_, out += dim_) {
        copy_row(row, head_dim_, out);
        std::fill(out + head_dim_, out + dim_, Value());
      }
    }
  }

  template <typename To>
  static void copy_row(const Element* row, int size, To* out) {
    if constexpr (std::is_same_v<Element, To>) {
      std::copy_n(row, size, out);
    } else {
      convert_row(row, size, out);
    }
  }

  void put_rows(const Input& input, const AttentionTask& task, Span rows, const Partial& partial) const {
    int token = rows.begin / input.group_size, head = rows.begin % input.group_size;
    for (int row = rows.begin; row < rows.end; ++row) {
      Element* out = input.output + (task.first_token + token) * input.output_stride +
                     size_t(task.kv_head * input.group_size + head) * head_dim_;
      put_row(partial.from_row(row), out);
      if (++head == input.group_size) head = 0, ++token;
    }
  }

  void put_row(const Partial& partial, Element* out) const {
    const Lanes factor = broadcast(1.0f / *partial.sums);
    // To add zero makes one zero of two, whatever was added to a sum before it.
    int d = 0;
    for (; d + 16 <= head_dim_; d += 16) store_elements(out + d, load(partial.values + d) * factor + zero());
    if (d < head_dim_) store_elements(out + d, load(partial.values + d) * factor + zero(), head_dim_ - d);
  }

  static constexpr float kLog2E = 1.442695041f;

  int dim_, head_dim_;
  Ahead ahead_;
  SegmentOperands<Value> operands_;
  SegmentPages next_;  // the segment that comes next
  Memory queries_, state_;
  // Of the tile of rows that is worked on, the one before it and the one behind it, by index modulo 3 and 2.
  RowTile tiles_[3];
  Memory scores_, probabilities_, partials_;
  // What is still to be done beside the probabilities, in steps.
  typename Products::Scores tile_scores_;
  typename Products::Weighed weighed_;
  int scores_left_ = 0, weighed_left_ = 0;
};

}  // namespace ts
