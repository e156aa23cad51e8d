// Panels of any format as panels of floats or bf16.
#pragma once

#include "format.h"

namespace ts {

// Write a panel of `columns` columns (padded) as a panel of the format `form`, f32 or bf16. A weight is
// scale (q - 128), or scale q + minimum by one fma, in fp32, then rounded to nearest (ties to even).
//
// next: a panel of the same format that is brought into the caches meanwhile, or null.
void unpack_panel(Format format, const uint8_t* panel, int columns, Format form, uint8_t* out,
                  const uint8_t* next);

}  // namespace ts
