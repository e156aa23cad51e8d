// Who computes what of a step's attention.
//
// A task is some neighbouring query tokens of a sequence, all heads that share one kv head: rows, token by
// token, head by head. It walks the keys that its rows see in segments of kSegmentTokens, counted from
// position 0. All tasks' segments, one after the other, are cut into runs: as equal parts of the cost as can
// be, one part for each thread.
#pragma once

#include <cstddef>
#include <vector>

#include "kv_cache.h"
#include "step.h"

namespace ts {

constexpr int kSegmentTokens = 256;
constexpr int kSegmentPages = kSegmentTokens / kPageTokens;
// Rows that are multiplied together: those of a tile register.
constexpr int kRowTile = 16;
// Of a task, if a single token does not have more: few enough that their sums stay in the caches, many enough
// that the cost of bringing keys and values is shared by many.
constexpr int kTaskRows = 192;

// Positions [begin, end).
struct Stretch {
  int begin, end;
};

struct AttentionTask {
  int sequence, kv_head;
  int first_token, num_tokens;  // rows of the step
  int first_position;
  int first_segment, end_segment;  // that a row of it sees
  // If several threads share it: the first of them keeps a running result up to `first_run_end`, each later
  // segment has a result of its own. They lie at `parts`, in floats, of a memory that all see.
  bool split;
  int first_run_end;
  size_t parts;
};

// Segments [first_segment, end_segment) of a task, in one thread.
struct AttentionRun {
  int task;
  int first_segment, end_segment;
};

class AttentionPlan {
 public:
  // window: 0 for none. part_row: floats that a row of a result takes.
  void make(const Step& step, int window, int kv_heads, int group_size, int threads, size_t part_row);

  int window() const { return window_; }
  // The keys that the query at `position` sees.
  Stretch visible(int position) const {
    return {window_ > 0 && position >= window_ ? position - window_ + 1 : 0, position + 1};
  }

  const std::vector<AttentionTask>& tasks() const { return tasks_; }
  // In the order of a member's work.
  const AttentionRun* runs_begin(int member) const { return runs_.data() + first_run_[member]; }
  const AttentionRun* runs_end(int member) const { return runs_.data() + first_run_[member + 1]; }
  // Indices of tasks that several threads share.
  const std::vector<int>& splits() const { return splits_; }
  size_t part_floats() const { return part_floats_; }

 private:
  void add_tasks(const Step& step, int sequence, int kv_heads, int tokens_per_task);
  int64_t cost(const AttentionTask& task, int segment, int group_size) const;
  void share_out(int group_size, int threads);
  void place_parts(int group_size, size_t part_row);

  int window_ = 0;
  std::vector<AttentionTask> tasks_;
  std::vector<AttentionRun> runs_;
  std::vector<int> first_run_;  // [threads + 1]
  std::vector<int> splits_;
  size_t part_floats_ = 0;
};

}  // namespace ts
