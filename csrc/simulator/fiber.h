// Fibers: stacks that one thread switches between by hand.
#pragma once

#include <cstddef>
#include <cstdint>

// Sanitizers follow a thread's stack, and must be told where it moves.
#if defined(__SANITIZE_ADDRESS__)
#define MITTENS_ADDRESS_SANITIZER 1
#elif defined(__SANITIZE_THREAD__)
#define MITTENS_THREAD_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define MITTENS_ADDRESS_SANITIZER 1
#elif __has_feature(thread_sanitizer)
#define MITTENS_THREAD_SANITIZER 1
#endif
#endif

namespace mittens::simulator {

// Where a fiber, or the thread itself, goes on: its stack pointer, and the sanitizers' handle of its stack.
struct Context {
  void* stack_pointer = nullptr;
#if MITTENS_ADDRESS_SANITIZER
  const void* stack = nullptr;  // the lowest address
  size_t bytes = 0;
  void* fake_stack = nullptr;
#elif MITTENS_THREAD_SANITIZER
  void* fiber = nullptr;
#endif
};

// The stacks of all fibers, made as they are needed and kept; each has a page below it that may not be touched.
class Stacks {
 public:
  static constexpr size_t kCount = 1024;
  static constexpr size_t kBytes = 256 * 1024;

  Stacks();
  Stacks(const Stacks&) = delete;

  // A context on stack `index` in which `entry` starts when it is switched to. `entry` begins with entered_fiber() and
  // never returns.
  Context prepare(size_t index, void (*entry)());
  bool contains(uintptr_t address) const {
    return address - begin_ < kCount * kBytes;
  }

 private:
  uintptr_t begin_;
#if MITTENS_THREAD_SANITIZER
  void* fibers_[kCount] = {};
#endif
};

// Leaves the running context's stack pointer in `*save` and goes on at `to`.
extern "C" void mittens_switch(void** save, void* to);

#if MITTENS_ADDRESS_SANITIZER || MITTENS_THREAD_SANITIZER
void switch_context(Context& save, const Context& to, bool for_good = false);
void entered_fiber();
#else
// Leaves the running context in `save` and goes on with `to`; for good if nothing will switch back.
inline void switch_context(Context& save, const Context& to, bool for_good = false) {
  (void)for_good;
  mittens_switch(&save.stack_pointer, to.stack_pointer);
}
inline void entered_fiber() {}
#endif

}  // namespace mittens::simulator
