// What tests ask of packed matrices.
#pragma once

#include <stdint.h>

#include "api.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

// All panels as floats, as unpack.h makes them.
void ts_test_unpack(const ts_matrix*, float* out);
// The panels as they lie.
void ts_test_panels(const ts_matrix*, uint8_t* out);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
