// Facts of a launch for predicting its run time: the distinct lines of memory that it touches, its accesses merged as
// a compiler merges them, and how often simdgroups execute each line of the source.
//
// Accesses of one thread are merged where a compiler makes one vector access of them: neighbours in memory, both loads
// or both stores, at most four elements and 16 bytes, in one basic block, with no store to the same buffer and no
// operation between threads between them. Within a threadgroup array, whose index checks split basic blocks, an
// instruction that comes again ends the block. An instruction that starts an access of its own in any execution is
// never merged: neighbours by chance, as in a gather, are not.
//
// Executions are of simdgroups: of all lanes' executions since they last met, the most.
#pragma once

#include <cstdint>
#include <deque>
#include <unordered_map>
#include <utility>
#include <vector>

#include "simulator/abi.h"
#include "simulator/lines.h"
#include "simulator/simulator.h"

namespace mittens::simulator {

class Profile {
 public:
  enum Kind : uint8_t { load, store, atomic, barrier, simd, matrix };

  struct Place {
    const void* region;  // tells regions apart
    bool device;
    size_t slot;
    uint64_t offset;  // in the region
  };

  explicit Profile(Counts& counts) : counts_(counts) {}

  // A region of device memory: where its buffer begins, and which part of the buffer it is. Regions may share a buffer.
  void add(size_t slot, uintptr_t buffer, size_t offset, size_t bytes);
  void access(Kind kind, const Place& place, size_t bytes, const void* caller, const abi::Thread& thread,
              long long steps);
  void operation(Kind kind, const abi::Operation& operation, const abi::Thread& thread);
  // All lanes of a simdgroup are at the same place.
  void meet(unsigned simdgroup);
  void start_threadgroup() {
    ++threadgroup_;
  }
  // All simdgroups of the threadgroup are.
  void meet();
  // After the last threadgroup: writes the counts. The lines are of the library that is loaded at `base`.
  void finish(const Lines& lines, uintptr_t base);

 private:
  static constexpr unsigned kThreads = 1024;
  static constexpr unsigned kSimdgroups = kThreads / abi::simd_width;
  static constexpr unsigned kRuns = 16;  // accesses of a thread that others may still join

  struct Instruction {
    Kind kind;
    bool device;
    const void* caller;
    abi::Site site;  // of an operation between threads; accesses have none
    bool starts = false;  // whether an execution of it started an access
    uint64_t vectors = 1;  // of 16 bytes, that one execution takes
    uint64_t executions = 0;
    uint32_t touched = 0;  // by simdgroup, whether it executed it since it last met
    std::vector<uint32_t> times;  // by thread, since its simdgroup last met
    std::vector<uint32_t> seen;  // by thread, the epoch of its last execution
  };
  // Accesses of a thread that are one so far.
  struct Run {
    Kind kind;
    const void* region = nullptr;
    uint64_t begin;
    uint64_t end;
    uint64_t most;  // bytes
    long long steps;
    uint32_t epoch;
    uint64_t meeting;
  };
  struct Lane {
    uint32_t epoch = 1;
    unsigned next = 0;
    Run runs[kRuns];
  };
  // The lines of one buffer.
  struct Buffer {
    uintptr_t begin;
    std::vector<uint8_t> how;  // loaded, stored
    std::vector<uint32_t> threadgroup;  // the last that touched it
  };

  Instruction& executed(Kind kind, bool device, const void* caller, const abi::Site& site, const abi::Thread& thread);
  void touch(Kind kind, const Place& place, size_t bytes);
  bool joins(Lane& lane, Kind kind, const Place& place, size_t bytes, long long steps, uint64_t meeting);

  Counts& counts_;
  uint32_t threadgroup_ = 0;
  std::deque<Buffer> buffers_;
  std::vector<std::pair<Buffer*, size_t>> regions_;  // by slot: the buffer, and the offset in it
  std::unordered_map<uint64_t, Instruction> instructions_;
  std::vector<Instruction*> touched_[kSimdgroups];
  uint64_t meetings_[kSimdgroups] = {};
  std::vector<Lane> lanes_;
};

}  // namespace mittens::simulator
