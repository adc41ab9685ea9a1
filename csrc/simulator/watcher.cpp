#include "simulator/watcher.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include "simulator/runtime.h"
#include "simulator/simulation.h"

namespace mittens::simulator {

namespace {

// In place of a thread, in a cell: several lanes of one simdgroup, threads of several simdgroups, threads of several
// threadgroups.
constexpr unsigned kSimdgroup = 1024;
constexpr unsigned kSeveral = 2044;
constexpr unsigned kSeveralThreadgroups = 2045;
constexpr uint32_t kLastSimdEpoch = (1u << 20) - 1;

// Whether all that the stamp names are lanes of this simdgroup.
bool of_simdgroup(const Stamp& stamp, unsigned simdgroup) {
  return stamp.who < kSimdgroup ? stamp.who / abi::simd_width == simdgroup : stamp.who == kSimdgroup + simdgroup;
}

// The element at a byte, in a line of its own; nothing where the size of one is not known.
std::string element_of(const std::string& name, int64_t offset, size_t item) {
  if (item == 0) {
    return "";
  }
  const auto size = static_cast<int64_t>(item);
  const int64_t index = offset / size - (offset % size < 0 ? 1 : 0);
  return "\n  element " + std::to_string(index) + " of \"" + name + "\", of " + std::to_string(item) +
         (item == 1 ? " byte" : " bytes");
}

// Bytes of an element; the size of the access where the kernel does not declare them.
size_t item_of(const Region& region, size_t accessed) {
  return region.item ? region.item : accessed;
}

std::mutex notes_mutex;
std::set<std::string> notes;
std::atomic<bool> equal_writes_are_faults = false;
std::atomic<uint64_t> launch_count = 0;

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

uint64_t launches() {
  return launch_count;
}

void Watcher::count_launch() {
  ++launch_count;
}

Watcher::Watcher(Simulation& simulation, const Library& library, const Stacks& stacks, Counts& counts)
    : simulation_(simulation), library_(library), stacks_(stacks), counts_(counts) {}

void Watcher::add(size_t slot, Region region) {
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

// Arguments that were given the same memory. The simulator keeps a copy for each, and a GPU's compiler takes them for
// memory of their own.
void Watcher::find_aliases(Region& region) {
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

void Watcher::check_aliases(const Region& region, size_t offset, const Access& access) {
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

void Watcher::start_threadgroup(const uint32_t (&position)[3]) {
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

void Watcher::barrier(abi::Scope scope, unsigned simdgroup, unsigned memory) {
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

void Watcher::load(const void* address, size_t bytes, const void* caller) {
  const Access access{kLoad, true, false, bytes, caller};
  const auto at = reinterpret_cast<uintptr_t>(address);
  if (const Region* region = check(at, access)) {
    count(*region, at - region->begin, access);
  }
}

void Watcher::store(const void* address, size_t bytes, const void* caller) {
  const Access access{kStore, false, true, bytes, caller};
  const auto at = reinterpret_cast<uintptr_t>(address);
  if (const Region* region = check(at, access)) {
    count(*region, at - region->begin, access);
  }
}

void Watcher::lanes(const void* address, size_t bytes, unsigned mask, bool stores, const void* caller) {
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

// Checks an access, and returns the buffer it falls into.
Region* Watcher::check(uintptr_t address, const Access& access) {
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

void Watcher::atomic(const volatile void* address, size_t bytes, bool reads, bool writes, const void* caller) {
  const Access access{kAtomic, reads, writes, bytes, caller};
  const auto at = reinterpret_cast<uintptr_t>(address);
  if (const Region* region = check(at, access)) {
    profile(*region, at - region->begin, access);
  }
}

void Watcher::outside_array(const void* caller) {
  if (watching_) {
    outside_ = caller;
  }
}

void Watcher::private_array(const void* address, size_t bytes, size_t unit, const char* name) {
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

void Watcher::check_privates(uintptr_t address, const Access& access) {
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

void Watcher::postpone(const Region& region, size_t offset, const Access& access, const Stamp& other) {
  const size_t bytes = std::min<size_t>(size_t{1} << region.granule_bits, region.bytes - offset);
  Postponed store{&region, offset, bytes, access, other, {}};
  std::memcpy(store.before, reinterpret_cast<const void*>(region.begin + offset), bytes);
  postponed_.push_back(store);
}

// The stores have happened.
void Watcher::compare() {
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
      notes.insert("[" + simulation_.kernel_name() + "] several threads write one value" + where(store.access.caller) +
                   " to " + kind + region.name + "\" with no barrier between: one of them would do");
    }
  }
}

void Watcher::settle() {
  if (!postponed_.empty()) {
    compare();
  }
  if (outside_) {
    fail(simulation_.running_name() + " uses an index outside an array of its own" + where(outside_));
  }
}

void Watcher::settle(uintptr_t address, const Access& access) {
  region_of(address, access);
  settle();
}

void Watcher::count(const Region& region, size_t offset, const Access& access) {
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

void Watcher::profile(const Region& region, size_t offset, const Access& access) {
  if (!profile_ || region.constant || access.bytes == 0) {
    return;
  }
  const Profile::Kind kind = access.kind == kLoad    ? Profile::load
                             : access.kind == kStore ? Profile::store
                                                     : Profile::atomic;
  const Profile::Place place{&region, region.space == Region::device, static_cast<size_t>(&region - regions_), offset};
  profile_->access(kind, place, access.bytes, access.caller, *runtime()->thread, runtime()->steps);
}

Region* Watcher::region_of(uintptr_t address, const Access& access) {
  if (!watching_) {
    return nullptr;
  }
  if (!simulation_.arena().contains(address)) {
    return outside_of_regions(address, access);
  }
  Region& region = regions_[simulation_.arena().slot_of(address)];
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

// Memory of no region: private memory on the fibers' stacks, constants of the library; anything else is astray.
Region* Watcher::outside_of_regions(uintptr_t address, const Access& access) {
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

void Watcher::refine(Region& region, unsigned granule_bits) {
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

void Watcher::check_cells(Region& region, size_t offset, const Access& access) {
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

Stamp Watcher::stamp(unsigned who, const Clock& clock, const abi::Thread& thread, const Access& access) const {
  return {clock.epoch, who, access.kind == kAtomic, clock.simd_epochs[thread.simdgroup],
          static_cast<uint32_t>(reinterpret_cast<uintptr_t>(access.caller) - library_.base())};
}

// The threads of an earlier access that is unordered with this thread's.
unsigned Watcher::together(const Stamp& earlier, const Clock& clock, const abi::Thread& thread) {
  if (earlier.epoch < clock.threadgroup_start || earlier.who == kSeveralThreadgroups) {
    return kSeveralThreadgroups;
  }
  return of_simdgroup(earlier, thread.simdgroup) ? kSimdgroup + thread.simdgroup : kSeveral;
}

// Whether the stamped access is ordered before this thread's next one.
bool Watcher::in_order(const Stamp& earlier, const Region& region, const Clock& clock,
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

void Watcher::on_load(Region& region, Cell& cell, size_t offset, const Access& access) {
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
  // Keep only the latest of ordered reads: whatever is ordered after it is ordered after the earlier ones.
  Stamp& read = cell.read;
  unsigned who = thread.index;
  if (read.epoch != 0 && !in_order(read, region, clock, thread)) {
    const bool atomic = access.kind == kAtomic;
    if (atomic && !read.atomic) {
      return;  // the plain read is in the way of more
    }
    who = atomic == read.atomic ? together(read, clock, thread) : who;
  }
  read = stamp(who, clock, thread, access);
}

void Watcher::on_store(Region& region, Cell& cell, size_t offset, const Access& access) {
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
  if (cell.read.epoch != 0 && !in_order(cell.read, region, clock, thread) &&
      !(access.kind == kAtomic && cell.read.atomic)) {
    race(region, offset, access, cell.read, "read");
  }
  cell.write = stamp(who, clock, thread, access);
  cell.read = {};
}

void Watcher::finish() {
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
      throw Fault("[" + simulation_.kernel_name() + "] buffer \"" + region.name + "\" was not written at byte " +
                  std::to_string((first - region.cells.begin()) << region.granule_bits) + " (" +
                  std::to_string(count << region.granule_bits) + " of its " + std::to_string(region.bytes) +
                  " bytes never were)" +
                  element_of(region.name, (first - region.cells.begin()) << region.granule_bits, item_of(region, 0)));
    }
  }
}

// Read once for each library: a launch may be over sooner than its library is read.
const Lines& Watcher::lines() const {
  static std::map<std::string, Lines> read;  // launches run one at a time
  return read.try_emplace(library_.path(), library_.path()).first->second;
}

std::string Watcher::where(uint32_t relative) const {
  const std::string line = lines().at(relative - 1);  // the address points behind the instruction
  return line.empty() ? "" : " (" + line + ")";
}

std::string Watcher::where(const void* caller) const {
  return where(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(caller) - library_.base()));
}

std::string Watcher::text_of(const Access& access) const {
  const char* verb = access.kind == kLoad ? " reads " : access.kind == kStore ? " writes " : " atomically accesses ";
  return simulation_.running_name() + verb + std::to_string(access.bytes) + (access.bytes == 1 ? " byte" : " bytes") +
         where(access.caller) + " ";
}

std::string Watcher::place_of(const Region& region, size_t offset) const {
  const char* space = region.space == Region::device ? " of buffer \"" : " of threadgroup array \"";
  return "at byte " + std::to_string(offset) + space + region.name + "\"";
}

void Watcher::fail(const std::string& what) {
  simulation_.fail(what);
}

void Watcher::fail_at(const Region& region, size_t offset, const Access& access, const std::string& what) {
  fail(text_of(access) + place_of(region, offset) + what +
       element_of(region.name, static_cast<int64_t>(offset), item_of(region, access.bytes)));
}

std::string Watcher::lines_of(const std::vector<const void*>& callers) const {
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

void Watcher::race(const Region& region, size_t offset, const Access& access, const Stamp& other, const char* did) {
  fail(race_text(region, offset, access, other, did));
}

std::string Watcher::race_text(const Region& region, size_t offset, const Access& access, const Stamp& other,
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
