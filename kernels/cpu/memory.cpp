#include "memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <mutex>
#include <utility>

namespace ts {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kHugePage = size_t(2) << 20;
constexpr size_t kSharedMapping = 4 * kHugePage;

constexpr size_t rounded_up(size_t size, size_t multiple) { return (size + multiple - 1) / multiple * multiple; }

// The address sanitizer sees no borders in mapped memory: a checked build takes all memory from the heap.
#if defined(__SANITIZE_ADDRESS__)
std::shared_ptr<uint8_t> take(size_t size) {
  void* data = nullptr;
  if (posix_memalign(&data, kAlignment, size) != 0) std::abort();
  std::memset(data, 0, size);
  return std::shared_ptr<uint8_t>(static_cast<uint8_t*>(data), std::free);
}
#else

// Mapped memory begins and ends at huge pages' borders: more is mapped than asked for, and what lies before and
// behind is given back at once.
std::shared_ptr<uint8_t> map(size_t size) {
  const size_t used = rounded_up(size, kHugePage);
  void* mapped = mmap(nullptr, used + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) std::abort();
  const uintptr_t begin = reinterpret_cast<uintptr_t>(mapped);
  const uintptr_t aligned = rounded_up(begin, kHugePage);
  uint8_t* data = reinterpret_cast<uint8_t*>(aligned);
  if (aligned > begin) munmap(mapped, aligned - begin);
  const size_t behind = begin + kHugePage - aligned;
  if (behind > 0) munmap(data + used, behind);
  madvise(data, used, MADV_HUGEPAGE);  // a wish: without huge pages all is as right, only slower
  return std::shared_ptr<uint8_t>(data, [used](uint8_t* mapping) { munmap(mapping, used); });
}

// The next bytes of the mapping that small pieces come from at the moment; none is ever handed out twice.
std::shared_ptr<uint8_t> take_shared(size_t size) {
  static std::mutex mutex;
  static std::shared_ptr<uint8_t> mapping;
  static size_t used = kSharedMapping;
  const std::lock_guard<std::mutex> lock(mutex);
  if (size > kSharedMapping - used) {
    mapping = map(kSharedMapping);
    used = 0;
  }
  const size_t begin = std::exchange(used, rounded_up(used + size, kAlignment));
  return std::shared_ptr<uint8_t>(mapping, mapping.get() + begin);
}

std::shared_ptr<uint8_t> take(size_t size) { return size >= kHugePage ? map(size) : take_shared(size); }

#endif

}  // namespace

Memory::Memory(size_t size) : size_(size) {
  if (size > 0) data_ = take(size);
}

Memory::Memory(Memory&& other) noexcept : data_(std::move(other.data_)), size_(std::exchange(other.size_, 0)) {}

Memory& Memory::operator=(Memory&& other) noexcept {
  data_ = std::move(other.data_);
  size_ = std::exchange(other.size_, 0);
  return *this;
}

void Memory::reserve(size_t size) {
  if (size > size_) *this = Memory(size);
}

}  // namespace ts
