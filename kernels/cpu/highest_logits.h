// The highest logit of each row, found while the logits are made.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "format.h"
#include "lanes.h"

namespace ts {

// What one thread has seen of some rows. Of equal logits the one with the lowest id counts.
class HighestLogits {
 public:
  void begin(int num_rows) { rows_.assign(num_rows, Row()); }

  // The logits of ids [id, id + count) of a row.
  void see(int row, int id, Lanes logits, int count) {
    Row& seen = rows_[row];
    // Infinities and NaN make it NaN, and it stays so.
    seen.probe = fma(logits, zero(), seen.probe);
    const Lanes among = count < kPanelRows ? select_below(count, logits, broadcast(kLowest)) : logits;
    if (!any_reaches(among, seen.value)) return;  // as a rule: the highest so far is soon found
    const float best = highest(among);
    if (best > seen.value || (best == seen.value && id < seen.id)) take(seen, id, among, best);
  }

  // The id of what several threads have seen of a row; -1 if a logit of it is not finite.
  static int32_t merged(const std::vector<HighestLogits>& threads, int row) {
    Row merged;
    for (const HighestLogits& thread : threads) {
      const Row& seen = thread.rows_[row];
      merged.probe = merged.probe + seen.probe;
      if (seen.value > merged.value || (seen.value == merged.value && seen.id < merged.id)) {
        merged.value = seen.value;
        merged.id = seen.id;
      }
    }
    return sum(merged.probe) == 0.0f ? merged.id : -1;
  }

 private:
  static constexpr float kLowest = -std::numeric_limits<float>::infinity();

  struct Row {
    Lanes probe = zero();
    float value = kLowest;
    int32_t id = std::numeric_limits<int32_t>::max();
  };

  static void take(Row& seen, int id, Lanes logits, float best) {
    float values[kPanelRows];
    store(values, logits);
    int place = 0;
    while (place < kPanelRows - 1 && values[place] != best) ++place;
    seen.value = best;
    seen.id = id + place;
  }

  std::vector<Row> rows_;
};

}  // namespace ts
