// How an encoder's attention is cut into tasks, and how threads share them.
#pragma once

#include <cstdint>
#include <vector>

#include "thread_pool.h"

namespace ts {

// Some queries of a head of a text, against all of the text's keys.
struct EncoderTask {
  Span text;     // rows of the step
  int head;
  Span queries;  // rows of the step, in `text`
};

// Of texts laid end to end: text t has rows [starts[t], starts[t + 1]). A task's result does not depend on who does
// it, nor on how long it is.
class EncoderPlan {
 public:
  void make(const int32_t* starts, int num_texts, int num_heads);

  // Tasks of a member of `size`: contiguous, of about the same cost for each.
  Span share(int member, int size) const;
  const EncoderTask& operator[](int index) const { return tasks_[index]; }

 private:
  std::vector<EncoderTask> tasks_;
  std::vector<int64_t> ends_;  // [tasks] costs of all tasks up to each, in products of a query and a key
};

}  // namespace ts
