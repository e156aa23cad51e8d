#include "api.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <sys/syscall.h>
#include <unistd.h>

#include "api_handles.h"
#include "memory.h"

namespace {

// A plain sum, so that each cache line is read once; it must not be known to be unused.
uint64_t sum(const uint64_t* values, size_t count) {
  uint64_t total = 0;
  for (size_t i = 0; i < count; ++i) total += values[i];
  return total;
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // namespace

int32_t ts_api_version(void) { return TS_API_VERSION; }

int32_t ts_start(void) {
#if defined(__AMX_BF16__)
  // Linux gives the tiles' registers only to processes that ask: Documentation/arch/x86/xstate.rst.
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return errno;
#endif
  return 0;
}

ts_pool* ts_pool_new(int32_t threads) {
  ts_pool* pool = new ts_pool{ts::ThreadPool(threads)};
  if (pool->threads.size() == threads) return pool;
  delete pool;
  return nullptr;
}

void ts_pool_free(ts_pool* pool) { delete pool; }

double ts_read_bandwidth(ts_pool* pool, size_t size) {
  constexpr int kPasses = 5;
  const size_t lines = size / 64;
  const int members = pool->threads.size();
  const ts::Memory memory(size);
  std::atomic<uint64_t> total{0};
  double best = 0;
  for (int pass = 0; pass <= kPasses; ++pass) {
    const auto begin = std::chrono::steady_clock::now();
    pool->threads.run([&](int member) {
      const size_t first = lines * member / members, last = lines * (member + 1) / members;
      uint64_t* mine = memory.as<uint64_t>() + first * 8;
      // Untouched memory is one page of zeros: each member writes to its part in the first pass.
      if (pass == 0) std::fill_n(mine, (last - first) * 8, uint64_t(member));
      total += sum(mine, (last - first) * 8);
    });
    if (pass > 0) best = std::max(best, double(lines * 64) / seconds_since(begin));
  }
  return best;
}
