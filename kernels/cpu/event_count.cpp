#include "event_count.h"

#include <climits>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace ts {
namespace {

static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t), "the kernel looks at the plain number");

void futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, nullptr, nullptr, 0);
}

}  // namespace

// Each side writes its own word before it reads the other's, and these four accesses have one order for all: either
// the sleeper sees the new count, or this thread sees the sleeper. The kernel compares once more before it puts a
// thread to sleep.
void EventCount::advance() {
  count_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) > 0) futex(count_, FUTEX_WAKE_PRIVATE, INT_MAX);
}

// A pause takes 10 to 150 cycles, by the kind of processor, so that they are counted by the clock.
void EventCount::wait_past(uint32_t seen, std::chrono::microseconds spin) {
  constexpr int kLooks = 32;  // between two looks at the clock
  if (count() != seen) return;
  const auto begin = std::chrono::steady_clock::now();
  while (std::chrono::steady_clock::now() - begin < spin) {
    for (int look = 0; look < kLooks; ++look) {
      if (count() != seen) return;
      pause();
    }
  }
  sleep_past(seen);
}

void EventCount::sleep_past(uint32_t seen) {
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (count_.load(std::memory_order_seq_cst) == seen) futex(count_, FUTEX_WAIT_PRIVATE, seen);
  sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace ts
