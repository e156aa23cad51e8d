// Panels of any format as panels of floats.
#pragma once

#include "format.h"

namespace ts {

// Write a panel of `columns` columns (padded) as a panel of f32. A weight is scale (q - 128), or
// scale q + minimum by one fma.
//
// next: a panel of the same format that is brought into the caches meanwhile, or null.
void unpack_panel(Format format, const uint8_t* panel, int columns, float* out, const uint8_t* next);

}  // namespace ts
