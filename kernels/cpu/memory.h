// Memory that is read in long stretches.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ts {

// Zeroed memory of its own, aligned to 64 bytes; from 2 MiB on it is mapped, aligned to 2 MiB and in huge pages
// where the system has them. Moves, does not copy; given back with the object.
class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t size);
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&& other) noexcept;
  ~Memory();

  size_t size() const { return size_; }
  uint8_t* bytes() const { return data_; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  // Have at least `size` bytes; what was there before is lost if it grows.
  void reserve(size_t size);

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace ts
