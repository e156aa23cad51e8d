// Threads that run one function together.
#pragma once

#include <pthread.h>

#include <atomic>
#include <type_traits>
#include <vector>

#include "event_count.h"

namespace ts {

// The caller's thread is member 0. The others wait for work by spinning for some microseconds, then sleep; if there
// are more members than processors they sleep at once, as spinning would take the late one's time.
//
// Owns its threads: they end with it. Members 1.. are each pinned to one of the processors that the process may
// use, if there are enough of them: left alone, Linux at times keeps two of them on one processor for many steps. The
// caller's thread is left as it is, since threads that it starts (torch's) would inherit its place; instead, the
// members move out of its way when a run begins.
class ThreadPool {
 public:
  // size: members, at least 1.
  explicit ThreadPool(int size);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  // Less than asked for if the system refused a thread.
  int size() const { return size_; }

  // Calls function(member) in every member at once; returns when all have returned. One call at a time.
  template <typename Function>
  void run(Function&& function) {
    using Plain = std::remove_reference_t<Function>;
    run_erased([](void* context, int member) { (*static_cast<Plain*>(context))(member); },
               const_cast<std::remove_const_t<Plain>*>(&function));
  }

  // To be called by every member within `run`: none goes on before all have come here. What a member wrote
  // before is seen by all after.
  void barrier() {
    if (size_ > 1) meet();
  }

 private:
  using Erased = void (*)(void* context, int member);

  struct Member {
    ThreadPool* pool;
    int index;
    pthread_t thread;
    int thread_id;  // as the kernel knows it
    int processor;  // -1: not pinned
  };

  void run_erased(Erased function, void* context);
  void meet();
  void start(int size);
  void pin(const std::vector<int>& processors);
  void make_way_for_caller();
  void work(Member& member);
  static void* enter(void* member);

  int size_ = 1;
  bool spins_ = false;           // before a thread sleeps
  int spare_ = -1;               // the processor that is the caller's if members are pinned
  std::vector<Member> members_;  // 1..
  Erased function_ = nullptr;    // null: time to leave
  void* context_ = nullptr;
  EventCount runs_;
  EventCount meetings_;
  alignas(64) std::atomic<int> arrived_{0};
};

// The part of [0, count) that a member of `size` does: contiguous, in order, as equal as can be.
struct Span {
  int begin, end;
};
inline Span share(int count, int member, int size) {
  return {int(int64_t(count) * member / size), int(int64_t(count) * (member + 1) / size)};
}

}  // namespace ts
