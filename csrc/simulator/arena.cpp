#include "simulator/arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <new>
#include <stdexcept>

namespace mittens::simulator {

Arena::Arena() : page_(static_cast<size_t>(sysconf(_SC_PAGESIZE))) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* memory = mmap(nullptr, kSlots << kSlotBits, PROT_NONE, flags, -1, 0);
  if (memory == MAP_FAILED) {
    throw std::runtime_error(
        "the simulator needs 4 TiB of address space (not of memory), which this process may not have");
  }
  begin_ = reinterpret_cast<uintptr_t>(memory);
}

char* Arena::place(size_t slot, size_t bytes, size_t offset) {
  offset %= page_;
  const size_t needed = (bytes + offset + page_ - 1) / page_ * page_;
  auto* start = reinterpret_cast<char*>(middle(slot));
  if (needed > committed_[slot]) {
    if (needed >= size_t{1} << (kSlotBits - 1) || mprotect(start, needed, PROT_READ | PROT_WRITE) != 0) {
      throw std::bad_alloc();
    }
    committed_[slot] = needed;
  }
  return start + offset;
}

void Arena::trim() {
  constexpr size_t kept = 4 << 20;
  for (size_t slot = 0; slot < kSlots; ++slot) {
    if (committed_[slot] > kept) {
      void* start = reinterpret_cast<void*>(middle(slot));
      mmap(start, committed_[slot], PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
      committed_[slot] = 0;
    }
  }
}

}  // namespace mittens::simulator
