#include "simulator/fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <stdexcept>

#if MITTENS_ADDRESS_SANITIZER
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#elif MITTENS_THREAD_SANITIZER
#include <sanitizer/tsan_interface.h>
#endif

#ifdef __APPLE__
#define MITTENS_SYMBOL "_mittens_switch"
#define MITTENS_HIDDEN ".private_extern " MITTENS_SYMBOL "\n"
#else
#define MITTENS_SYMBOL "mittens_switch"
#define MITTENS_HIDDEN ".hidden " MITTENS_SYMBOL "\n.type " MITTENS_SYMBOL ", %function\n"
#endif

// A context is a stack pointer; the registers that a call preserves lie above it, the address to go on at last.
#if defined(__x86_64__)
asm(".text\n.globl " MITTENS_SYMBOL "\n" MITTENS_HIDDEN MITTENS_SYMBOL R"(:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
constexpr size_t kSavedWords = 7;
constexpr size_t kEntryWord = 6;
#elif defined(__aarch64__)
asm(".text\n.globl " MITTENS_SYMBOL "\n" MITTENS_HIDDEN ".p2align 2\n" MITTENS_SYMBOL R"(:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
constexpr size_t kSavedWords = 20;
constexpr size_t kEntryWord = 11;
#else
#error "the simulator switches fibers on x86-64 and arm64"
#endif

namespace mittens::simulator {

Stacks::Stacks() {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* memory = mmap(nullptr, kCount * kBytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (memory == MAP_FAILED) {
    throw std::runtime_error("the simulator found no memory for its stacks");
  }
  begin_ = reinterpret_cast<uintptr_t>(memory);
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  for (size_t i = 0; i < kCount; ++i) {
    mprotect(reinterpret_cast<void*>(begin_ + i * kBytes), page, PROT_NONE);
  }
}

#if MITTENS_ADDRESS_SANITIZER

namespace {
Context* left = nullptr;  // the context that was running; one simulation runs at a time
}

void switch_context(Context& save, const Context& to, bool for_good) {
  left = &save;
  // Frees the fake stack of a fiber that is left for good: no place is given to keep it.
  __sanitizer_start_switch_fiber(for_good ? nullptr : &save.fake_stack, to.stack, to.bytes);
  mittens_switch(&save.stack_pointer, to.stack_pointer);
  __sanitizer_finish_switch_fiber(save.fake_stack, &left->stack, &left->bytes);
}

void entered_fiber() {
  __sanitizer_finish_switch_fiber(nullptr, &left->stack, &left->bytes);
}

#elif MITTENS_THREAD_SANITIZER

void switch_context(Context& save, const Context& to, bool) {
  save.fiber = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(to.fiber, 0);
  mittens_switch(&save.stack_pointer, to.stack_pointer);
}

void entered_fiber() {}

#endif

Context Stacks::prepare(size_t index, void (*entry)()) {
  // Tops at the same distance in every stack would all fall into the same few lines of the cache.
  const size_t colour = index % 61 * 128;
  auto* top = reinterpret_cast<uintptr_t*>(begin_ + (index + 1) * kBytes - colour);
  // One word to spare: after the return address is popped, x86-64's stack is to stand as a call leaves it, at 8 mod 16;
  // arm64's is to stay at a multiple of 16.
  uintptr_t* context = top - kSavedWords - kSavedWords % 2;
  for (size_t i = 0; i < kSavedWords; ++i) {
    context[i] = 0;
  }
  context[kEntryWord] = reinterpret_cast<uintptr_t>(entry);
  Context prepared{.stack_pointer = context};
#if MITTENS_ADDRESS_SANITIZER
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  prepared.stack = reinterpret_cast<void*>(begin_ + index * kBytes + page);
  prepared.bytes = kBytes - page;
  // The last fiber on this stack never returned: its frames are still marked.
  __asan_unpoison_memory_region(prepared.stack, prepared.bytes);
#elif MITTENS_THREAD_SANITIZER
  if (fibers_[index]) {
    __tsan_destroy_fiber(fibers_[index]);
  }
  prepared.fiber = fibers_[index] = __tsan_create_fiber(0);
#endif
  return prepared;
}

}  // namespace mittens::simulator
