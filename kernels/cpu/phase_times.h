// Where a step's time goes.
#pragma once

#include <array>
#include <chrono>

#include "api.h"

namespace ts {

// Seconds by kind of phase (TS_TIME_...), as one thread sees them.
class PhaseTimes {
 public:
  // The phase that follows begins now.
  void begin() { last_ = Clock::now(); }

  // The phase that began at the last `begin` or `end` ends now, and the next begins.
  void end(int kind) {
    const Clock::time_point now = Clock::now();
    seconds_[kind] += std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

  // Since the last call.
  void take(double* seconds) {
    for (int kind = 0; kind < TS_NUM_TIMES; ++kind) seconds[kind] = seconds_[kind];
    seconds_ = {};
  }

 private:
  using Clock = std::chrono::steady_clock;
  Clock::time_point last_;
  std::array<double, TS_NUM_TIMES> seconds_{};
};

}  // namespace ts
