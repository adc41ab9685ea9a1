#include "runtime/calibration.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "backends/launch.h"
#include "python/registry.h"
#include "runtime/fallback.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

using Sizes = std::array<uint32_t, 4>;
using Row = std::tuple<std::string, std::string, uint32_t, Sizes, bool, std::string, int>;
using Asked = std::tuple<std::string, std::string, uint32_t, Sizes, std::string, bool, bool>;
using Forced = std::tuple<bool, std::string, int>;
// A kernel, its threadgroups and their threads, and the structs that it is handed.
using Launched = std::tuple<std::string, std::array<uint32_t, 6>, std::vector<uint8_t>>;

struct Point {
  std::array<float, 4> position;  // log2 of the sizes
  Choice choice;
};

struct Key {
  Name op;
  mx::Dtype::Val dtype;
  uint32_t format;

  bool operator==(const Key&) const = default;
};

struct KeyHash {
  size_t operator()(const Key& key) const {
    return (std::hash<Name>()(key.op) * 31 + static_cast<size_t>(key.dtype)) * 31 + key.format;
  }
};

using Table = std::unordered_map<Key, std::vector<Point>, KeyHash>;

constexpr const char* devices[] = {"cpu", "gpu", "simulator"};

struct State {
  std::mutex mutex;
  // Calls read a table without a lock; replaced tables are never freed, since a call may still read one.
  std::array<std::atomic<const Table*>, std::size(devices)> tables{};
  std::vector<std::unique_ptr<const Table>> kept;
  std::atomic<bool> active = false;  // whether a call has anything to ask for
  std::atomic<bool> watched = false;  // whether a choice is forced or anything is recorded, which takes the lock
  std::optional<Choice> forced;
  bool recording = false;
  std::set<Asked> asked;
  bool recording_launches = false;
  std::vector<Launched> launched;
};

State& state() {
  static State* instance = new State();
  return *instance;
}

std::map<std::string, std::vector<std::string>>& schedules() {
  static auto* instance = new std::map<std::string, std::vector<std::string>>();
  return *instance;
}

size_t device_index(const std::string& name) {
  const auto found = std::find(std::begin(devices), std::end(devices), name);
  if (found == std::end(devices)) {
    throw std::invalid_argument("device is '" + name + "': expected cpu, gpu or simulator");
  }
  return found - std::begin(devices);
}

size_t device_of(mx::Stream stream) {
  return stream.device == mx::Device::gpu ? 1 : simulator_enabled() ? 2 : 0;
}

std::array<float, 4> position_of(const Sizes& sizes) {
  std::array<float, 4> position;
  std::transform(sizes.begin(), sizes.end(), position.begin(),
                 [](uint32_t size) { return std::log2(static_cast<float>(std::max(size, 1u))); });
  return position;
}

const char* dtype_name(mx::Dtype dtype) {
  return dtype == mx::float32 ? "float32" : dtype == mx::float16 ? "float16" : "bfloat16";
}

mx::Dtype dtype_named(const std::string& name) {
  for (mx::Dtype dtype : {mx::float32, mx::float16, mx::bfloat16}) {
    if (name == dtype_name(dtype)) {
      return dtype;
    }
  }
  throw std::invalid_argument("dtype is '" + name + "': expected float32, float16 or bfloat16");
}

// The answer for a problem without measurements.
const Choice& unknown() {
  static const Choice none;
  return none;
}

// The answer for a problem whose neighbours all go to mx, by several plans.
const Choice& any_plan_but_mx() {
  static const Choice choice{true, true, {}, 0};
  return choice;
}

// The choice measured nearest to a problem, if one is near; else its neighbours' choice, if they agree.
const Choice& answer(const std::vector<Point>& points, const std::array<float, 4>& position) {
  constexpr float near = 1.001f;  // a factor of two in a size, with room for rounding
  constexpr float neighbouring = 3.999f;  // less than a factor of 16
  const Point* nearest = nullptr;
  const Choice* first = nullptr;  // of the neighbours
  bool same_side = true, same_plan = true;
  std::array<bool, 4> from_below{}, from_above{};
  float least = 0;
  for (const Point& point : points) {
    float sum = 0, most = 0;
    for (size_t i = 0; i < position.size(); ++i) {
      const float distance = std::abs(position[i] - point.position[i]);
      sum += distance;
      most = std::max(most, distance);
    }
    if (most > neighbouring) {
      continue;
    }
    if (most <= near && (!nearest || sum < least)) {
      nearest = &point;
      least = sum;
    }
    for (size_t i = 0; i < position.size(); ++i) {
      from_below[i] |= point.position[i] <= position[i] + near;
      from_above[i] |= point.position[i] >= position[i] - near;
    }
    first = first ? first : &point.choice;
    same_side &= point.choice.mx == first->mx;
    same_plan &= point.choice.schedule == first->schedule && point.choice.parallelism == first->parallelism;
  }
  if (nearest) {
    return nearest->choice;
  }
  const auto all = [](const std::array<bool, 4>& sides) {
    return std::all_of(sides.begin(), sides.end(), [](bool side) { return side; });
  };
  if (!first || !same_side || !all(from_below) || !all(from_above)) {
    return unknown();
  }
  return same_plan ? *first : first->mx ? any_plan_but_mx() : unknown();
}

const Choice& search(const Table& table, const Problem& problem) {
  const auto found = table.find(Key{problem.op, problem.dtype.val(), problem.format});
  return found == table.end() ? unknown() : answer(found->second, position_of(problem.sizes));
}

// Each thread knows the last problems that it looked up, by their parts: a layer asks for the same ones at every token.
struct Known {
  const Table* table;  // none is freed, so no other one has its address, nor has a choice in it
  const char* op;
  mx::Dtype::Val dtype;
  uint32_t format;
  Sizes sizes;
  const Choice* choice;
};
constinit thread_local std::array<Known, 64> known_problems{};

const Choice& look_up(const Problem& problem, const Table& table) {
  const mx::Dtype::Val dtype = problem.dtype.val();
  // Sizes are often powers of two; multiplying by an odd number mixes them into the high bits.
  constexpr uint64_t odd = 0x9e3779b97f4a7c15;
  uint64_t hash = (reinterpret_cast<uintptr_t>(problem.op) + static_cast<uint64_t>(dtype) + problem.format) * odd;
  for (uint32_t size : problem.sizes) {
    hash = (hash ^ hash >> 32 ^ size) * odd;
  }
  static_assert(std::tuple_size_v<decltype(known_problems)> == 1 << 6);
  Known& mine = known_problems[hash >> (64 - 6)];
  if (mine.table != &table || mine.op != problem.op || mine.dtype != dtype || mine.format != problem.format ||
      mine.sizes != problem.sizes) {
    mine = {&table, problem.op, dtype, problem.format, problem.sizes, &search(table, problem)};
  }
  return *mine.choice;
}

void update_active() {
  State& all = state();
  const bool any = std::any_of(all.tables.begin(), all.tables.end(), [](const auto& table) { return table.load(); });
  all.watched = all.forced || all.recording || all.recording_launches;
  all.active = any || all.watched;
}

void load(const std::string& device, const std::vector<Row>& rows) {
  auto table = std::make_unique<Table>();
  for (const auto& [op, dtype, format, sizes, mx, schedule, parallelism] : rows) {
    (*table)[Key{op, dtype_named(dtype).val(), format}].push_back(
        {position_of(sizes), {true, mx, Name(schedule), parallelism}});
  }
  State& all = state();
  const size_t index = device_index(device);
  std::lock_guard lock(all.mutex);
  all.tables[index] = rows.empty() ? nullptr : table.get();
  all.kept.push_back(std::move(table));
  update_active();
}

void force(const std::optional<Forced>& choice) {
  State& all = state();
  std::lock_guard lock(all.mutex);
  all.forced.reset();
  if (choice) {
    const auto& [mx, schedule, parallelism] = *choice;
    all.forced = Choice{true, mx, Name(schedule), parallelism};
  }
  update_active();
}

std::vector<Asked> record(bool recording) {
  State& all = state();
  std::lock_guard lock(all.mutex);
  all.recording = recording;
  const std::set<Asked> asked = std::exchange(all.asked, {});
  update_active();
  return {asked.begin(), asked.end()};
}

std::vector<Launched> record_launches(bool recording) {
  State& all = state();
  std::lock_guard lock(all.mutex);
  all.recording_launches = recording;
  update_active();
  return std::exchange(all.launched, {});
}

void bind(nb::module_& module) {
  module.def(
      "calibration_load", &load, "device"_a, "rows"_a,
      "Makes these rows the calibration of a device, cpu, gpu or simulator: op, dtype, format, sizes, whether mx "
      "was faster, the schedule that won and its parallelism. Without rows there is none.");
  module.def("calibration_force", &force, "choice"_a.none(),
             "Makes one choice (whether mx, schedule, parallelism) that of every problem, as measurements of it need; "
             "None ends that.");
  module.def(
      "plan_schedules",
      [](const std::string& op) {
        const auto found = schedules().find(op);
        return found == schedules().end() ? std::vector<std::string>() : found->second;
      },
      "op"_a, "The names of the schedules in the plan table of an op.");
  module.def(
      "calibration_record", &record, "recording"_a,
      "Begins or ends to keep the problems of calls; returns those kept so far: op, dtype, format, sizes, device, "
      "whether a calibration knew them, and whether a plan asked, which follows a schedule or a parallelism.");
  module.def("calibration_launches", &record_launches, "recording"_a,
             "Begins or ends to keep launches; returns those kept so far: kernel, threadgroups and their threads, and "
             "the bytes of its structs.");
}

const Register registered(bind);

// planned: a plan asks.
Choice ask(const Problem& problem, mx::Stream stream, bool planned) {
  State& all = state();
  if (!all.active.load(std::memory_order_relaxed)) {
    return {};
  }
  const auto& sizes = problem.sizes;
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) {  // mx divides by zero for some of these
    return {};
  }
  const size_t device = device_of(stream);
  const Table* table = all.tables[device].load(std::memory_order_acquire);
  const Choice& choice = table ? look_up(problem, *table) : unknown();
  if (!all.watched.load(std::memory_order_relaxed)) {
    return choice;
  }
  std::lock_guard lock(all.mutex);
  if (all.recording) {
    all.asked.emplace(problem.op, dtype_name(problem.dtype), problem.format, problem.sizes, devices[device],
                      choice.known, planned);
  }
  return all.forced.value_or(choice);
}

}  // namespace

void Schedules::add(const char* op, const char* name) {
  std::vector<std::string>& known = schedules()[op];
  if (std::find(known.begin(), known.end(), name) == known.end()) {
    known.emplace_back(name);
  }
}

Choice calibrated(const Problem& problem, mx::Stream stream) {
  return ask(problem, stream, true);
}

void record_launch(const Launch& launch) {
  State& all = state();
  if (!all.watched.load(std::memory_order_relaxed)) {
    return;
  }
  std::lock_guard lock(all.mutex);
  if (!all.recording_launches) {
    return;
  }
  const Size3 groups = launch.threadgroups, threads = launch.threads;
  std::vector<uint8_t> structs;
  for (const Argument& argument : launch.arguments) {
    if (const Bytes* bytes = std::get_if<Bytes>(&argument)) {
      const auto* first = reinterpret_cast<const uint8_t*>(bytes->data.data());
      structs.insert(structs.end(), first, first + bytes->data.size());
    }
  }
  all.launched.emplace_back(launch.kernel.text(),
                            std::array{groups.x, groups.y, groups.z, threads.x, threads.y, threads.z},
                            std::move(structs));
}

bool prefer_mx(const Problem& problem, const char* reason, mx::Stream stream, const char* called) {
  const char* op = called ? called : problem.op;
  if (is_switched_off(op)) {
    return true;
  }
  const Choice choice = ask(problem, stream, false);
  if (choice.known) {
    return choice.mx && prefer_fallback(op, "a problem that mx computes faster, as measured on this machine");
  }
  return reason && prefer_fallback(op, reason);
}

}  // namespace mittens
