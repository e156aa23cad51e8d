// What tests ask of a thread pool.
#pragma once

#include <stdint.h>

#include "api.h"

#ifdef __cplusplus
extern "C" {
#endif
#pragma GCC visibility push(default)

// In each round every member counts on and meets the others: `counters` [members] then are all the same. Returns how
// often a member saw another's count that was not.
int32_t ts_test_meetings(ts_pool*, int32_t rounds, int32_t* counters);

// `runs` runs that do nothing but count: counters [members].
void ts_test_runs(ts_pool*, int32_t runs, int32_t* counters);

// Where each member ran: thread_ids [members] (gettid), and processors [members].
void ts_test_places(ts_pool*, int32_t* thread_ids, int32_t* processors);

// x * y, multiplied in each member: products [members].
void ts_test_multiply(ts_pool*, float x, float y, float* products);

#pragma GCC visibility pop
#ifdef __cplusplus
}
#endif
