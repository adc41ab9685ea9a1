// Fibers: stacks that one thread switches between by hand.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mittens::simulator {

// The stacks of all fibers, made as they are needed and kept; each has a page below it that may not be touched.
class Stacks {
 public:
  static constexpr size_t kCount = 1024;
  static constexpr size_t kBytes = 256 * 1024;

  Stacks();
  Stacks(const Stacks&) = delete;

  // A context on stack `index` in which `entry` starts when it is switched to. `entry` never returns.
  void* prepare(size_t index, void (*entry)());
  bool contains(uintptr_t address) const {
    return address - begin_ < kCount * kBytes;
  }

 private:
  uintptr_t begin_;
};

// Leaves the running context in `*save` and goes on with `to`.
extern "C" void mittens_switch(void** save, void* to);

}  // namespace mittens::simulator
