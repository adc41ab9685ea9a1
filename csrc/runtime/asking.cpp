#include "runtime/asking.h"

#include <cstdint>
#include <tuple>
#include <unordered_set>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "mlx/ops.h"
#include "python/registry.h"
#include "runtime/any_shape.h"
#include "runtime/primitive.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

thread_local CallPlan* asked = nullptr;

class Asking {
 public:
  explicit Asking(CallPlan& plan) : before_(asked) {
    asked = &plan;
  }
  ~Asking() {
    asked = before_;
  }
  Asking(const Asking&) = delete;
  Asking& operator=(const Asking&) = delete;

 private:
  CallPlan* before_;
  Expanding expanding_;
};

using Runs = std::vector<std::tuple<std::string, std::string, std::string>>;
using Fallbacks = std::vector<std::tuple<std::string, std::string>>;

std::tuple<Runs, Fallbacks> ask(const nb::callable& call) {
  CallPlan plan;
  {
    const Asking asking(plan);
    plan_evaluation(nb::cast<Arrays>(call()), plan);
  }
  std::tuple<Runs, Fallbacks> answer;
  for (const auto& [primitive, executor, kernel] : plan.runs) {
    std::get<0>(answer).emplace_back(primitive, executor, kernel.text());
  }
  for (const auto& [op, reason] : plan.fallbacks) {
    std::get<1>(answer).emplace_back(op, reason);
  }
  return answer;
}

void bind(nb::module_& module) {
  module.def(
      "stand_in",
      [](const std::vector<int>& shape, mx::Dtype dtype) {
        return stand_in(mx::Shape(shape.begin(), shape.end()), dtype);
      },
      "shape"_a, "dtype"_a, "An array of this shape that has no values: to be given to `ask` alone.");
  module.def("ask", &ask, "call"_a,
             "What the evaluation of the arrays that a function lists would run: primitive, executor and kernel for "
             "each kernel; and op and reason for each call of the function that goes to mx.");
}

const Register registered(bind);

}  // namespace

CallPlan* asked_plan() {
  return asked;
}

void plan_evaluation(const Arrays& arrays, CallPlan& plan) {
  std::unordered_set<std::uintptr_t> visited;
  Arrays pending = arrays;
  while (!pending.empty()) {
    const mx::array array = pending.back();
    pending.pop_back();
    if (!is_pending(array) || !visited.insert(array.primitive_id()).second) {
      continue;
    }
    if (auto* plannable = dynamic_cast<Plannable*>(&array.primitive())) {
      plannable->plan(array.inputs(), array.outputs(), plan);
    }
    pending.insert(pending.end(), array.inputs().begin(), array.inputs().end());
  }
}

}  // namespace mittens
