// Bringing memory closer before it is needed, a little at a time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ts {

constexpr size_t kCacheLine = 64;

// One stretch of memory, spread over a number of steps. A burst of prefetches would hold up the loads of the
// step that it is in.
class Prefetch {
 public:
  Prefetch() = default;
  // begin: may be anything if there are no bytes.
  Prefetch(const uint8_t* begin, size_t bytes, size_t steps)
      : next_(begin), end_(begin + bytes), per_step_((bytes / kCacheLine + steps) / steps * kCacheLine) {}

  void step() {
    const uint8_t* stop = next_ + per_step_ < end_ ? next_ + per_step_ : end_;
    for (; next_ < stop; next_ += kCacheLine) __builtin_prefetch(next_, 0, kLevel);
  }

 private:
  static constexpr int kLevel = 2;  // the second-level cache: a stretch is often as large as the first
  const uint8_t* next_ = nullptr;
  const uint8_t* end_ = nullptr;
  size_t per_step_ = 0;
};

}  // namespace ts
