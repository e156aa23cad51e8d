// Cutting rows and columns into parts.
#pragma once

#include "format.h"

namespace ts {

// Of `count`, cut into parts of at most `largest` as equal as can be: the size of the first.
inline int equal_part(int count, int largest) {
  const int parts = (count + largest - 1) / largest;
  return (count + parts - 1) / parts;
}

// The same for columns: a multiple of 32.
inline int part_of_columns(int columns, int largest) {
  return equal_part(columns / kColumnMultiple, largest / kColumnMultiple) * kColumnMultiple;
}

}  // namespace ts
