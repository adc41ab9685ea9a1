// The words of the watcher's faults: who, which place, which line of the source.
#include <algorithm>
#include <cstdlib>
#include <map>

#include "simulator/memory_watcher.h"

namespace mittens::simulator {

std::string MemoryWatcher::element_of(const std::string& name, int64_t offset, size_t item) {
  if (item == 0) {
    return "";
  }
  const auto size = static_cast<int64_t>(item);
  const int64_t index = offset / size - (offset % size < 0 ? 1 : 0);
  return "\n  element " + std::to_string(index) + " of \"" + name + "\", of " + std::to_string(item) +
         (item == 1 ? " byte" : " bytes");
}

// Bytes of an element; the size of the access where the kernel does not declare them.
size_t MemoryWatcher::item_of(const Region& region, size_t accessed) {
  return region.item ? region.item : accessed;
}

// Read once for each library: a launch may be over sooner than its library is read.
const Lines& MemoryWatcher::lines() const {
  static std::map<std::string, Lines> read;  // launches run one at a time
  return read.try_emplace(library_.path(), library_.path()).first->second;
}

std::string MemoryWatcher::where(uint32_t relative) const {
  const std::string line = lines().at(relative - 1);  // the address points behind the instruction
  return line.empty() ? "" : " (" + line + ")";
}

std::string MemoryWatcher::where(const void* caller) const {
  return where(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(caller) - library_.base()));
}

std::string MemoryWatcher::text_of(const Access& access) const {
  const char* verb = access.kind == kLoad ? " reads " : access.kind == kStore ? " writes " : " atomically accesses ";
  return launch_.running_name() + verb + std::to_string(access.bytes) + (access.bytes == 1 ? " byte" : " bytes") +
         where(access.caller) + " ";
}

std::string MemoryWatcher::place_of(const Region& region, size_t offset) {
  const char* space = region.space == Region::device ? " of buffer \"" : " of threadgroup array \"";
  return "at byte " + std::to_string(offset) + space + region.name + "\"";
}

void MemoryWatcher::fail(const std::string& what) {
  launch_.fail(what);
  std::abort();  // GCC does not see that a virtual function never returns
}

void MemoryWatcher::fail_at(const Region& region, size_t offset, const Access& access, const std::string& what) {
  fail(text_of(access) + place_of(region, offset) + what +
       element_of(region.name, static_cast<int64_t>(offset), item_of(region, access.bytes)));
}

std::string MemoryWatcher::lines_of(const std::vector<const void*>& callers) const {
  std::string file;
  unsigned first = 0;
  unsigned last = 0;
  for (const void* caller : callers) {
    const auto [of, line] = lines().place(reinterpret_cast<uintptr_t>(caller) - library_.base() - 1);
    if (line == 0 || (first != 0 && of != file)) {
      continue;
    }
    file = of;
    first = first == 0 ? line : std::min(first, line);
    last = std::max(last, line);
  }
  if (first == last) {
    return first == 0 ? "" : " (" + file + ":" + std::to_string(first) + ")";
  }
  return " (" + file + ":" + std::to_string(first) + " to " + std::to_string(last) + ")";
}

}  // namespace mittens::simulator
