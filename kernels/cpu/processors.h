// The processors that this process may use.
#pragma once

#include <vector>

namespace ts {

// Their numbers: first one of each core, then the cores' other hardware threads.
std::vector<int> usable_processors();

// The one that the calling thread runs on now; -1: unknown.
int current_processor();

// Keep the thread of that id (gettid) on one processor. A wish: false if the system does not allow it.
bool pin_thread(int thread_id, int processor);

}  // namespace ts
