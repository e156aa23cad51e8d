// Passing on what a product has computed.
#pragma once

#include <algorithm>
#include <type_traits>

#include "lanes.h"
#include "matrix.h"
#include "thread_pool.h"

namespace ts {

// Work to be done a little at a time beside some other, whose own takes it.
class Meanwhile {
 public:
  virtual void step() = 0;

 protected:
  ~Meanwhile() = default;
};

// Whether an epilogue takes the outputs of two neighbouring panels at a time, too.
template <typename Epilogue>
constexpr bool takes_pairs = std::is_invocable_v<Epilogue&, int, int, Lanes, Lanes>;

// A tile's sums, [rows][stride] of 16 outputs, on their way to the epilogue.
template <typename Epilogue>
class Outputs final : public Meanwhile {
 public:
  // stride: panels.
  Outputs(int stride, Epilogue& epilogue) : stride_(size_t(stride) * kPanelRows), epilogue_(epilogue) {}

  // Begin with another tile. steps: how many to take for it.
  void begin(const float* sums, Span rows, Span panels, int steps) {
    sums_ = sums;
    rows_ = rows;
    panels_ = panels;
    rows_per_step_ = (rows.end - rows.begin + steps - 1) / steps;
  }

  void step() override { pass_on(std::min(rows_.begin + rows_per_step_, rows_.end)); }
  void finish() { pass_on(rows_.end); }

 private:
  void pass_on(int end) {
    for (; rows_.begin < end; ++rows_.begin, sums_ += stride_) {
      const float* outputs = sums_;
      int panel = panels_.begin;
      if constexpr (takes_pairs<Epilogue>) {
        for (; panel + 2 <= panels_.end; panel += 2, outputs += 2 * kPanelRows)
          epilogue_(rows_.begin, panel, load(outputs), load(outputs + kPanelRows));
      }
      for (; panel < panels_.end; ++panel, outputs += kPanelRows)
        epilogue_(rows_.begin, panel, load(outputs));
    }
  }

  const size_t stride_;  // in floats
  Epilogue& epilogue_;
  const float* sums_ = nullptr;
  Span rows_ = {0, 0}, panels_ = {0, 0};  // still to be passed on
  int rows_per_step_ = 0;
};

}  // namespace ts
