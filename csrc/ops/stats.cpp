#include "ops/stats.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "ops/registry.h"

namespace nb = nanobind;

namespace mittens::stats {

namespace {

using Key = std::tuple<std::string, std::string, std::string>;
using View = std::tuple<std::string_view, std::string_view, std::string_view>;

// Found by views: this is on the path of every kernel.
struct Hash {
  using is_transparent = void;

  size_t operator()(const View& view) const {
    const std::hash<std::string_view> hash;
    return (hash(std::get<0>(view)) * 31 + hash(std::get<1>(view))) * 31 + hash(std::get<2>(view));
  }
  size_t operator()(const Key& key) const {
    return operator()(View(key));
  }
};

using Counts = std::unordered_map<Key, uint64_t, Hash, std::equal_to<>>;

std::mutex lock;
Counts runs;   // primitive, executor, kernel
Counts to_mx;  // op, reason, nothing

void count(Counts& counts, const View& view) {
  const std::scoped_lock guard(lock);
  const auto found = counts.find(view);
  if (found != counts.end()) {
    ++found->second;
  } else {
    counts.emplace(Key(std::get<0>(view), std::get<1>(view), std::get<2>(view)), 1);
  }
}

using Row = std::tuple<std::string, std::string, std::string, uint64_t>;

std::vector<Row> rows(const Counts& counts) {
  std::vector<Row> all;
  for (const auto& [key, n] : counts) {
    all.emplace_back(std::get<0>(key), std::get<1>(key), std::get<2>(key), n);
  }
  std::sort(all.begin(), all.end());
  return all;
}

std::pair<std::vector<Row>, std::vector<Row>> read(bool reset) {
  const std::scoped_lock guard(lock);
  std::pair counts(rows(runs), rows(to_mx));
  if (reset) {
    runs.clear();
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

void count_run(const char* primitive, const char* executor, const std::string& kernel) {
  count(runs, View(primitive, executor, kernel));
}

void count_mx(const char* op, const std::string& reason) {
  count(to_mx, View(op, reason, ""));
}

}  // namespace mittens::stats
