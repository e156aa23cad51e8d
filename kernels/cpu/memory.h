// Memory that is read in long stretches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace ts {

// Zeroed memory of its own, aligned to 64 bytes, in huge pages where the system has them: a product that reads its
// weights from pages of 4 KiB takes six times longer. From 2 MiB on it is mapped by itself; smaller pieces share
// mappings, and a mapping is given back with its last piece. Moves, does not copy.
class Memory {
 public:
  Memory() = default;
  explicit Memory(size_t size);
  Memory(Memory&& other) noexcept;
  Memory& operator=(Memory&& other) noexcept;

  size_t size() const { return size_; }
  uint8_t* bytes() const { return data_.get(); }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_.get());
  }
  // Have at least `size` bytes; what was there before is lost if it grows.
  void reserve(size_t size);

 private:
  std::shared_ptr<uint8_t> data_;
  size_t size_ = 0;
};

}  // namespace ts
