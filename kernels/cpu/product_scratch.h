// What a thread needs for itself to multiply.
#pragma once

#include "memory.h"

namespace ts {

struct ProductScratch {
  Memory sums;     // of a tile: [rows][panels][16]
  Memory weights;  // a tile's panels, unpacked
  Memory rows;     // what a product makes of the activations
};

}  // namespace ts
