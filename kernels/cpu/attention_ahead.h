// Bringing the pages that come next closer, a few lines at a time.
#pragma once

#include "attention_plan.h"
#include "prefetch.h"

namespace ts {

// Halves of pages, in the order of their use. The products of the first tile of rows of a segment call
// `lines` as they go, at such a pace that they come to the end together. Into the second-level cache: a
// segment is larger than the first.
class Ahead {
 public:
  explicit Ahead(size_t half_bytes) : half_lines_((half_bytes + kCacheLine - 1) / kCacheLine) {}

  void clear() { half_ = count_ = line_ = 0; }
  void add(const uint8_t* half) { halves_[count_++] = half; }

  void lines(int count) {
    if (half_ == count_) return;
    const uint8_t* from = halves_[half_] + size_t(line_) * kCacheLine;
    for (int i = 0; i < count; ++i) __builtin_prefetch(from + i * kCacheLine, 0, 2);
    line_ += count;
    if (line_ >= half_lines_) {
      line_ = 0;
      ++half_;
    }
  }

 private:
  int half_lines_;
  int half_ = 0, count_ = 0, line_ = 0;
  const uint8_t* halves_[2 * kSegmentPages];
};

}  // namespace ts
