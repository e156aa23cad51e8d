#include "thread_pool.h"

#include <csignal>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "processors.h"
#include "running_state.h"

namespace ts {
namespace {

// Within a run the others come soon, and sleep costs tens of microseconds; between runs the processor is wanted for
// what comes in between.
constexpr std::chrono::microseconds kSpinAtBarrier{200}, kSpinForRun{100}, kSleepAtOnce{0};

// While it lives, threads that this one starts get no signals but those that a fault of their own raises: Python's
// handlers are for the threads that were there.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t blocked;
    sigfillset(&blocked);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP}) sigdelset(&blocked, fault);
    pthread_sigmask(SIG_BLOCK, &blocked, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

}  // namespace

ThreadPool::ThreadPool(int size) {
  if (size > 1) start(size);
}

ThreadPool::~ThreadPool() {
  function_ = nullptr;
  runs_.advance();
  for (Member& member : members_) pthread_join(member.thread, nullptr);
}

// Members exist before their threads look at them, and size_ is final when the first meeting begins: threads that
// have started wait for it.
void ThreadPool::start(int size) {
  const std::vector<int> processors = usable_processors();
  spins_ = processors.empty() || size <= int(processors.size());
  members_.resize(size - 1);
  {
    const SignalsBlocked blocked;
    for (Member& member : members_) {
      member = {this, size_, {}, 0, -1};
      if (pthread_create(&member.thread, nullptr, enter, &member) != 0) break;
      ++size_;
    }
  }
  members_.resize(size_ - 1);
  runs_.advance();
  meet();
  if (size_ <= int(processors.size())) pin(processors);
}

void ThreadPool::pin(const std::vector<int>& processors) {
  spare_ = processors[0];
  for (Member& member : members_) {
    if (pin_thread(member.thread_id, processors[member.index])) member.processor = processors[member.index];
  }
}

// A pinned member cannot run while the caller has its processor, and Linux would take its time to move the caller.
void ThreadPool::make_way_for_caller() {
  const int current = current_processor();
  if (current == spare_ || spare_ < 0) return;
  for (Member& member : members_) {
    if (member.processor != current) continue;
    if (pin_thread(member.thread_id, spare_)) std::swap(member.processor, spare_);
    return;
  }
}

void ThreadPool::run_erased(Erased function, void* context) {
  if (size_ > 1) {
    make_way_for_caller();
    function_ = function;
    context_ = context;
    runs_.advance();
  }
  {
    const RunningState state;
    function(context, 0);
  }
  barrier();
}

// The last to come opens the way for all: before that nobody can arrive for the meeting after.
void ThreadPool::meet() {
  const uint32_t seen = meetings_.count();
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    arrived_.store(0, std::memory_order_relaxed);
    meetings_.advance();
  } else {
    meetings_.wait_past(seen, spins_ ? kSpinAtBarrier : kSleepAtOnce);
  }
}

void* ThreadPool::enter(void* member) {
  Member& self = *static_cast<Member*>(member);
  self.pool->work(self);
  return nullptr;
}

void ThreadPool::work(Member& member) {
  member.thread_id = int(syscall(SYS_gettid));
  pthread_setname_np(pthread_self(), "trioserve-pool");
  uint32_t seen = 0;
  runs_.wait_past(seen++, kSleepAtOnce);  // all members are there
  meet();
  while (true) {
    runs_.wait_past(seen++, spins_ ? kSpinForRun : kSleepAtOnce);
    if (function_ == nullptr) return;
    {
      const RunningState state;
      function_(context_, member.index);
    }
    meet();
  }
}

}  // namespace ts
