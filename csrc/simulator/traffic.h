// How well the lanes of a simdgroup share the lines that memory moves for them. An access of a simdgroup is the n-th
// time that each of its lanes comes by one instruction since they met last: a lane that has not come by then does not
// take part.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "simulator/abi.h"
#include "simulator/simulator.h"

namespace mittens::simulator {

class MemoryTraffic {
 public:
  explicit MemoryTraffic(Counts& counts) : counts_(counts) {}

  // `at` is an address in device memory, or a distance from the start of the threadgroup's memory.
  void access(bool device, uint64_t at, size_t bytes, const void* caller, const abi::Thread& thread);
  // All lanes of a simdgroup are at the same place: who did not come by will not.
  void meet(unsigned simdgroup);
  void finish_threadgroup();

 private:
  struct Together {
    bool device;
    unsigned bytes;
    std::vector<uint64_t> at;  // of each lane that came by
  };
  struct Simdgroup {
    std::unordered_map<uint64_t, uint32_t> times;  // by instruction and lane
    std::unordered_map<uint64_t, Together> together;  // by instruction and time
  };

  void count(Together& together);
  void count_lines(Together& together);
  void count_conflicts(Together& together);

  Counts& counts_;
  Simdgroup simdgroups_[32];  // as many as a threadgroup may have
};

}  // namespace mittens::simulator
