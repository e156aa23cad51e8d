#include "processors.h"

#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <utility>

namespace ts {
namespace {

// -1 where the system does not say.
int topology(int processor, const char* what) {
  char path[96];
  std::snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/%s", processor, what);
  int value = -1;
  if (std::FILE* file = std::fopen(path, "re")) {
    if (std::fscanf(file, "%d", &value) != 1) value = -1;
    std::fclose(file);
  }
  return value;
}

using Core = std::pair<int, int>;  // package, core within it

Core core_of(int processor) {
  const int core = topology(processor, "core_id");
  if (core < 0) return {-1, processor};  // unknown: a core of its own
  return {topology(processor, "physical_package_id"), core};
}

}  // namespace

std::vector<int> usable_processors() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return {};
  std::map<Core, int> taken;
  std::vector<std::pair<int, int>> ranked;  // how many of its core come before it, processor
  for (int processor = 0; processor < CPU_SETSIZE; ++processor) {
    if (CPU_ISSET(processor, &set)) ranked.push_back({taken[core_of(processor)]++, processor});
  }
  std::sort(ranked.begin(), ranked.end());
  std::vector<int> processors;
  for (const auto& [rank, processor] : ranked) processors.push_back(processor);
  return processors;
}

int current_processor() { return sched_getcpu(); }

bool pin_thread(int thread_id, int processor) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(processor, &set);
  return sched_setaffinity(thread_id, sizeof set, &set) == 0;
}

}  // namespace ts
