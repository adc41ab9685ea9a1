#include "cpu/huge_pages.h"

#include <atomic>

#if defined(__linux__)
#include <chrono>
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

// Calls that read weights before pages of theirs are made. After many more it starts again: other weights may have come
// to the address, and a page that is large already costs nothing.
constexpr uint32_t calls_before = 2, calls_of_round = 1024;

// Pages are made in one twentieth of the time: where memory is scarce, or comes from a host, a page may cost
// milliseconds, and tokens wait for it.
constexpr int64_t pauses = 19;  // for each time that a page takes

int64_t now() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

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
  std::atomic<size_t> pages{0};  // tried
};

constexpr size_t places = 1 << 12, tries = 16;
Weights all_weights[places];

// By a hash of the address. Where all places are taken, the first is taken over.
Weights& weights_at(uintptr_t at) {
  const size_t first = (at >> 12) * 0x9e3779b97f4a7c15u >> 32;
  for (size_t i = 0; i < tries; ++i) {
    Weights& weights = all_weights[(first + i) % places];
    uintptr_t found = weights.data.load(std::memory_order_relaxed);
    if (found == at || (found == 0 && weights.data.compare_exchange_strong(found, at, std::memory_order_relaxed)) ||
        found == at) {
      return weights;
    }
  }
  Weights& weights = all_weights[first % places];
  weights.data.store(at, std::memory_order_relaxed);
  weights.calls.store(0, std::memory_order_relaxed);
  return weights;
}

std::atomic<int64_t> next_time = 0;

// Makes pages `tried`, .. of some for as long as their share of time allows. Fails where a page is not all mapped, lies
// in a file, or none is free: small pages stay then.
void make_pages(uintptr_t first, size_t count, std::atomic<size_t>& tried) {
  while (tried.load(std::memory_order_relaxed) < count) {
    const int64_t start = now();
    if (start < next_time.load(std::memory_order_relaxed)) {
      return;
    }
    const size_t i = tried.fetch_add(1, std::memory_order_relaxed);
    if (madvise(reinterpret_cast<void*>(first + i * page), page, collapse) == 0) {
      made.fetch_add(1, std::memory_order_relaxed);
    }
    const int64_t end = now();
    next_time.store(end + (end - start) * pauses, std::memory_order_relaxed);
  }
}

}  // namespace

void note_weights(const void* data, size_t bytes) {
  static const bool makes = allowed();
  if (!makes || bytes < least_bytes) {
    return;
  }
  const auto at = reinterpret_cast<uintptr_t>(data);
  Weights& weights = weights_at(at);
  if (weights.calls.fetch_add(1, std::memory_order_relaxed) % calls_of_round < calls_before) {
    weights.pages.store(0, std::memory_order_relaxed);
    return;
  }
  const uintptr_t first = at / page * page;
  make_pages(first, (at + bytes - first + page - 1) / page, weights.pages);
}

#else

void note_weights(const void*, size_t) {}

#endif

}  // namespace mittens::cpu
