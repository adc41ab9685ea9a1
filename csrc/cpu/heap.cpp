#include "cpu/heap.h"

#include <atomic>

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace mittens::cpu {
namespace {

// Shorter prompts leave too little to be worth the faults of the next one.
constexpr size_t kLongPrompt = 128;

// By as many tokens mlx-lm's caches grow.
constexpr size_t kCacheStep = 256;

std::atomic<bool> has_grown = false;
std::atomic<uint64_t> times = 0;

}  // namespace

void give_back() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
  times.fetch_add(1, std::memory_order_relaxed);
}

void give_back_after_growth(size_t queries, size_t keys) {
  const bool moves_keys = queries == 1 && keys > kCacheStep && keys % kCacheStep == 1;
  if (queries >= kLongPrompt || moves_keys) {
    has_grown.store(true, std::memory_order_relaxed);
  } else if (queries == 1 && has_grown.load(std::memory_order_relaxed) &&
             has_grown.exchange(false, std::memory_order_relaxed)) {
    give_back();
  }
}

uint64_t times_given_back() {
  return times.load(std::memory_order_relaxed);
}

}  // namespace mittens::cpu
