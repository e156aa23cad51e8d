// Rotary position embedding: a head's numbers i and i + D/2 turn as a pair, by position * frequency[i].
#pragma once

#include <memory>
#include <vector>

#include "element.h"

namespace ts {

// heads: [num_heads][head_dim], turned in place; cosines and sines: [head_dim / 2].
template <typename Element>
void rotate_heads(Element* heads, int num_heads, int head_dim, const float* cosines, const float* sines) {
  const int half = head_dim / 2;
  for (int head = 0; head < num_heads; ++head) {
    Element *first = heads + head * head_dim, *second = first + half;
    for (int i = 0; i < half; i += 16) {
      const int left = half - i;
      const Lanes a = load_elements(first + i, left), b = load_elements(second + i, left);
      const Lanes cosine = load_elements(cosines + i, left), sine = load_elements(sines + i, left);
      store_elements(first + i, a * cosine - b * sine, left);
      store_elements(second + i, b * cosine + a * sine, left);
    }
  }
}

// Cosines and sines of the positions that have been seen. `cover` is for one thread; then all may read.
class RotaryTable {
 public:
  // frequencies: [half], radians per token.
  RotaryTable(const float* frequencies, int half) : frequencies_(frequencies, frequencies + half) {}

  int half() const { return int(frequencies_.size()); }
  bool has(const float* frequencies, int half) const;

  // Have all positions up to this one.
  void cover(int position);

  // [half] each, of a covered position.
  const float* cosines(int position) const { return row(position); }
  const float* sines(int position) const { return row(position) + half(); }

 private:
  static constexpr int kStep = 256;

  const float* row(int position) const {
    return steps_[position / kStep].get() + size_t(position % kStep) * 2 * half();
  }

  std::vector<float> frequencies_;
  std::vector<std::unique_ptr<float[]>> steps_;  // each [kStep][2][half]: a position's cosines, its sines
};

// The tables of a model's layers: one for each set of frequencies.
class RotaryTables {
 public:
  // The index of the table of these frequencies, added if it is new.
  int add(const float* frequencies, int half);
  void cover(int position) {
    for (RotaryTable& table : tables_) table.cover(position);
  }
  const RotaryTable& operator[](int index) const { return tables_[index]; }

 private:
  std::vector<RotaryTable> tables_;
};

}  // namespace ts
