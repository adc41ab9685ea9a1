#include "cpu/huge_pages.h"

#include <algorithm>
#include <atomic>

#if defined(__linux__)
#include <fstream>
#include <string>

#include <sys/mman.h>
#endif

namespace mittens::cpu {
namespace {

std::atomic<uint64_t> made = 0;

}  // namespace

uint64_t huge_pages_made() {
  return made.load(std::memory_order_relaxed);
}

#if defined(__linux__)

namespace {

constexpr size_t page = size_t{2} << 20;
constexpr int collapse = 25;  // MADV_COLLAPSE, from Linux 6.1 on; not in every C library's headers

// Smaller weights share a page with others, which make it.
constexpr size_t least_bytes = size_t{256} << 10;

// Calls that read weights before their pages are made, and calls that then share the making. After a round it starts
// again: other weights may have come to the address, and a page that is large already costs nothing.
constexpr uint32_t calls_before = 2, calls_of_making = 32, calls_of_round = 1024;

bool allowed() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string modes;
  std::getline(file, modes);
  // Of no length, an advice that is known succeeds.
  return !modes.empty() && modes.find("[never]") == std::string::npos && madvise(nullptr, 0, collapse) == 0;
}

struct Weights {
  std::atomic<uintptr_t> data{0};
  std::atomic<uint32_t> calls{0};
};

constexpr size_t places = 1 << 12, tries = 16;
Weights all_weights[places];

// By a hash of the address. Where all places are taken, the first is taken over.
Weights& weights_at(uintptr_t at) {
  const size_t first = (at >> 12) * 0x9e3779b97f4a7c15u >> 32;
  for (size_t i = 0; i < tries; ++i) {
    Weights& weights = all_weights[(first + i) % places];
    uintptr_t found = 0;
    if (weights.data.compare_exchange_strong(found, at, std::memory_order_relaxed) || found == at) {
      return weights;
    }
  }
  Weights& weights = all_weights[first % places];
  weights.data.store(at, std::memory_order_relaxed);
  weights.calls.store(0, std::memory_order_relaxed);
  return weights;
}

// Fails where the range is not all mapped, lies in a file, or no page is free: small pages stay then.
void make_pages(uintptr_t begin, uintptr_t end) {
  for (; begin < end; begin += page) {
    if (madvise(reinterpret_cast<void*>(begin), page, collapse) == 0) {
      made.fetch_add(1, std::memory_order_relaxed);
    }
  }
}

}  // namespace

void note_weights(const void* data, size_t bytes) {
  if (bytes < least_bytes) {
    return;
  }
  const auto at = reinterpret_cast<uintptr_t>(data);
  const uint32_t call = weights_at(at).calls.fetch_add(1, std::memory_order_relaxed) % calls_of_round;
  static const bool makes = allowed();
  if (!makes || call < calls_before || call >= calls_before + calls_of_making) {
    return;
  }
  const uintptr_t first = at / page * page;
  const size_t pages = (at + bytes - first + page - 1) / page;
  const size_t part = call - calls_before;
  make_pages(first + pages * part / calls_of_making * page, first + pages * (part + 1) / calls_of_making * page);
}

#else

void note_weights(const void*, size_t) {}

#endif

}  // namespace mittens::cpu
