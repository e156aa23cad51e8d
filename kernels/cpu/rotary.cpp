#include "rotary.h"

#include <algorithm>
#include <cmath>

namespace ts {

bool RotaryTable::has(const float* frequencies, int half) const {
  return half == this->half() && std::equal(frequencies_.begin(), frequencies_.end(), frequencies);
}

// The angle is a float, as it is in the models' definition: positions are far apart where it is large.
void RotaryTable::cover(int position) {
  while (int(steps_.size()) * kStep <= position) {
    const int first = int(steps_.size()) * kStep;
    std::unique_ptr<float[]> step(new float[size_t(kStep) * 2 * half()]);
    float* out = step.get();
    for (int i = 0; i < kStep; ++i) {
      for (float frequency : frequencies_) *out++ = std::cos(float(first + i) * frequency);
      for (float frequency : frequencies_) *out++ = std::sin(float(first + i) * frequency);
    }
    steps_.push_back(std::move(step));
  }
}

int RotaryTables::add(const float* frequencies, int half) {
  for (size_t i = 0; i < tables_.size(); ++i)
    if (tables_[i].has(frequencies, half)) return int(i);
  tables_.emplace_back(frequencies, half);
  return int(tables_.size()) - 1;
}

}  // namespace ts
