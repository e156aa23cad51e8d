// How a product is shared among threads.
#pragma once

#include <algorithm>

#include "thread_pool.h"

namespace ts {

struct Split {
  Span rows, panels;
};

// The part of [rows] x [panels] that a member of `size` computes. Threads share panels, so that each reads its own
// part of the weights; where there are so many threads that each would have only a few panels, groups of threads
// share the rows too, if there are enough of them: whole tiles of 32.
inline Split split(int rows, int panels, int member, int size) {
  constexpr int kFewPanels = 8, kFewRows = 64, kTile = 32;
  int row_groups = 1;
  while (size % (row_groups * 2) == 0 && panels < kFewPanels * (size / row_groups) && rows >= kFewRows * 2 * row_groups)
    row_groups *= 2;
  const int per_group = size / row_groups;
  const Span tiles = share((rows + kTile - 1) / kTile, member / per_group, row_groups);
  return {{std::min(tiles.begin * kTile, rows), std::min(tiles.end * kTile, rows)},
          share(panels, member % per_group, per_group)};
}

}  // namespace ts
