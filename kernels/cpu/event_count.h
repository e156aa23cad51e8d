// What threads wait for: a counter to move on.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace ts {

// A pause within a loop that waits for another thread: tells the processor so.
inline void pause() {
#if defined(__SSE2__)
  __builtin_ia32_pause();
#endif
}

// A counter that threads wait for to move on. Whoever waits looks at it for a while, then sleeps in the kernel; to
// advance it costs a system call only if somebody sleeps.
class EventCount {
 public:
  uint32_t count() const { return count_.load(std::memory_order_acquire); }

  // What this thread wrote before is seen by those that waited.
  void advance();

  // Returns once count() is not `seen` any more. spin: how long to look before sleeping.
  void wait_past(uint32_t seen, std::chrono::microseconds spin);

 private:
  void sleep_past(uint32_t seen);

  alignas(64) std::atomic<uint32_t> count_{0};
  std::atomic<uint32_t> sleepers_{0};
};

}  // namespace ts
