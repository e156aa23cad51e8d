#include "testing_pool.h"

#include <sys/syscall.h>
#include <unistd.h>

#include "api_handles.h"
#include "processors.h"

int32_t ts_test_meetings(ts_pool* pool, int32_t rounds, int32_t* counters) {
  ts::ThreadPool& threads = pool->threads;
  std::atomic<int32_t> wrong{0};
  threads.run([&](int member) {
    for (int32_t round = 1; round <= rounds; ++round) {
      ++counters[member];
      threads.barrier();
      for (int other = 0; other < threads.size(); ++other) wrong += counters[other] != counters[member];
      threads.barrier();
    }
  });
  return wrong;
}

void ts_test_runs(ts_pool* pool, int32_t runs, int32_t* counters) {
  for (int32_t run = 0; run < runs; ++run) {
    pool->threads.run([&](int member) { ++counters[member]; });
  }
}

void ts_test_places(ts_pool* pool, int32_t* thread_ids, int32_t* processors) {
  pool->threads.run([&](int member) {
    thread_ids[member] = int32_t(syscall(SYS_gettid));
    processors[member] = ts::current_processor();
  });
}

void ts_test_multiply(ts_pool* pool, float x, float y, float* products) {
  pool->threads.run([&](int member) { products[member] = x * y; });
}
