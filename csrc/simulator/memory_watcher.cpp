// Checks each access before it happens: bounds, alignment, writes to inputs, aliases, arrays that nothing filled; and
// counts bytes. race_detector.cpp has the order of accesses, whose rules memory_watcher.h states.
#include "simulator/memory_watcher.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>

#include "simulator/runtime.h"

namespace mittens::simulator {

namespace {

std::atomic<uint64_t> launch_count = 0;

}  // namespace

uint64_t launches() {
  return launch_count;
}

void MemoryWatcher::count_launch() {
  ++launch_count;
}

MemoryWatcher::MemoryWatcher(Watched& launch, const Arena& arena, const Library& library, const Stacks& stacks,
                             Counts& counts)
    : launch_(launch), arena_(arena), library_(library), stacks_(stacks), counts_(counts) {}

void MemoryWatcher::add(size_t slot, Region region) {
  if (watching_ && region.writable) {
    region.cells.resize((region.bytes + 3) / 4);
  }
  if (profile_ && region.space == Region::device && !region.constant) {
    profile_->add(slot, region.buffer, region.offset, region.bytes);
  }
  regions_[slot] = std::move(region);
  if (watching_) {
    find_aliases(regions_[slot]);
  }
}

// Finds arguments that overlap in the caller's memory. The simulator copies each argument, and a GPU's compiler assumes
// that they do not overlap.
void MemoryWatcher::find_aliases(Region& region) {
  if (region.space != Region::device || region.constant) {
    return;
  }
  for (Region& other : regions_) {
    const bool overlaps = other.space == Region::device && !other.constant && &other != &region &&
                          other.given() < region.given() + region.bytes && region.given() < other.given() + other.bytes;
    if (overlaps && other.writable) {
      region.aliases.push_back(&other);
    }
    if (overlaps && region.writable) {
      other.aliases.push_back(&region);
    }
  }
}

void MemoryWatcher::check_aliases(const Region& region, size_t offset, const Access& access) {
  for (const Region* other : region.aliases) {
    const uintptr_t begin = std::max(region.given() + offset, other->given());
    const uintptr_t end = std::min(region.given() + offset + access.bytes, other->given() + other->bytes);
    for (uintptr_t at = begin; at < end; ++at) {
      const Stamp& write = other->cells[(at - other->given()) >> other->granule_bits].write;
      if (write.epoch != 0) {
        fail_at(region, offset, access,
                ", which was written through \"" + other->name + "\"" + where(write.caller) +
                    ": one buffer is bound to both, and a compiler may reorder their accesses");
      }
    }
  }
}

void MemoryWatcher::start_threadgroup(const uint32_t (&position)[3]) {
  for (Clock& clock : clocks_) {
    clock.threadgroup_start = ++clock.epoch;
    std::fill(std::begin(clock.simd_epochs), std::end(clock.simd_epochs), 0);
  }
  if (profile_) {
    profile_->start_threadgroup();
  }
  privates_.clear();
  if (watching_) {
    abi::Thread thread{};
    std::copy(std::begin(position), std::end(position), thread.threadgroup);
    threadgroups_.emplace_back(clocks_[0].epoch, thread);
  }
}

void MemoryWatcher::load(const void* address, size_t bytes, const void* caller) {
  const Access access{kLoad, true, false, bytes, caller};
  const auto at = reinterpret_cast<uintptr_t>(address);
  if (const Region* region = check(at, access)) {
    count(*region, at - region->begin, access);
  }
}

void MemoryWatcher::store(const void* address, size_t bytes, const void* caller) {
  const Access access{kStore, false, true, bytes, caller};
  const auto at = reinterpret_cast<uintptr_t>(address);
  if (const Region* region = check(at, access)) {
    count(*region, at - region->begin, access);
  }
}

void MemoryWatcher::lanes(const void* address, size_t bytes, unsigned mask, bool stores, const void* caller) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  const size_t first = at + std::countr_zero(mask) * bytes;
  const size_t end = at + std::bit_width(mask) * bytes;
  Access access{stores ? kStore : kLoad, !stores, stores, bytes, caller};
  const Region* region = nullptr;
  for (unsigned lane = 0; mask >> lane; ++lane) {
    if (mask >> lane & 1) {
      region = check(at + lane * bytes, access);
    }
  }
  if (region) {
    access.bytes = end - first;
    count(*region, first - region->begin, access);
  }
}

// Checks an access, and returns its region, or null for memory of no region.
Region* MemoryWatcher::check(uintptr_t address, const Access& access) {
  if (outside_) {
    settle(address, access);
  }
  if (!postponed_.empty()) {
    compare();
  }
  Region* region = region_of(address, access);
  if (!region) {
    return nullptr;
  }
  const size_t offset = address - region->begin;
  if (access.writes && !region->writable) {
    fail_at(*region, offset, access, ", which is an input");
  }
  if (!region->cells.empty()) {
    check_cells(*region, offset, access);
  }
  if (access.kind == kLoad && !region->aliases.empty()) {
    check_aliases(*region, offset, access);
  }
  return region;
}

void MemoryWatcher::atomic(const volatile void* address, size_t bytes, bool reads, bool writes, const void* caller) {
  const Access access{kAtomic, reads, writes, bytes, caller};
  const auto at = reinterpret_cast<uintptr_t>(address);
  if (const Region* region = check(at, access)) {
    profile(*region, at - region->begin, access);
  }
}

void MemoryWatcher::outside_array(const void* caller) {
  if (watching_) {
    outside_ = caller;
  }
}

void MemoryWatcher::private_array(const void* address, size_t bytes, size_t unit, const char* name) {
  if (!watching_) {
    return;
  }
  const unsigned thread = runtime()->thread->index;
  if (privates_.size() <= thread) {
    privates_.resize(thread + 1);
  }
  const auto begin = reinterpret_cast<uintptr_t>(address);
  std::vector<Private>& arrays = privates_[thread];
  std::erase_if(arrays,
                [&](const Private& array) { return array.begin < begin + bytes && begin < array.begin + array.bytes; });
  if (name) {
    arrays.push_back({begin, name, bytes, unit, std::vector<bool>(bytes / unit)});
  }
}

void MemoryWatcher::check_privates(uintptr_t address, const Access& access) {
  const unsigned thread = runtime()->thread->index;
  if (thread >= privates_.size() || outside_) {
    return;
  }
  for (Private& array : privates_[thread]) {
    if (address + access.bytes > array.begin - abi::fence && address < array.begin + array.bytes + abi::fence &&
        (address < array.begin || address + access.bytes > array.begin + array.bytes)) {
      fail(text_of(access) + "at byte " + std::to_string(static_cast<int64_t>(address - array.begin)) +
           " of its own array \"" + array.name + "\", which has " + std::to_string(array.bytes) +
           " bytes: out of bounds" + element_of(array.name, static_cast<int64_t>(address - array.begin), array.unit));
    }
    const uintptr_t begin = std::max(address, array.begin);
    const uintptr_t end = std::min(address + access.bytes, array.begin + array.bytes);
    if (begin >= end) {
      continue;
    }
    for (size_t i = (begin - array.begin) / array.unit; i * array.unit < end - array.begin; ++i) {
      if (access.kind != kLoad) {
        array.written[i] = true;
      } else if (!array.written[i]) {
        fail(text_of(access) + "at byte " + std::to_string(std::max(i * array.unit, begin - array.begin)) +
             " of its own array \"" + array.name + "\", which nothing has written: uninitialised" +
             element_of(array.name, static_cast<int64_t>(i * array.unit), array.unit));
      }
    }
  }
}

// Reports faults that show once an access is done: postponed stores, and an index outside of a thread's own array.
void MemoryWatcher::settle() {
  if (!postponed_.empty()) {
    compare();
  }
  if (outside_) {
    fail(launch_.running_name() + " uses an index outside an array of its own" + where(outside_));
  }
}

void MemoryWatcher::settle(uintptr_t address, const Access& access) {
  region_of(address, access);
  settle();
}

void MemoryWatcher::count(const Region& region, size_t offset, const Access& access) {
  const bool device = region.space == Region::device;
  if (access.kind == kLoad) {
    (device ? counts_.device_bytes_loaded : counts_.threadgroup_bytes_loaded) += access.bytes;
    counts_.params_bytes_loaded += region.constant ? access.bytes : 0;
  } else {
    (device ? counts_.device_bytes_stored : counts_.threadgroup_bytes_stored) += access.bytes;
  }
  if (traffic_) {
    traffic_->access(device, (device ? region.begin : region.packed) + offset, access.bytes, access.caller,
                     *runtime()->thread);
  }
  profile(region, offset, access);
}

void MemoryWatcher::profile(const Region& region, size_t offset, const Access& access) {
  if (!profile_ || region.constant || access.bytes == 0) {
    return;
  }
  const Profile::Kind kind = access.kind == kLoad    ? Profile::load
                             : access.kind == kStore ? Profile::store
                                                     : Profile::atomic;
  const Profile::Place place{&region, region.space == Region::device, static_cast<size_t>(&region - regions_), offset};
  profile_->access(kind, place, access.bytes, access.caller, *runtime()->thread, runtime()->steps);
}

Region* MemoryWatcher::region_of(uintptr_t address, const Access& access) {
  if (!watching_) {
    return nullptr;
  }
  if (!arena_.contains(address)) {
    return outside_of_regions(address, access);
  }
  Region& region = regions_[arena_.slot_of(address)];
  const size_t offset = address - region.begin;
  if (offset >= region.bytes || access.bytes > region.bytes - offset) {
    if (region.space == Region::unused) {
      fail(text_of(access) + "outside of every buffer");
    }
    const auto signed_offset = static_cast<int64_t>(offset);
    fail(text_of(access) + "at byte " + std::to_string(signed_offset) + " of " +
         (region.space == Region::device ? "buffer \"" : "threadgroup array \"") + region.name + "\", which has " +
         std::to_string(region.bytes) + " bytes: out of bounds" +
         element_of(region.name, signed_offset, item_of(region, access.bytes)));
  }
  const bool vector =
      access.bytes == 2 || access.bytes == 4 || access.bytes == 8 || access.bytes == 16 || access.bytes == 32;
  if (vector && (address & (access.bytes - 1))) {
    fail_at(region, offset, access, ": misaligned");
  }
  return &region;
}

// The address is in no region. Private memory on a fiber's stack is allowed, and loads of the library's constants.
Region* MemoryWatcher::outside_of_regions(uintptr_t address, const Access& access) {
  const bool known = stacks_.contains(address) || (access.kind == kLoad && library_.contains(address));
  if (!known && library_.has_extent()) {
    fail(text_of(access) + (address < 4096 ? "through a null pointer: of a buffer that the launch did not bind?"
                                           : "outside of every buffer"));
  }
  if (!privates_.empty()) {
    check_privates(address, access);
  }
  return nullptr;
}

void MemoryWatcher::finish() {
  if (!watching_) {
    return;
  }
  if (profile_) {
    profile_->finish(lines(), library_.base());
  }
  for (const Region& region : regions_) {
    if (!region.complete) {
      continue;
    }
    const auto unwritten = [](const Cell& cell) { return cell.write.epoch == 0; };
    const auto first = std::find_if(region.cells.begin(), region.cells.end(), unwritten);
    if (first != region.cells.end()) {
      const auto count = static_cast<size_t>(std::count_if(first, region.cells.end(), unwritten));
      throw Fault("[" + launch_.kernel_name() + "] buffer \"" + region.name + "\" was not written at byte " +
                  std::to_string((first - region.cells.begin()) << region.granule_bits) + " (" +
                  std::to_string(count << region.granule_bits) + " of its " + std::to_string(region.bytes) +
                  " bytes never were)" +
                  element_of(region.name, (first - region.cells.begin()) << region.granule_bits, item_of(region, 0)));
    }
  }
}

}  // namespace mittens::simulator
