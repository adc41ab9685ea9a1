// Launching any kernel of a .metal file or registered source from Python: `_ext.launch`. Its arguments are not checked
// here: mlx_mittens/ops/custom.py does that, against the kernel's signature.
#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/variant.h>
#include <nanobind/stl/vector.h>

#include "backends/launch.h"
#include "backends/memory.h"
#include "backends/metal.h"
#include "mlx/primitives.h"
#include "mlx/utils.h"
#include "python/registry.h"
#include "runtime/contiguous.h"
#include "runtime/exporting.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

using Triple = std::array<uint32_t, 3>;

// A launch but for its arrays: where they go among the arguments.
struct Plan {
  Launch launch;
  std::vector<uint32_t> input_indices;
  std::vector<uint32_t> output_indices;
  bool by_rows;  // inputs that are not row contiguous are copied
};

class CustomKernel : public mx::Primitive {
 public:
  CustomKernel(mx::Stream stream, Plan plan) : mx::Primitive(stream), plan_(std::move(plan)) {}

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    Arrays copies;
    run_in_simulator({bound(inputs, outputs, copies)}, stream());
  }

  void eval_gpu(const Arrays& inputs, Arrays& outputs) override {
    Arrays copies;
    run_on_gpu(bound(inputs, outputs, copies), stream());
  }

  const char* name() const override {
    return "MittensLaunch";  // MLX has a CustomKernel, which it tells by its name
  }

 private:
  // A kernel takes a view's first element for the start of its buffer, so views that run backwards are copied.
  const Arrays& forwards(const Arrays& given, Arrays& copies) {
    for (const auto& input : given) {
      copies.push_back(span_of(input).offset < 0 ? contiguous(input, stream()) : input);
    }
    return copies;
  }

  // A view that is not copied is handed over as the part of memory that it spans. The launch refers to the copies.
  Launch bound(const Arrays& given, Arrays& outputs, Arrays& copies) {
    Launch launch = plan_.launch;
    const Arrays& inputs = plan_.by_rows ? row_contiguous(given, stream(), copies) : forwards(given, copies);
    for (size_t i = 0; i < inputs.size(); ++i) {
      launch.arguments[plan_.input_indices[i]] = Input{inputs[i], 0, span_of(inputs[i]).bytes};
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
      allocate_output(outputs[i], stream());
      launch.arguments[plan_.output_indices[i]] = Output{outputs[i]};
    }
    return launch;
  }

  Plan plan_;
};

using IndexedInput = std::pair<uint32_t, mx::array>;
using IndexedOutput = std::tuple<uint32_t, std::vector<int>, mx::Dtype>;
using IndexedBytes = std::tuple<uint32_t, nb::bytes, bool>;

Arrays launch(const std::string& file, const std::string& kernel, const std::vector<IndexedInput>& inputs,
              const std::vector<IndexedOutput>& outputs, const std::vector<IndexedBytes>& constants,
              const std::vector<uint32_t>& absent, Triple threadgroups, Triple threads, uint32_t threadgroup_bytes,
              const std::map<uint32_t, std::string>& function_constants, bool by_rows, mx::StreamOrDevice where) {
  refuse_export("ops.custom.launch");
  const mx::Stream stream = mx::to_stream(where);
  if (stream.device == mx::Device::gpu && metal::built()) {
    throw std::runtime_error("[launch] kernel " + kernel + ": on a Mac mx.fast.metal_kernel runs kernels of one's own");
  }
  Plan plan;
  plan.launch.file = file;
  plan.launch.kernel = kernel;
  plan.launch.threadgroups = {threadgroups[0], threadgroups[1], threadgroups[2]};
  plan.launch.threads = {threads[0], threads[1], threads[2]};
  plan.launch.threadgroup_bytes = threadgroup_bytes;
  plan.launch.function_constants = function_constants;
  plan.by_rows = by_rows;
  auto& arguments = plan.launch.arguments;
  const auto place = [&arguments](uint32_t index) -> Argument& {
    arguments.resize(std::max<size_t>(arguments.size(), index + 1), Absent{});
    return arguments[index];
  };

  Arrays arrays;
  for (const auto& [index, array] : inputs) {
    place(index);
    plan.input_indices.push_back(index);
    arrays.push_back(array);
  }
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
  for (const auto& [index, shape, dtype] : outputs) {
    place(index);
    plan.output_indices.push_back(index);
    shapes.emplace_back(shape.begin(), shape.end());
    dtypes.push_back(dtype);
  }
  for (const auto& [index, bytes, by_pointer] : constants) {
    const auto* data = reinterpret_cast<const std::byte*>(bytes.c_str());
    place(index) = Bytes{{data, data + bytes.size()}, by_pointer};
  }
  for (uint32_t index : absent) {
    place(index) = Absent{true};
  }
  return mx::array::make_arrays(std::move(shapes), dtypes, std::make_shared<CustomKernel>(stream, std::move(plan)),
                                arrays);
}

void bind(nb::module_& module) {
  module.def(
      "launch", &launch, "file"_a, "kernel"_a, "inputs"_a, "outputs"_a, "constants"_a, "absent"_a, "threadgroups"_a,
      "threads"_a, "threadgroup_bytes"_a = 0, "function_constants"_a = std::map<uint32_t, std::string>{},
      "by_rows"_a = true, "stream"_a = nb::none(),
      "Launches a kernel of a .metal file or registered source, as lazy arrays: by CUDA on a GPU's stream, in\n"
      "the simulator on the CPU's. Each argument comes with its buffer index: inputs (index, array), outputs\n"
      "(index, shape, dtype), constants (index, bytes, whether the kernel takes a pointer); absent are indices of\n"
      "parameters that get nothing. by_rows: copy inputs that are not row contiguous.");
  module.def(
      "strides",
      [](const mx::array& array) { return std::vector<int64_t>(array.strides().begin(), array.strides().end()); },
      "array"_a, "Elements from one of an evaluated array to the next along each axis.");
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
