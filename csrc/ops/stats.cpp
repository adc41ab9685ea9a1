#include "ops/stats.h"

#include <cstdint>
#include <map>
#include <mutex>
#include <string_view>
#include <tuple>
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

std::mutex lock;
std::map<Key, uint64_t, std::less<>> runs;   // primitive, executor, kernel
std::map<Key, uint64_t, std::less<>> to_mx;  // op, reason, nothing

void count(std::map<Key, uint64_t, std::less<>>& counts, const View& view) {
  const std::scoped_lock guard(lock);
  const auto found = counts.find(view);
  if (found != counts.end()) {
    ++found->second;
  } else {
    counts.emplace(Key(std::get<0>(view), std::get<1>(view), std::get<2>(view)), 1);
  }
}

using Row = std::tuple<std::string, std::string, std::string, uint64_t>;

std::vector<Row> rows(const std::map<Key, uint64_t, std::less<>>& counts) {
  std::vector<Row> all;
  for (const auto& [key, n] : counts) {
    all.emplace_back(std::get<0>(key), std::get<1>(key), std::get<2>(key), n);
  }
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
