#include "attention_plan.h"

#include <algorithm>

namespace ts {

namespace {

int keys_in_segment(Stretch keys, int segment) {
  const int begin = std::max(keys.begin, segment * kSegmentTokens);
  const int end = std::min(keys.end, (segment + 1) * kSegmentTokens);
  return std::max(0, end - begin);
}

}  // namespace

void AttentionPlan::make(const Step& step, int window, int kv_heads, int group_size, int threads,
                         size_t part_row) {
  window_ = window;
  tasks_.clear();
  const int tokens_per_task = std::max(1, kTaskRows / group_size);
  for (int sequence = 0; sequence < step.num_sequences; ++sequence) {
    add_tasks(step, sequence, kv_heads, tokens_per_task);
  }
  share_out(group_size, threads);
  place_parts(group_size, part_row);
}

void AttentionPlan::add_tasks(const Step& step, int sequence, int kv_heads, int tokens_per_task) {
  for (int kv_head = 0; kv_head < kv_heads; ++kv_head) {
    const int end = step.starts[sequence + 1];
    for (int token = step.starts[sequence]; token < end; token += tokens_per_task) {
      const int tokens = std::min(tokens_per_task, end - token);
      const int position = step.positions[token];
      const int first_segment = visible(position).begin / kSegmentTokens;
      const int end_segment = (position + tokens - 1) / kSegmentTokens + 1;
      tasks_.push_back({sequence, kv_head, token, tokens, position, first_segment, end_segment, false, 0, 0});
    }
  }
}

// In keys times tiles of rows, about. To bring a key and a value from memory takes as long as two tiles of
// rows do, and a segment by itself as long as some keys.
int64_t AttentionPlan::cost(const AttentionTask& task, int segment, int group_size) const {
  const int last_position = task.first_position + task.num_tokens - 1;
  const Stretch all{visible(task.first_position).begin, last_position + 1};
  const int seen = keys_in_segment(visible(task.first_position), segment) +
                   keys_in_segment(visible(last_position), segment);
  const int64_t tiles = (task.num_tokens * group_size + kRowTile - 1) / kRowTile;
  return keys_in_segment(all, segment) * 2 + tiles * (seen / 2 + 8) + 16;
}

// A segment is done by the member in whose part of the total cost its middle lies.
void AttentionPlan::share_out(int group_size, int threads) {
  int64_t total = 0;
  for (const AttentionTask& task : tasks_) {
    for (int s = task.first_segment; s < task.end_segment; ++s) total += cost(task, s, group_size);
  }
  runs_.clear();
  first_run_.assign(1, 0);
  int64_t before = 0;
  for (int index = 0; index < int(tasks_.size()); ++index) {
    const AttentionTask& task = tasks_[index];
    for (int s = task.first_segment; s < task.end_segment; ++s) {
      const int64_t own = cost(task, s, group_size);
      const int member = int((before + own / 2) * threads / total);
      before += own;
      while (int(first_run_.size()) <= member) first_run_.push_back(int(runs_.size()));
      const bool goes_on = int(runs_.size()) > first_run_.back() && runs_.back().task == index;
      if (goes_on) {
        runs_.back().end_segment = s + 1;
      } else {
        runs_.push_back({index, s, s + 1});
      }
    }
  }
  while (int(first_run_.size()) <= threads) first_run_.push_back(int(runs_.size()));
}

void AttentionPlan::place_parts(int group_size, size_t part_row) {
  splits_.clear();
  part_floats_ = 0;
  for (const AttentionRun& run : runs_) {
    AttentionTask& task = tasks_[run.task];
    if (run.first_segment != task.first_segment || run.end_segment == task.end_segment) continue;
    task.split = true;
    task.first_run_end = run.end_segment;
    task.parts = part_floats_;
    const size_t parts = 1 + task.end_segment - run.end_segment;
    part_floats_ += parts * task.num_tokens * group_size * part_row;
    splits_.push_back(run.task);
  }
}

}  // namespace ts
