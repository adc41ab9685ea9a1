// Orders memory accesses, and finds races between accesses without an order.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>

#include "simulator/runtime.h"
#include "simulator/texts.h"
#include "simulator/memory_watcher.h"

namespace mittens::simulator {

namespace {

// Values of Stamp::who that mean a group: lanes of one simdgroup, threads of several, threads of several threadgroups.
constexpr unsigned kSimdgroup = 1024;
constexpr unsigned kSeveral = 2044;
constexpr unsigned kSeveralThreadgroups = 2045;
constexpr uint32_t kLastSimdEpoch = (1u << 20) - 1;  // as Stamp's bits have room for

// Whether all that the stamp names are lanes of this simdgroup.
bool of_simdgroup(const Stamp& stamp, unsigned simdgroup) {
  return stamp.who < kSimdgroup ? stamp.who / abi::simd_width == simdgroup : stamp.who == kSimdgroup + simdgroup;
}

std::mutex notes_mutex;
std::set<std::string> notes;
std::atomic<bool> equal_writes_are_faults = false;
}  // namespace

void fault_on_equal_writes(bool fault) {
  equal_writes_are_faults = fault;
}

std::vector<std::string> take_notes() {
  const std::lock_guard lock(notes_mutex);
  std::vector<std::string> taken(notes.begin(), notes.end());
  notes.clear();
  return taken;
}

void MemoryWatcher::barrier(abi::Scope scope, unsigned simdgroup, unsigned memory) {
  for (unsigned i = 0; i < 2; ++i) {
    if (!(memory & (i == 0 ? abi::device_memory : abi::threadgroup_memory))) {
      continue;
    }
    Clock& clock = clocks_[i];
    if (scope == abi::threadgroup_scope) {
      ++clock.epoch;
      std::fill(std::begin(clock.simd_epochs), std::end(clock.simd_epochs), 0);
    } else {
      clock.simd_epochs[simdgroup] = std::min(clock.simd_epochs[simdgroup] + 1, kLastSimdEpoch);
    }
  }
}

void MemoryWatcher::postpone(const Region& region, size_t offset, const Access& access, const Stamp& other) {
  const size_t bytes = std::min<size_t>(size_t{1} << region.granule_bits, region.bytes - offset);
  Postponed store{&region, offset, bytes, access, other, {}};
  std::memcpy(store.before, reinterpret_cast<const void*>(region.begin + offset), bytes);
  postponed_.push_back(store);
}

// Compares the memory with its state before the postponed stores.
void MemoryWatcher::compare() {
  const std::vector<Postponed> stores = std::move(postponed_);
  postponed_.clear();
  for (const Postponed& store : stores) {
    const Region& region = *store.region;
    if (std::memcmp(store.before, reinterpret_cast<const void*>(region.begin + store.offset), store.bytes) != 0) {
      race(region, store.offset, store.access, store.other, "written");
    }
    if (noted_.emplace(&region, store.access.caller).second) {
      const char* kind = region.space == Region::device ? "buffer \"" : "threadgroup array \"";
      const std::lock_guard lock(notes_mutex);
      notes.insert("[" + launch_.kernel_name() + "] several threads write one value" + where(store.access.caller) +
                   " to " + kind + region.name + "\" with no barrier between: one of them would do");
    }
  }
}

void MemoryWatcher::refine(Region& region, unsigned granule_bits) {
  const unsigned times = 1u << (region.granule_bits - granule_bits);
  std::vector<Cell> finer;
  finer.reserve(region.cells.size() * times);
  for (const Cell& cell : region.cells) {
    finer.insert(finer.end(), times, cell);
  }
  finer.resize(((region.bytes - 1) >> granule_bits) + 1);
  region.cells = std::move(finer);
  region.granule_bits = granule_bits;
}

void MemoryWatcher::check_cells(Region& region, size_t offset, const Access& access) {
  while (region.granule_bits > 0 && ((offset | access.bytes) & ((size_t{1} << region.granule_bits) - 1))) {
    refine(region, region.granule_bits - 1);
  }
  const size_t last = (offset + access.bytes - 1) >> region.granule_bits;
  for (size_t i = offset >> region.granule_bits; i <= last; ++i) {
    const size_t at = i << region.granule_bits;
    if (access.reads) {
      on_load(region, region.cells[i], at, access);
    }
    if (access.writes) {
      on_store(region, region.cells[i], at, access);
    }
  }
}

Stamp MemoryWatcher::stamp(unsigned who, const Clock& clock, const abi::Thread& thread, const Access& access) const {
  return {clock.epoch, who, access.kind == kAtomic, clock.simd_epochs[thread.simdgroup],
          static_cast<uint32_t>(reinterpret_cast<uintptr_t>(access.caller) - library_.base())};
}

// This thread together with the threads of an earlier access that is unordered with its own.
unsigned MemoryWatcher::together(const Stamp& earlier, const Clock& clock, const abi::Thread& thread) {
  if (earlier.epoch < clock.threadgroup_start || earlier.who == kSeveralThreadgroups) {
    return kSeveralThreadgroups;
  }
  return of_simdgroup(earlier, thread.simdgroup) ? kSimdgroup + thread.simdgroup : kSeveral;
}

// Whether the stamped access is ordered before this thread's next one.
bool MemoryWatcher::in_order(const Stamp& earlier, const Region& region, const Clock& clock,
                             const abi::Thread& thread) const {
  if (earlier.epoch < clock.threadgroup_start) {
    return region.space == Region::threadgroup;
  }
  if (earlier.who == kSeveralThreadgroups) {
    return false;
  }
  if (earlier.epoch < clock.epoch || earlier.who == thread.index) {
    return true;
  }
  return of_simdgroup(earlier, thread.simdgroup) && earlier.simd_epoch < clock.simd_epochs[thread.simdgroup];
}

void MemoryWatcher::on_load(Region& region, Cell& cell, size_t offset, const Access& access) {
  const Clock& clock = clock_of(region);
  const abi::Thread& thread = *runtime()->thread;
  const Stamp& write = cell.write;
  const bool stale = region.space == Region::threadgroup && write.epoch < clock.threadgroup_start;
  if (write.epoch == 0 || stale) {
    if (!region.initialised) {
      fail_at(region, offset, access, ", which nothing has written: uninitialised");
    }
  } else if (!in_order(write, region, clock, thread) && !(access.kind == kAtomic && write.atomic)) {
    race(region, offset, access, write, "written");
  }
  if (access.writes) {
    return;
  }
  on_read(access.kind == kAtomic ? cell.atomic_read : cell.read, region, access);
}

// Keeps only the latest of ordered reads: whatever is ordered after it is ordered after the earlier ones.
void MemoryWatcher::on_read(Stamp& read, const Region& region, const Access& access) {
  const Clock& clock = clock_of(region);
  const abi::Thread& thread = *runtime()->thread;
  const bool apart = read.epoch != 0 && !in_order(read, region, clock, thread);
  read = stamp(apart ? together(read, clock, thread) : thread.index, clock, thread, access);
}

void MemoryWatcher::on_store(Region& region, Cell& cell, size_t offset, const Access& access) {
  const Clock& clock = clock_of(region);
  const abi::Thread& thread = *runtime()->thread;
  unsigned who = thread.index;
  const bool apart = cell.write.epoch != 0 && !in_order(cell.write, region, clock, thread);
  if (apart && access.kind == kAtomic && cell.write.atomic) {
    who = together(cell.write, clock, thread);
  } else if (apart) {
    if (access.kind == kStore && !cell.write.atomic && !equal_writes_are_faults) {
      postpone(region, offset, access, cell.write);
    } else {
      race(region, offset, access, cell.write, "written");
    }
  }
  for (const Stamp& read : {cell.read, cell.atomic_read}) {
    if (read.epoch != 0 && !in_order(read, region, clock, thread) && !(access.kind == kAtomic && read.atomic)) {
      race(region, offset, access, read, "read");
    }
  }
  cell.write = stamp(who, clock, thread, access);
  cell.read = cell.atomic_read = {};
}

void MemoryWatcher::race(const Region& region, size_t offset, const Access& access, const Stamp& other,
                         const char* did) {
  fail(race_text(region, offset, access, other, did));
}

std::string MemoryWatcher::race_text(const Region& region, size_t offset, const Access& access, const Stamp& other,
                                     const char* did) const {
  const Clock& clock = clocks_[region.space == Region::threadgroup];
  std::string by;
  if (other.atomic) {
    by = "an atomic operation";
  } else if (other.who < kSimdgroup) {
    by = "thread " + std::to_string(other.who);
  } else if (other.who < kSeveral) {
    by = "several lanes of simdgroup " + std::to_string(other.who - kSimdgroup);
  } else {
    by = other.who == kSeveral ? "several threads" : "threads of several threadgroups";
  }
  const bool elsewhere = region.space == Region::device && other.epoch < clock.threadgroup_start;
  if (elsewhere && other.who != kSeveralThreadgroups) {
    auto after = std::upper_bound(threadgroups_.begin(), threadgroups_.end(), other.epoch,
                                  [](uint32_t epoch, const auto& threadgroup) { return epoch < threadgroup.first; });
    by += " of threadgroup " + simulator::text_of((after - 1)->second.threadgroup);
  }
  return text_of(access) + place_of(region, offset) + ", " + did + " by " + by + where(other.caller) +
         (elsewhere ? " in the same launch: a race between threadgroups" : " with no barrier between: a race") +
         element_of(region.name, static_cast<int64_t>(offset), item_of(region, access.bytes));
}

}  // namespace mittens::simulator
