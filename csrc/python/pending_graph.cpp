// MLX's graph of pending work, for Python: the operations that an evaluation will run, with their
// shapes. On a CPU mx composes some functions, such as mx.fast.rms_norm, of many operations where a GPU has one kernel.
// Python notes the calls of those, and each is one operation here.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <sstream>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "mlx/primitives.h"
#include "mlx/utils.h"
#include "mlx_internals/buffer_ownership.h"
#include "python/registry.h"
#include "runtime/primitive.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

bool is_ours(const mx::array& array) {
  return std::string_view(array.primitive().name()).starts_with("Mittens");
}

nb::tuple tuple_of(const auto& values) {
  nb::list list;
  for (const auto& value : values) {
    list.append(value);
  }
  return nb::tuple(list);
}

std::string name_of(mx::Dtype dtype) {
  std::ostringstream text;
  text << dtype;
  return text.str();
}

const char* name_of(mx::QuantizationMode mode) {
  switch (mode) {
    case mx::QuantizationMode::Affine:
      return "affine";
    case mx::QuantizationMode::Mxfp4:
      return "mxfp4";
    case mx::QuantizationMode::Mxfp8:
      return "mxfp8";
    case mx::QuantizationMode::Nvfp4:
      return "nvfp4";
  }
  return "another";
}

// Facts beside shapes that a kernel depends on, for operations whose kernels are known.
nb::tuple details_of(const mx::Primitive& primitive) {
  const std::string_view name = primitive.name();
  if (name == "QuantizedMatmul") {
    const auto [group_size, bits, mode, transpose] = static_cast<const mx::QuantizedMatmul&>(primitive).state();
    return nb::make_tuple(group_size, bits, name_of(mode), transpose);
  }
  if (name == "GatherQMM") {
    const auto [group_size, bits, mode, transpose, left_sorted, right_sorted] =
        static_cast<const mx::GatherQMM&>(primitive).state();
    return nb::make_tuple(group_size, bits, name_of(mode), transpose, right_sorted);
  }
  if (name == "GatherMM") {
    const auto [left_sorted, right_sorted] = static_cast<const mx::GatherMM&>(primitive).state();
    return nb::make_tuple(right_sorted);
  }
  if (name == "Softmax") {
    return nb::make_tuple(static_cast<const mx::Softmax&>(primitive).state());
  }
  if (name == "Transpose") {
    return tuple_of(static_cast<const mx::Transpose&>(primitive).state());
  }
  return nb::make_tuple();
}

class PendingGraph {
 public:
  // Notes a call: the outputs that are still pending become one operation on the inputs.
  void note(const Arrays& outputs, const Arrays& inputs, int64_t number) {
    for (const mx::array& output : outputs) {
      if (is_pending(output) && !output.is_tracer()) {
        calls_.push_back({WeakArray(output), std::vector<WeakArray>(inputs.begin(), inputs.end()), number});
      }
    }
  }

  // The operations that an evaluation of the arrays runs, each after its inputs'. A tuple for each: its name, the
  // number of the call or -1, details, inputs and outputs. An input is a shape, a dtype, bytes of an element, the
  // operation that makes it or -1, and whether it is known to be row contiguous; an output is the first three.
  nb::list walk(const Arrays& arrays) {
    find_calls();
    Walk walk;
    std::vector<std::pair<mx::array, bool>> stack;
    for (auto array = arrays.rbegin(); array != arrays.rend(); ++array) {
      stack.emplace_back(*array, false);
    }
    while (!stack.empty()) {
      auto [array, expanded] = std::move(stack.back());
      stack.pop_back();
      if (!is_pending(array) || walk.places.contains(array.id())) {
        continue;
      }
      const Arrays inputs = inputs_of(array);
      if (expanded) {
        append(walk, array, inputs);
        continue;
      }
      stack.emplace_back(array, true);
      for (auto input = inputs.rbegin(); input != inputs.rend(); ++input) {
        stack.emplace_back(*input, false);
      }
    }
    return walk.operations;
  }

 private:
  struct Call {
    WeakArray output;
    std::vector<WeakArray> inputs;
    int64_t number;
  };

  struct Walk {
    nb::list operations;
    std::unordered_map<std::uintptr_t, int64_t> places;  // of arrays, among the operations
  };

  // The calls whose outputs are still to be computed; the others are forgotten.
  void find_calls() {
    by_output_.clear();
    std::vector<Call> left;
    for (Call& call : calls_) {
      const auto output = call.output.lock();
      if (output && is_pending(*output) && !is_ours(*output)) {
        by_output_[output->id()] = left.size();
        left.push_back(std::move(call));
      }
    }
    calls_ = std::move(left);
  }

  const Call* call_of(const mx::array& array) const {
    const auto found = by_output_.find(array.id());
    return found == by_output_.end() ? nullptr : &calls_[found->second];
  }

  Arrays inputs_of(const mx::array& array) const {
    const Call* call = call_of(array);
    if (!call) {
      return array.inputs();
    }
    Arrays inputs;
    for (const WeakArray& weak : call->inputs) {
      if (const auto input = weak.lock()) {
        inputs.push_back(*input);
      }
    }
    return inputs;
  }

  void append(Walk& walk, const mx::array& array, const Arrays& inputs) const {
    const Call* call = call_of(array);
    nb::list taken;
    for (const mx::array& input : inputs) {
      const auto place = walk.places.find(input.id());
      const bool is_made_here = place != walk.places.end();
      taken.append(nb::make_tuple(tuple_of(input.shape()), name_of(input.dtype()), input.itemsize(),
                                  is_made_here ? place->second : -1, !is_made_here && input.flags().row_contiguous));
    }
    nb::list made;
    const auto number = static_cast<int64_t>(nb::len(walk.operations));
    for (const mx::array& output : call ? Arrays{array} : array.outputs()) {
      made.append(nb::make_tuple(tuple_of(output.shape()), name_of(output.dtype()), output.itemsize()));
      walk.places[output.id()] = number;
    }
    const mx::Primitive& primitive = array.primitive();
    walk.operations.append(nb::make_tuple(primitive.name(), call ? call->number : -1,
                                          call ? nb::make_tuple() : details_of(primitive), taken, made));
  }

  std::vector<Call> calls_;
  std::unordered_map<std::uintptr_t, size_t> by_output_;
};

void bind(nb::module_& module) {
  nb::class_<PendingGraph>(module, "PendingGraph", "MLX's pending work, as operations.")
      .def(nb::init<>())
      .def("note", &PendingGraph::note, "outputs"_a, "inputs"_a, "number"_a)
      .def("walk", &PendingGraph::walk, "arrays"_a);
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
