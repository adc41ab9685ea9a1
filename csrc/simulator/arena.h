// The memory that kernels see: every buffer and every threadgroup array lies in the middle of a slot of 64 GiB of
// address space of its own, so that an index that runs out of one, a 32-bit one that wraps too, is never taken for
// another's.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "simulator/fiber.h"

namespace mittens::simulator {

class Arena {
 public:
  static constexpr size_t kSlots = 64;

  Arena();
  Arena(const Arena&) = delete;

  // Memory for `bytes` bytes in the slot, `offset` bytes past a page's start.
  char* place(size_t slot, size_t bytes, size_t offset = 0);
  // Gives back the memory of large launches.
  void trim();

  bool contains(uintptr_t address) const {
    return address - begin_ < kSlots << kSlotBits;
  }
  size_t slot_of(uintptr_t address) const {
    return (address - begin_) >> kSlotBits;
  }

 private:
#if MITTENS_THREAD_SANITIZER
  static constexpr unsigned kSlotBits = 32;  // its programs have little address space
#else
  static constexpr unsigned kSlotBits = 36;
#endif

  uintptr_t middle(size_t slot) const {
    return begin_ + (slot << kSlotBits) + (size_t{1} << (kSlotBits - 1));
  }

  uintptr_t begin_;
  size_t page_;
  std::array<size_t, kSlots> committed_{};
};

}  // namespace mittens::simulator
