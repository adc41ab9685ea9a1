#include "simulator/traffic.h"

#include <algorithm>
#include <iterator>

namespace mittens::simulator {

namespace {

constexpr unsigned kBanks = 32;
constexpr unsigned kBankBytes = 4;

void make_distinct(std::vector<uint64_t>& values) {
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
}

// The units of `size` bytes that accesses of `bytes` bytes touch.
std::vector<uint64_t> units(const std::vector<uint64_t>& at, unsigned bytes, unsigned size) {
  std::vector<uint64_t> touched;
  for (const uint64_t first : at) {
    for (uint64_t unit = first / size; unit <= (first + bytes - 1) / size; ++unit) {
      touched.push_back(unit);
    }
  }
  make_distinct(touched);
  return touched;
}

}  // namespace

void MemoryTraffic::access(bool device, uint64_t at, size_t bytes, const void* caller, const abi::Thread& thread) {
  Simdgroup& simdgroup = simdgroups_[thread.simdgroup];
  const uint64_t instruction = reinterpret_cast<uintptr_t>(caller);
  const uint32_t time = simdgroup.times[instruction * abi::simd_width + thread.index % abi::simd_width]++;
  const uint64_t key = instruction ^ uint64_t{time} * 0x9e3779b97f4a7c15;
  Together& together = simdgroup.together[key];
  together.device = device;
  together.bytes = static_cast<unsigned>(bytes);
  together.at.push_back(at);
  if (together.at.size() == abi::simd_width) {
    count(together);
    simdgroup.together.erase(key);
  }
}

void MemoryTraffic::meet(unsigned simdgroup) {
  Simdgroup& own = simdgroups_[simdgroup];
  for (auto& [key, together] : own.together) {
    count(together);
  }
  own.together.clear();
  own.times.clear();
}

void MemoryTraffic::finish_threadgroup() {
  for (unsigned simdgroup = 0; simdgroup < std::size(simdgroups_); ++simdgroup) {
    meet(simdgroup);
  }
}

void MemoryTraffic::count(Together& together) {
  make_distinct(together.at);
  together.device ? count_lines(together) : count_conflicts(together);
}

void MemoryTraffic::count_lines(Together& together) {
  ++counts_.device_accesses;
  counts_.device_lines += units(together.at, together.bytes, kLineBytes).size();
  counts_.device_lines_fewest += (together.at.size() * together.bytes + kLineBytes - 1) / kLineBytes;
}

// A bank gives one word at a time; several lanes may share it.
void MemoryTraffic::count_conflicts(Together& together) {
  ++counts_.threadgroup_accesses;
  const auto words = units(together.at, together.bytes, kBankBytes);
  unsigned by_bank[kBanks] = {};
  for (const uint64_t word : words) {
    ++by_bank[word % kBanks];
  }
  counts_.bank_conflicts += *std::max_element(by_bank, by_bank + kBanks) - (words.size() + kBanks - 1) / kBanks;
}

}  // namespace mittens::simulator
