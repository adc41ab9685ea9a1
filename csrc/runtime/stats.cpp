#include "runtime/stats.h"

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "python/registry.h"

namespace nb = nanobind;

namespace mittens::stats {

namespace {

// A kernel that ran, by address: this is on the path of every kernel.
struct Run {
  const char* primitive;
  const char* executor;
  Name kernel;

  bool operator==(const Run&) const = default;
};

struct RunHash {
  size_t operator()(const Run& run) const {
    const std::hash<const void*> of;
    return (of(run.primitive) * 31 + of(run.executor)) * 31 + std::hash<Name>()(run.kernel);
  }
};

using Key = std::tuple<std::string, std::string, std::string>;
using Row = std::tuple<std::string, std::string, std::string, uint64_t>;

using Counter = std::atomic<uint64_t>;

std::mutex lock;
// Never erased: threads keep addresses of them, and may outlive static destructors.
auto& runs = *new std::unordered_map<Run, Counter, RunHash>();
std::map<Key, uint64_t> to_mx;  // op, reason, nothing

Counter& counter_of(const Run& run) {
  const std::scoped_lock guard(lock);
  return runs[run];
}

std::vector<Row> rows(const std::map<Key, uint64_t>& counts) {
  std::vector<Row> all;
  for (const auto& [key, n] : counts) {
    all.emplace_back(std::get<0>(key), std::get<1>(key), std::get<2>(key), n);
  }
  return all;
}

std::pair<std::vector<Row>, std::vector<Row>> read(bool reset) {
  const std::scoped_lock guard(lock);
  std::map<Key, uint64_t> by_text;
  for (auto& [run, counter] : runs) {
    if (const uint64_t n = reset ? counter.exchange(0) : counter.load()) {
      by_text[{run.primitive, run.executor, run.kernel.text()}] += n;
    }
  }
  std::pair counts(rows(by_text), rows(to_mx));
  if (reset) {
    to_mx.clear();
  }
  return counts;
}

void bind(nb::module_& module) {
  module.def("stats", &read, nb::arg("reset"),
             "Primitive, executor, kernel and how often it ran; op, reason, nothing and how many calls went to mx.");
}

const Register registered(bind);

}  // namespace

void count_run(const char* primitive, const char* executor, Name kernel) {
  static thread_local std::unordered_map<Run, Counter*, RunHash> known;
  const Run run{primitive, executor, kernel};
  Counter*& counter = known[run];
  if (!counter) {
    counter = &counter_of(run);
  }
  counter->fetch_add(1, std::memory_order_relaxed);
}

void count_mx(const char* op, const std::string& reason) {
  const std::scoped_lock guard(lock);
  ++to_mx[{op, reason, ""}];
}

}  // namespace mittens::stats
