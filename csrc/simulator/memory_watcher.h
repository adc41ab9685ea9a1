// The memory watcher: the kernel's buffers and threadgroup arrays, and every access to them, before it happens.
//
// Each granule of memory that a kernel may write (4 bytes, or fewer once smaller elements are seen) has a cell that
// says who last wrote it and who last read it, and when. Two accesses by different threads, one of them a write, are in
// order if a barrier lies between: a threadgroup barrier raises the epoch of the memory that it names, a simdgroup
// barrier the epoch of its simdgroup. Across threadgroups nothing is in order.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "simulator/arena.h"
#include "simulator/fiber.h"
#include "simulator/lines.h"
#include "simulator/profile.h"
#include "simulator/simulator.h"
#include "simulator/traffic.h"

namespace mittens::simulator {

// Threads that write the same value to one place race formally, and no GPU shows it. It becomes a note, or a fault.
void fault_on_equal_writes(bool fault);
// Notes since the last call, each kind once.
std::vector<std::string> take_notes();
// How many launches this process has simulated.
uint64_t launches();

// Who accessed memory, when, and from which code. Epoch 0 means never. `who` is a thread, or a group of
// race_detector.cpp.
struct Stamp {
  uint32_t epoch;
  uint32_t who : 11;
  uint32_t atomic : 1;
  uint32_t simd_epoch : 20;
  uint32_t caller;  // relative to the library
};

// Plain and atomic reads conflict with different accesses, so that neither may stand for the other.
struct Cell {
  Stamp write;
  Stamp read;
  Stamp atomic_read;
};

// One buffer or threadgroup array, in one slot of the arena.
struct Region {
  enum Space : uint8_t { unused, device, threadgroup };

  Space space = unused;
  std::string name;
  uintptr_t begin = 0;
  size_t bytes = 0;
  bool writable = false;
  bool constant = false;  // a struct of params
  bool initialised = false;  // before the launch
  bool complete = false;  // every byte is to be written by the launch
  uintptr_t buffer = 0;  // where the buffer begins in the caller's memory, by which it is known
  size_t offset = 0;  // from there
  size_t packed = 0;  // of a threadgroup array: its offset for counts of traffic, as if all lay one after the other
  size_t item = 0;  // bytes of an element, where that is known
  unsigned granule_bits = 2;
  std::vector<Cell> cells = {};  // none where nothing may be written
  std::vector<const Region*> aliases = {};  // writable regions that overlap this one in the caller's memory

  uintptr_t given() const {  // in the caller's memory
    return buffer + offset;
  }
};

// The launch that is watched, for messages.
class Watched {
 public:
  virtual const std::string& kernel_name() const = 0;
  virtual std::string running_name() const = 0;  // of the thread that runs
  // Ends the launch with a Fault, from within a fiber, whose stack is not unwound.
  [[noreturn]] virtual void fail(const std::string& what) = 0;

 protected:
  ~Watched() = default;
};

class MemoryWatcher {
 public:
  MemoryWatcher(Watched& launch, const Arena& arena, const Library& library, const Stacks& stacks, Counts& counts);

  void start(const Options& options) {
    count_launch();
    watching_ = options.watch && library_.watched();
    if (options.count) {
      traffic_ = std::make_unique<MemoryTraffic>(counts_);
    }
    if (options.profile && watching_) {
      profile_ = std::make_unique<Profile>(counts_);
    }
  }
  void start_threadgroup(const uint32_t (&position)[3]);
  void finish_threadgroup() {
    if (traffic_) {
      traffic_->finish_threadgroup();
    }
    if (profile_) {
      profile_->meet();
    }
  }
  // All threads of a scope are at the same operation.
  void meet(abi::Scope scope, unsigned simdgroup) {
    if (scope == abi::threadgroup_scope) {
      finish_threadgroup();
    } else if (scope == abi::simdgroup_scope) {
      if (traffic_) {
        traffic_->meet(simdgroup);
      }
      if (profile_) {
        profile_->meet(simdgroup);
      }
    }
  }
  // A thread is at an operation between threads.
  void operation(Profile::Kind kind, const abi::Operation& operation, const abi::Thread& thread) {
    if (profile_) {
      profile_->operation(kind, operation, thread);
    }
  }
  // After the last threadgroup: faults if a complete output has bytes that nothing wrote.
  void finish();

  void add(size_t slot, Region region);
  const Region& region(size_t slot) const {
    return regions_[slot];
  }

  void load(const void* address, size_t bytes, const void* caller);
  void store(const void* address, size_t bytes, const void* caller);
  // An access to the components of a vector that `mask` selects, each of `bytes`. Together they count as one access.
  void lanes(const void* address, size_t bytes, unsigned mask, bool stores, const void* caller);
  void atomic(const volatile void* address, size_t bytes, bool reads, bool writes, const void* caller);
  // The code found an index beyond its array, and names no array. An access to a threadgroup array that follows at once
  // is through that index, and faults with its name; else settle() faults: the array was the thread's own.
  void outside_array(const void* caller);
  // An array of the running thread's own, declared without values, begins to live; without a name, it ends. An element
  // of `unit` bytes is written once a part of it is: a copy of a struct reads all of its members.
  void private_array(const void* address, size_t bytes, size_t unit, const char* name);
  void settle();
  void barrier(abi::Scope scope, unsigned simdgroup, unsigned memory);

  // The lines of the source of these addresses of code, as text.
  std::string lines_of(const std::vector<const void*>& callers) const;

 private:
  static void count_launch();

  enum Kind { kLoad, kStore, kAtomic };

  // The epochs of one kind of memory.
  struct Clock {
    uint32_t epoch = 0;
    uint32_t threadgroup_start = 0;  // the epoch in which the running threadgroup began
    uint32_t simd_epochs[abi::simd_width] = {};
  };

  struct Access {
    Kind kind;
    bool reads;
    bool writes;
    size_t bytes;
    const void* caller;
  };

  // An array of a thread's own, and which of its elements were written.
  struct Private {
    uintptr_t begin;
    const char* name;
    size_t bytes;
    size_t unit;
    std::vector<bool> written;
  };

  // A store over another thread's store: a race unless both wrote the same value. The watcher runs before each access,
  // so that the next one compares.
  struct Postponed {
    const Region* region;
    size_t offset;
    size_t bytes;
    Access access;
    Stamp other;
    unsigned char before[4];
  };

  Region* check(uintptr_t address, const Access& access);
  void postpone(const Region& region, size_t offset, const Access& access, const Stamp& other);
  void compare();
  void settle(uintptr_t address, const Access& access);
  Region* region_of(uintptr_t address, const Access& access);
  Region* outside_of_regions(uintptr_t address, const Access& access);
  void check_privates(uintptr_t address, const Access& access);
  void count(const Region& region, size_t offset, const Access& access);
  void profile(const Region& region, size_t offset, const Access& access);
  void check_cells(Region& region, size_t offset, const Access& access);
  void find_aliases(Region& region);
  void check_aliases(const Region& region, size_t offset, const Access& access);
  void on_load(Region& region, Cell& cell, size_t offset, const Access& access);
  void on_read(Stamp& read, const Region& region, const Access& access);
  void on_store(Region& region, Cell& cell, size_t offset, const Access& access);
  bool in_order(const Stamp& earlier, const Region& region, const Clock& clock, const abi::Thread& thread) const;
  void refine(Region& region, unsigned granule_bits);
  Clock& clock_of(const Region& region) {
    return clocks_[region.space == Region::threadgroup];
  }
  Stamp stamp(unsigned who, const Clock& clock, const abi::Thread& thread, const Access& access) const;
  static unsigned together(const Stamp& earlier, const Clock& clock, const abi::Thread& thread);

  const Lines& lines() const;
  std::string where(const void* caller) const;
  std::string where(uint32_t relative) const;
  std::string text_of(const Access& access) const;
  static std::string place_of(const Region& region, size_t offset);
  // The element at a byte, in a line of its own; nothing where its size is not known.
  static std::string element_of(const std::string& name, int64_t offset, size_t item);
  static size_t item_of(const Region& region, size_t accessed);
  [[noreturn]] void fail(const std::string& what);
  [[noreturn]] void fail_at(const Region& region, size_t offset, const Access& access, const std::string& what);
  std::string race_text(const Region& region, size_t offset, const Access& access, const Stamp& other,
                        const char* did) const;
  [[noreturn]] void race(const Region& region, size_t offset, const Access& access, const Stamp& other,
                         const char* did);

  Watched& launch_;
  const Arena& arena_;
  const Library& library_;
  const Stacks& stacks_;
  Counts& counts_;
  bool watching_ = false;
  std::vector<Postponed> postponed_;
  std::set<std::pair<const Region*, const void*>> noted_;
  std::vector<std::vector<Private>> privates_;  // by thread of the running threadgroup
  const void* outside_ = nullptr;  // where an index is beyond its array, until settled
  Clock clocks_[2];  // of device memory, of threadgroup memory
  std::vector<std::pair<uint32_t, abi::Thread>> threadgroups_;  // the device epoch in which each began, and where it is
  Region regions_[Arena::kSlots];
  std::unique_ptr<MemoryTraffic> traffic_;
  std::unique_ptr<Profile> profile_;
};

}  // namespace mittens::simulator
