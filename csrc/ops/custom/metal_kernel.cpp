// Kernels of mx.fast.metal_kernel, in the simulator: MLX writes their text, we give them their arguments as MLX does.
#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "backends/frontend.h"
#include "backends/memory.h"
#include "backends/simulator.h"
#include "mlx/ops.h"
#include "mlx/primitives.h"
#include "mlx/transforms.h"
#include "python/registry.h"
#include "runtime/array_layout.h"
#include "runtime/exporting.h"
#include "simulator/memory_watcher.h"

namespace nb = nanobind;
namespace mx = mlx::core;

namespace mittens {

namespace {

using Arrays = std::vector<mx::array>;
using simulator::Buffer;

struct UserLaunch {
  std::string file;  // for the record
  std::string text;  // as MLX generated it
  std::string problem;  // why it does not compile, where that is known before
  std::string kernel;
  std::array<uint32_t, 3> grid;  // in threads
  std::array<uint32_t, 3> threadgroup;
  std::vector<std::tuple<bool, bool, bool>> infos;  // whether an input's shape, strides, ndim are arguments
  std::vector<std::string> initial;  // an element of each output, or none
  bool by_rows;  // inputs that are not row contiguous are copied
  simulator::Options options;
};

// An input as a kernel gets it: its bytes from the first element to the end of the last, and the layout that it may ask
// for. The dispatch points into it, so it must not move.
class View {
 public:
  // A buffer starts at its first element, so a view that runs backwards is copied although MLX would not. A view that
  // its memory has no room for stays where it lies: the simulator refuses it.
  View(const mx::array& array, bool by_rows) : strides_(array.strides()), ndim_(static_cast<int>(array.ndim())) {
    const auto [offset, bytes] = span_of(array);
    lying_ = buffer_of(array, offset, bytes, Buffer::input);
    const bool copied = offset < 0 || (by_rows && array.size() > 0 && !array.flags().row_contiguous);
    if (copied && lying_.bytes <= lying_.room) {
      copy_by_rows(array);
    }
  }
  View(const View&) = delete;
  View& operator=(const View&) = delete;

  Buffer buffer() {
    if (copy_.empty()) {
      return lying_;
    }
    Buffer copy{"", copy_.data(), copy_.size(), Buffer::input};
    copy.item = lying_.item;
    return copy;
  }
  const mx::Strides& strides() const {
    return strides_;
  }
  const int& ndim() const {
    return ndim_;
  }

 private:
  void copy_by_rows(const mx::array& array) {
    const size_t item = array.itemsize();
    const char* first = array.data<char>();
    copy_.resize(array.nbytes());
    for (size_t element = 0; element < array.size(); ++element) {
      int64_t from = 0;
      size_t rest = element;
      for (int d = ndim_ - 1; d >= 0; --d) {
        from += static_cast<int64_t>(rest % array.shape(d)) * array.strides(d);
        rest /= array.shape(d);
      }
      std::memcpy(copy_.data() + element * item, first + from * static_cast<int64_t>(item), item);
    }
    int64_t stride = 1;
    for (int d = ndim_ - 1; d >= 0; --d) {
      strides_[d] = stride;
      stride *= array.shape(d);
    }
  }

  Buffer lying_;
  mx::Strides strides_;
  int ndim_;
  std::vector<char> copy_;
};

void fill(mx::array& output, const std::string& element) {
  for (size_t at = 0; at < output.nbytes(); at += element.size()) {
    std::memcpy(output.data<char>() + at, element.data(), element.size());
  }
}

class UserKernel : public mx::Primitive {
 public:
  UserKernel(mx::Stream stream, UserLaunch launch) : mx::Primitive(stream), launch_(std::move(launch)) {}

  const char* name() const override {
    return "MittensMetalKernel";
  }

  void eval_gpu(const Arrays&, Arrays&) override {
    throw std::runtime_error("[metal_kernel] the simulator runs on the CPU");
  }

  // Compiled here, since MLX compiles a kernel where it is evaluated.
  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    if (!launch_.problem.empty()) {
      throw frontend::CompileError(launch_.problem);
    }
    const std::string library = frontend::user_library(launch_.file, launch_.text, launch_.kernel, launch_.options);
    wait_for_inputs(stream());
    simulator::Dispatch dispatch{.kernel = launch_.kernel, .buffers = {}, .threadgroups = {}, .threads = {}};
    std::deque<View> views;  // does not move its elements
    const auto by_value = [&](const auto* data, size_t count) {
      dispatch.buffers.push_back(
          {"", const_cast<void*>(static_cast<const void*>(data)), count * sizeof(*data), Buffer::constant});
    };
    for (size_t i = 0; i < inputs.size(); ++i) {
      View& view = views.emplace_back(inputs[i], launch_.by_rows);
      dispatch.buffers.push_back(view.buffer());
      const auto [shape, strides, ndim] = launch_.infos[i];
      if (shape && view.ndim() > 0) {
        by_value(inputs[i].shape().data(), view.ndim());
      }
      if (strides && view.ndim() > 0) {
        by_value(view.strides().data(), view.ndim());
      }
      if (ndim && view.ndim() > 0) {
        by_value(&view.ndim(), 1);
      }
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
      mx::array& output = outputs[i];
      allocate_output(output, stream());
      if (!launch_.initial.empty()) {
        fill(output, launch_.initial[i]);
      }
      dispatch.buffers.push_back(
          {"", output.data<char>(), output.nbytes(), launch_.initial.empty() ? Buffer::output : Buffer::inout});
      dispatch.buffers.back().item = output.itemsize();
    }
    for (int d = 0; d < 3; ++d) {
      dispatch.grid[d] = launch_.grid[d];
      dispatch.threads[d] = std::min(launch_.threadgroup[d], launch_.grid[d]);
      dispatch.threadgroups[d] = ceil_divide(launch_.grid[d], dispatch.threads[d]);
    }
    simulate(launch_.file, library, dispatch, launch_.options);
  }

 private:
  UserLaunch launch_;
};

using Triple = std::array<uint32_t, 3>;

Arrays user_kernel(Arrays inputs, const std::vector<std::vector<int>>& shapes, const std::vector<mx::Dtype>& dtypes,
                   const std::string& file, const std::string& text, const std::string& problem,
                   const std::string& kernel, Triple grid, Triple threadgroup,
                   std::vector<std::tuple<bool, bool, bool>> infos, const std::vector<nb::bytes>& initial,
                   bool by_rows) {
  refuse_export("simulator.metal_kernel");
  std::vector<std::string> elements;
  for (const auto& element : initial) {
    elements.emplace_back(element.c_str(), element.size());
  }
  std::vector<mx::Shape> output_shapes;
  for (const auto& shape : shapes) {
    output_shapes.emplace_back(shape.begin(), shape.end());
  }
  simulator::Options options = simulator_options();
  options.active_lanes = true;
  const UserLaunch launch{file,    text,   problem, kernel, grid, threadgroup, std::move(infos), std::move(elements),
                          by_rows, options};
  const auto primitive = std::make_shared<UserKernel>(mx::default_stream(mx::Device::cpu), launch);
  return mx::array::make_arrays(std::move(output_shapes), dtypes, primitive, inputs);
}

void bind(nb::module_& module) {
  module.def("user_kernel", &user_kernel, nb::arg("inputs"), nb::arg("output_shapes"), nb::arg("output_dtypes"),
             nb::kw_only(), nb::arg("file"), nb::arg("text"), nb::arg("problem"), nb::arg("kernel"), nb::arg("grid"),
             nb::arg("threadgroup"), nb::arg("infos"), nb::arg("initial"), nb::arg("by_rows"),
             "The outputs of a kernel of mx.fast.metal_kernel, which runs in the simulator when they are evaluated.");
  module.def("simulator_launches", &simulator::launches, "How many launches this process has simulated.");
  module.def("simulator_notes", &simulator::take_notes, "What the watcher noted since the last call.");
  module.def("simulator_fault_on_equal_writes", &simulator::fault_on_equal_writes, nb::arg("fault"),
             "Whether several threads that write one value to one place are a fault, or noted.");
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
