#include "simulator/profile.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace mittens::simulator {

namespace {

constexpr unsigned kVectorBytes = 16;
constexpr unsigned kVectorElements = 4;
enum How : uint8_t { kLoaded = 1, kStored = 2 };

const char* name_of(Profile::Kind kind) {
  static const char* const names[] = {"load", "store", "atomic", "barrier", "simd", "matrix"};
  return names[kind];
}

}  // namespace

void Profile::add(size_t slot, uintptr_t buffer, size_t offset, size_t bytes) {
  auto found =
      std::find_if(buffers_.begin(), buffers_.end(), [buffer](const Buffer& other) { return other.begin == buffer; });
  if (found == buffers_.end()) {
    found = buffers_.insert(buffers_.end(), Buffer{buffer, {}, {}});
  }
  const size_t lines = std::max(found->how.size(), (offset + bytes + kLineBytes - 1) / kLineBytes);
  found->how.resize(lines);
  found->threadgroup.resize(lines);
  regions_.resize(std::max(regions_.size(), slot + 1));
  regions_[slot] = {&*found, offset};
}

void Profile::touch(Kind kind, const Place& place, size_t bytes) {
  const auto [buffer, offset] = regions_[place.slot];
  const uint64_t first = offset + place.offset;
  const auto how = static_cast<uint8_t>(kind == load ? kLoaded : kind == store ? kStored : kLoaded | kStored);
  for (uint64_t line = first / kLineBytes; line <= (first + bytes - 1) / kLineBytes; ++line) {
    buffer->how[line] |= how;
    if (buffer->threadgroup[line] != threadgroup_) {
      buffer->threadgroup[line] = threadgroup_;
      ++counts_.threadgroup_lines;
    }
  }
}

Profile::Instruction& Profile::executed(Kind kind, bool device, const void* caller, const abi::Site& site,
                                        const abi::Thread& thread) {
  // A block copy loads and stores with one caller.
  const uint64_t key = reinterpret_cast<uintptr_t>(caller) * 16 + kind * 2u + device;
  auto [found, is_new] = instructions_.try_emplace(key);
  Instruction& instruction = found->second;
  if (is_new) {
    instruction.kind = kind;
    instruction.device = device;
    instruction.caller = caller;
    instruction.site = site;
  }
  if (thread.index >= instruction.times.size()) {
    instruction.times.resize((thread.simdgroup + 1) * abi::simd_width);
    instruction.seen.resize(instruction.times.size());
  }
  ++instruction.times[thread.index];
  const uint32_t bit = uint32_t{1} << thread.simdgroup;
  if (!(instruction.touched & bit)) {
    instruction.touched |= bit;
    touched_[thread.simdgroup].push_back(&instruction);
  }
  return instruction;
}

bool Profile::joins(Lane& lane, Kind kind, const Place& place, size_t bytes, long long steps, uint64_t meeting) {
  for (Run& run : lane.runs) {
    const bool same_block = place.device ? run.steps == steps : run.epoch == lane.epoch;
    if (run.region != place.region || run.meeting != meeting || !same_block) {
      continue;
    }
    if (run.kind != kind || kind == atomic) {
      run.region = nullptr;
    } else if (run.end - run.begin + bytes <= run.most) {
      if (place.offset == run.end) {
        run.end += bytes;
        return true;
      }
      if (place.offset + bytes == run.begin) {
        run.begin -= bytes;
        return true;
      }
    }
  }
  return false;
}

void Profile::access(Kind kind, const Place& place, size_t bytes, const void* caller, const abi::Thread& thread,
                     long long steps) {
  if (place.device) {
    touch(kind, place, bytes);
  }
  Instruction& instruction = executed(kind, place.device, caller, {"", 0}, thread);
  if (thread.index >= lanes_.size()) {
    lanes_.resize((thread.simdgroup + 1) * abi::simd_width);
  }
  Lane& lane = lanes_[thread.index];
  uint32_t& seen = instruction.seen[thread.index];
  if (seen == lane.epoch) {
    ++lane.epoch;
  }
  seen = lane.epoch;
  const uint64_t meeting = meetings_[thread.simdgroup];
  if (joins(lane, kind, place, bytes, steps, meeting)) {
    return;
  }
  instruction.starts = true;
  instruction.vectors = std::max<uint64_t>(instruction.vectors, (bytes + kVectorBytes - 1) / kVectorBytes);
  Run& run = lane.runs[lane.next];
  lane.next = (lane.next + 1) % kRuns;
  run = {kind,
         place.region,
         place.offset,
         place.offset + bytes,
         std::min<uint64_t>(kVectorBytes, kVectorElements * bytes),
         steps,
         lane.epoch,
         meeting};
}

void Profile::operation(Kind kind, const abi::Operation& operation, const abi::Thread& thread) {
  executed(kind, false, operation.caller, operation.site, thread).starts = true;
}

void Profile::meet(unsigned simdgroup) {
  ++meetings_[simdgroup];
  for (Instruction* instruction : touched_[simdgroup]) {
    const auto first = instruction->times.begin() + simdgroup * abi::simd_width;
    const auto last = first + abi::simd_width;
    instruction->executions += *std::max_element(first, last);
    std::fill(first, last, 0);
    instruction->touched &= ~(uint32_t{1} << simdgroup);
  }
  touched_[simdgroup].clear();
}

void Profile::meet() {
  for (unsigned simdgroup = 0; simdgroup < kSimdgroups; ++simdgroup) {
    meet(simdgroup);
  }
}

void Profile::finish(const Lines& lines, uintptr_t base) {
  counts_.profiled = true;
  for (const Buffer& buffer : buffers_) {
    for (const uint8_t how : buffer.how) {
      counts_.distinct_lines += how != 0;
      counts_.distinct_lines_loaded += (how & kLoaded) != 0;
      counts_.distinct_lines_stored += (how & kStored) != 0;
    }
  }
  std::map<std::tuple<std::string, unsigned, Kind, bool>, LineCounts> by_line;
  for (const auto& [key, instruction] : instructions_) {
    std::string file = instruction.site.file;
    unsigned line = instruction.site.line;
    const bool is_access = instruction.kind <= atomic;
    if (is_access) {  // the address points behind the instruction
      std::tie(file, line) = lines.place(reinterpret_cast<uintptr_t>(instruction.caller) - base - 1);
    }
    const uint64_t accesses = instruction.starts ? instruction.executions * instruction.vectors : 0;
    LineCounts& counts = by_line[{file, line, instruction.kind, instruction.device}];
    counts.file = file;
    counts.line = line;
    counts.operation = name_of(instruction.kind);
    counts.memory = !is_access ? "" : instruction.device ? "device" : "threadgroup";
    counts.executions = std::max(counts.executions, instruction.executions);
    counts.operations += accesses;
    if (instruction.kind == load) {
      (instruction.device ? counts_.device_loads : counts_.threadgroup_loads) += accesses;
    } else if (instruction.kind == store) {
      (instruction.device ? counts_.device_stores : counts_.threadgroup_stores) += accesses;
    }
  }
  for (auto& [key, counts] : by_line) {
    counts_.lines.push_back(std::move(counts));
  }
}

}  // namespace mittens::simulator
