#include "encoder_plan.h"

#include <algorithm>

namespace ts {

namespace {

// Enough for the packing of keys and values to be forgotten, few enough to share a long text among many threads.
constexpr int kQueries = 256;

}  // namespace

void EncoderPlan::make(const int32_t* starts, int num_texts, int num_heads) {
  tasks_.clear();
  ends_.clear();
  int64_t cost = 0;
  for (int text = 0; text < num_texts; ++text) {
    const Span rows = {starts[text], starts[text + 1]};
    for (int head = 0; head < num_heads; ++head) {
      for (int row = rows.begin; row < rows.end; row += kQueries) {
        const Span queries = {row, std::min(row + kQueries, rows.end)};
        tasks_.push_back({rows, head, queries});
        cost += int64_t(queries.end - queries.begin) * (rows.end - rows.begin);
        ends_.push_back(cost);
      }
    }
  }
}

Span EncoderPlan::share(int member, int size) const {
  const auto first_from = [&](int m) {
    const int64_t bound = ends_.empty() ? 0 : ends_.back() * m / size;
    return int(std::upper_bound(ends_.begin(), ends_.end(), bound) - ends_.begin());
  };
  return {first_from(member), first_from(member + 1)};
}

}  // namespace ts
