#include "simulator/simulation.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <numeric>

#include "simulator/runtime.h"
#include "simulator/texts.h"

namespace mittens::simulator {

namespace {

constexpr unsigned kMaxThreads = Stacks::kCount;
constexpr size_t kMaxThreadgroupBytes = 32 * 1024;
constexpr size_t kBufferSlots = 40;  // the arena's others are for threadgroup memory
constexpr long long kPollSteps = 1 << 17;
constexpr size_t kOvertime = 1 << 12;  // steps in which an endless loop shows its lines

Simulation* current = nullptr;

// A reader may see the parts of two launches, for as long as one begins.
std::atomic<uint64_t> launches_begun{0};
std::atomic<uint64_t> threadgroups_done{0};
std::atomic<uint64_t> threadgroups_planned{0};
std::atomic<uint64_t> polls{0};
std::atomic<void (*)()> poll_of_process{nullptr};

// Whether subnormal numbers are zero to this thread, for as long as it lives.
class SubnormalMode {
 public:
  explicit SubnormalMode(bool flush) : before_(control()) {
    if (flush) {
      set(before_ | kFlush);
    }
  }
  SubnormalMode(const SubnormalMode&) = delete;
  ~SubnormalMode() {
    set(before_);
  }

 private:
#if defined(__x86_64__)
  using Control = unsigned;
  static constexpr Control kFlush = 0x8040;  // of results, of operands
  static Control control() {
    return __builtin_ia32_stmxcsr();
  }
  static void set(Control control) {
    __builtin_ia32_ldmxcsr(control);
  }
#else
  using Control = uint64_t;
  static constexpr Control kFlush = uint64_t{1} << 24;
  static Control control() {
    Control control;
    asm volatile("mrs %0, fpcr" : "=r"(control));
    return control;
  }
  static void set(Control control) {
    asm volatile("msr fpcr, %0" : : "r"(control));
  }
#endif
  const Control before_;
};

uint64_t product(const uint32_t (&size)[3]) {
  return uint64_t{size[0]} * size[1] * size[2];
}

}  // namespace

abi::Runtime* runtime() {
  static abi::Runtime table{
      .thread = nullptr,
      .steps = 0,
      .pause = 0,
      .exchange = [](abi::Scope scope, const abi::Operation& operation, const void* value, unsigned bytes,
                     abi::Combine combine) -> const abi::Lanes& {
        return current->exchange(scope, operation, value, bytes, combine);
      },
      .barrier = [](abi::Scope scope, const abi::Operation& operation,
                    unsigned memory) { current->barrier(scope, operation, memory); },
      .threadgroup_array = [](const void* key, const char* name, unsigned long bytes,
                              abi::Site site) { return current->threadgroup_array(key, name, bytes, site); },
      .atomic = [](const volatile void* address, unsigned long bytes, bool reads, bool writes,
                   const void* caller) { current->watcher.atomic(address, bytes, reads, writes, caller); },
      .load = [](const void* address, unsigned long bytes,
                 const void* caller) { current->watcher.load(address, bytes, caller); },
      .store = [](const void* address, unsigned long bytes,
                  const void* caller) { current->watcher.store(address, bytes, caller); },
      .lanes = [](const void* address, unsigned long bytes, unsigned mask, bool stores,
                  const void* caller) { current->watcher.lanes(address, bytes, mask, stores, caller); },
      .outside_array = [](const void* caller) { current->watcher.outside_array(caller); },
      .private_array = [](void* address, unsigned long bytes, unsigned long unit, const char* name) -> void* {
        current->watcher.private_array(address, bytes, unit, name);
        return address;
      },
      .paused = [](const void* caller) { current->pause(caller); },
      .fault = [](const char* what, abi::Site site, const void* caller) { current->fault(what, site, caller); },
  };
  return &table;
}

Simulation::Simulation(Arena& arena, Stacks& stacks, Library& library, const Dispatch& dispatch, const Options& options)
    : watcher(*this, arena, library, stacks, counts_),
      arena_(arena),
      stacks_(stacks),
      kernel_(*library.find(dispatch.kernel)),
      dispatch_(dispatch),
      options_(options),
      generator_(options.seed),
      poll_steps_(kPollSteps) {
  watcher.start(options_);
}

void Simulation::bind_buffers() {
  unsigned highest = 0;
  for (unsigned i = 0; i < kernel_.argument_count; ++i) {
    if (!kernel_.arguments[i].threadgroup) {
      highest = std::max(highest, kernel_.arguments[i].index + 1);
    }
  }
  buffers_.assign(std::max<size_t>(highest, dispatch_.buffers.size()), nullptr);
  threadgroup_buffers_.assign(kernel_.argument_count + 1, nullptr);
  if (dispatch_.buffers.size() > kBufferSlots) {
    throw std::invalid_argument("[simulator] " + dispatch_.kernel + " was given " +
                                plural(dispatch_.buffers.size(), "buffer") + "; at most " +
                                std::to_string(kBufferSlots) + " are possible");
  }
  for (size_t i = 0; i < dispatch_.buffers.size(); ++i) {
    const Buffer& buffer = dispatch_.buffers[i];
    if (!buffer.data && buffer.bytes > 0) {
      continue;
    }
    Region region{.space = Region::device, .name = buffer.name, .bytes = buffer.bytes, .item = buffer.item};
    region.writable = buffer.role == Buffer::output || buffer.role == Buffer::inout;
    region.constant = buffer.role == Buffer::constant;
    region.initialised = buffer.role != Buffer::output;
    region.buffer = reinterpret_cast<uintptr_t>(buffer.data) - buffer.offset;
    region.offset = buffer.offset;
    region.complete = buffer.role == Buffer::output && options_.complete;
    for (unsigned a = 0; a < kernel_.argument_count && region.name.empty(); ++a) {
      if (!kernel_.arguments[a].threadgroup && kernel_.arguments[a].index == i) {
        region.name = kernel_.arguments[a].name;
      }
    }
    if (buffer.bytes > buffer.room) {
      throw Fault("[" + dispatch_.kernel + "] argument " + std::to_string(i) + " '" + region.name + "' is bound to " +
                  plural(buffer.bytes, "byte") + ", its buffer has " + std::to_string(buffer.room) + " from there on");
    }
    char* memory = arena_.place(i, buffer.bytes, buffer.offset);
    if (region.initialised) {
      std::memcpy(memory, buffer.data, buffer.bytes);
    } else {
      std::memset(memory, 0xff, buffer.bytes);  // NaN in every type of float
    }
    region.begin = reinterpret_cast<uintptr_t>(memory);
    buffers_[i] = memory;
    watcher.add(i, std::move(region));
  }
  for (unsigned a = 0; a < kernel_.argument_count; ++a) {
    const abi::Argument& argument = kernel_.arguments[a];
    if (argument.threadgroup && argument.index < threadgroup_buffers_.size()) {
      threadgroup_buffers_[argument.index] =
          threadgroup_array(&argument, argument.name, dispatch_.threadgroup_bytes, {"the launch", 0});
    }
  }
}

Counts Simulation::run() {
  const uint64_t threads = product(dispatch_.threads);
  const unsigned limit = std::min(kMaxThreads, kernel_.max_threads);
  if (threads == 0 || threads > limit) {
    throw Fault("[" + dispatch_.kernel + "] a threadgroup of " + std::to_string(threads) + " threads, where 1 to " +
                std::to_string(limit) + " are possible");
  }
  fibers_.resize(threads);
  ready_.resize(threads + 1);
  quads_.resize((threads + abi::quad_width - 1) / abi::quad_width);
  simdgroups_.resize((threads + abi::simd_width - 1) / abi::simd_width);
  order_.resize(threads);
  current = this;
  runtime()->tensor_layout = options_.shuffled_tensors ? abi::shuffled_layout : abi::layout_of_m5;
  bind_buffers();

  std::vector<uint64_t> groups(product(dispatch_.threadgroups));
  std::iota(groups.begin(), groups.end(), 0);
  if (options_.seed) {
    std::shuffle(groups.begin(), groups.end(), generator_);
  }
  threadgroups_done = 0;
  threadgroups_planned = groups.size();
  ++launches_begun;
  const uint64_t row = dispatch_.threadgroups[0];
  const uint64_t plane = row * dispatch_.threadgroups[1];
  for (const uint64_t group : groups) {
    const auto x = static_cast<uint32_t>(group % row);
    const auto y = static_cast<uint32_t>(group % plane / row);
    const auto z = static_cast<uint32_t>(group / plane);
    run_threadgroup({x, y, z});
    threadgroups_done.fetch_add(1, std::memory_order_relaxed);
  }
  watcher.finish();
  for (size_t i = 0; i < dispatch_.buffers.size(); ++i) {
    const Buffer& buffer = dispatch_.buffers[i];
    if (buffers_[i] && (buffer.role == Buffer::output || buffer.role == Buffer::inout)) {
      std::memcpy(buffer.data, buffers_[i], buffer.bytes);
    }
  }
  return counts_;
}

void Simulation::start_threads(const uint32_t (&position)[3]) {
  abi::Thread thread{};
  unsigned size[3];
  for (int d = 0; d < 3; ++d) {
    const uint64_t start = uint64_t{position[d]} * dispatch_.threads[d];
    const uint64_t whole = uint64_t{dispatch_.threadgroups[d]} * dispatch_.threads[d];
    const uint64_t grid = dispatch_.grid[d] ? dispatch_.grid[d] : whole;
    size[d] = static_cast<unsigned>(std::min<uint64_t>(dispatch_.threads[d], grid - start));
    thread.threadgroup[d] = position[d];
    thread.threads_per_threadgroup[d] = size[d];
    thread.dispatch_threads_per_threadgroup[d] = dispatch_.threads[d];
    thread.threadgroups[d] = dispatch_.threadgroups[d];
    thread.threads_per_grid[d] = static_cast<unsigned>(grid);
  }
  const unsigned count = size[0] * size[1] * size[2];
  thread.simdgroups = (count + abi::simd_width - 1) / abi::simd_width;
  thread.quadgroups = (count + abi::quad_width - 1) / abi::quad_width;
  fibers_.resize(count);
  for (unsigned i = 0; i < count; ++i) {
    const unsigned at[3] = {i % size[0], i / size[0] % size[1], i / (size[0] * size[1])};
    for (int d = 0; d < 3; ++d) {
      thread.position_in_threadgroup[d] = at[d];
      thread.position_in_grid[d] = position[d] * dispatch_.threads[d] + at[d];
    }
    thread.index = i;
    thread.lane = i % abi::simd_width;
    thread.simdgroup = i / abi::simd_width;
    Fiber& fiber = fibers_[i];
    fiber.thread = thread;
    fiber.state = Fiber::ready;
    fiber.context = stacks_.prepare(i, [] { current->run_thread(); });
  }
  counts_.threads += count;

  const auto start_rendezvous = [count](std::vector<Rendezvous>& rendezvous_points, abi::Scope scope, unsigned width) {
    for (unsigned i = 0; i * width < count; ++i) {
      Rendezvous& rendezvous = rendezvous_points[i];
      rendezvous.scope = scope;
      rendezvous.first = i * width;
      rendezvous.count = std::min(width, count - rendezvous.first);
      rendezvous.arrived = 0;
      rendezvous.parted = false;
      rendezvous.parity = 0;
      if (rendezvous.count < abi::simd_width) {
        std::memset(rendezvous.lanes, 0xff, sizeof(rendezvous.lanes));
      }
    }
  };
  start_rendezvous(quads_, abi::quad_scope, abi::quad_width);
  start_rendezvous(simdgroups_, abi::simdgroup_scope, abi::simd_width);
  threadgroup_.scope = abi::threadgroup_scope;
  threadgroup_.first = 0;
  threadgroup_.count = count;
  threadgroup_.arrived = 0;
  threadgroup_.parted = false;

  order_.resize(count);
  std::iota(order_.begin(), order_.end(), 0);
  if (options_.seed) {
    std::shuffle(order_.begin(), order_.end(), generator_);
  }
  ready_head_ = 0;
  ready_count_ = count;
  std::copy(order_.begin(), order_.end(), ready_.begin());
}

void Simulation::run_threadgroup(const uint32_t (&position)[3]) {
  start_threads(position);
  ++threadgroup_serial_;
  for (const size_t region : dynamic_regions_) {
    std::memset(reinterpret_cast<void*>(watcher.region(region).begin), 0xff, watcher.region(region).bytes);
  }
  watcher.start_threadgroup(position);
  runtime()->steps = static_cast<long long>(options_.step_limit);
  plan_pause();
  finished_ = 0;
  do {
    running_ = next_ready();
    switch_context(main_context_, running_->context);
    while (polling_) {
      polling_ = false;
      if (void (*poll)() = poll_of_process) {
        poll();
      }
      switch_context(main_context_, running_->context);
    }
  } while (!fault_ && ((options_.active_lanes && release_active_lanes()) ||
                       (options_.early_exits && release_barrier_without_finished())));
  if (!fault_ && finished_ < fibers_.size()) {
    fault_ = explain_deadlock();
  }
  if (!fault_ && !overtime_.empty()) {
    fault_ = "[" + dispatch_.kernel + "] " + explain_endless();
  }
  if (fault_) {
    throw Fault(*fault_);
  }
  poll_steps_ -= planned_at_ - runtime()->steps;
  watcher.finish_threadgroup();
}

void Simulation::run_thread() {
  entered_fiber();
  running_->base = static_cast<const void* const*>(__builtin_frame_address(0));
  kernel_.entry(buffers_.data(), threadgroup_buffers_.data());
  watcher.settle();
  running_->state = Fiber::finished;
  ++finished_;
  resume_next();
}

void Simulation::resume_next() {
  Fiber* leaving = running_;
  const bool for_good = leaving->state == Fiber::finished;
  if (ready_count_ == 0) {
    switch_context(leaving->context, main_context_, for_good);
    return;
  }
  running_ = next_ready();
  switch_context(leaving->context, running_->context, for_good);
}

Fiber* Simulation::next_ready() {
  Fiber* next = &fibers_[ready_[ready_head_]];
  ready_head_ = ready_head_ + 1 == ready_.size() ? 0 : ready_head_ + 1;
  --ready_count_;
  runtime()->thread = &next->thread;
  return next;
}

void* Simulation::threadgroup_array(const void* key, const char* name, unsigned long bytes, abi::Site site) {
  for (auto& array : arrays_) {
    if (array.key == key) {
      const Region& region = watcher.region(array.region);
      if (array.threadgroup != threadgroup_serial_) {
        array.threadgroup = threadgroup_serial_;
        std::memset(reinterpret_cast<void*>(region.begin), 0xff, region.bytes);
      }
      return reinterpret_cast<void*>(region.begin);
    }
  }
  const size_t end = threadgroup_bytes_ + (bytes + 15) / 16 * 16;
  counts_.threadgroup_bytes = std::max<uint64_t>(counts_.threadgroup_bytes, end);
  if (end > kMaxThreadgroupBytes) {
    const std::string what = "threadgroup memory is " + std::to_string(end) + " bytes with \"" + name + "\" (" +
                             plural(bytes, "byte") + ", " + text_of(site) + "); a threadgroup has " +
                             std::to_string(kMaxThreadgroupBytes);
    if (running_) {
      fail(what);
    }
    throw Fault("[" + dispatch_.kernel + "] " + what);
  }
  const size_t slot = kBufferSlots + arrays_.size();
  if (slot >= Arena::kSlots) {
    fail("more than " + std::to_string(Arena::kSlots - kBufferSlots) + " threadgroup arrays");
  }
  char* memory = arena_.place(slot, bytes);
  std::memset(memory, 0xff, bytes);
  watcher.add(slot, {.space = Region::threadgroup,
                     .name = name,
                     .begin = reinterpret_cast<uintptr_t>(memory),
                     .bytes = bytes,
                     .writable = true,
                     .packed = threadgroup_bytes_});
  threadgroup_bytes_ = end;
  arrays_.push_back({key, slot, threadgroup_serial_});
  if (!running_) {
    dynamic_regions_.push_back(slot);
  }
  return memory;
}

void Simulation::fail(const std::string& what) {
  fault_ = "[" + dispatch_.kernel + "] " + what;
  switch_context(abandoned_, main_context_, true);
  std::abort();  // nothing switches back to an abandoned fiber
}

void Simulation::fault(const std::string& what, const abi::Site& site, const void* caller) {
  fail(name_of(*running_) + (site.file ? ", " + text_of(site) : watcher.lines_of({caller})) + ": " + what);
}

// A threadgroup pauses at the next poll or behind its last step.
void Simulation::plan_pause() {
  planned_at_ = runtime()->steps;
  runtime()->pause = std::max<long long>(runtime()->steps - poll_steps_, -1);
}

void Simulation::pause(const void* caller) {
  if (runtime()->steps < 0) {
    if (overtime_.empty()) {
      endless_ = name_of(*running_);
    }
    overtime_.push_back(caller);
    if (overtime_.size() == kOvertime) {
      fail(explain_endless());
    }
    runtime()->pause = runtime()->steps;  // the next step is a pause too
    return;
  }
  ++polls;
  poll_steps_ = kPollSteps;
  plan_pause();
  polling_ = true;
  switch_context(running_->context, main_context_);
}

std::string Simulation::explain_endless() const {
  return "no end after " + std::to_string(options_.step_limit) + " steps (step_limit) of one threadgroup; " + endless_ +
         " was running" + watcher.lines_of(overtime_);
}

std::string Simulation::name_of(const Fiber& fiber) const {
  return "thread " + text_of(fiber.thread.position_in_threadgroup) + " of threadgroup " +
         text_of(fiber.thread.threadgroup);
}

Counts run(Library& library, const Dispatch& dispatch, const Options& options) {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  static Arena arena;
  static Stacks stacks;
  if (!library.find(dispatch.kernel)) {
    throw std::invalid_argument("[simulator] " + library.path() + " has no kernel \"" + dispatch.kernel + "\"");
  }
  Simulation simulation(arena, stacks, library, dispatch, options);
  struct Trim {
    ~Trim() {
      current = nullptr;
      arena.trim();
    }
  } trim;
  const SubnormalMode mode(options.flush_subnormals);
  return simulation.run();
}

Progress progress() {
  return {launches_begun, threadgroups_done, threadgroups_planned, polls};
}

void set_poll(void (*poll)()) {
  poll_of_process = poll;
}

}  // namespace mittens::simulator
