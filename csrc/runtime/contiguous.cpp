#include "runtime/contiguous.h"

#include <algorithm>
#include <limits>

#include "backends/memory.h"
#include "backends/stand_in.h"
#include "cpu/copy.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "params/runtime.h"
#include "runtime/array_layout.h"
#include "runtime/ready_inputs.h"

namespace mittens {

namespace {

constexpr uint32_t kThreads = 256;

// A view with neighbouring dimensions merged where the strides and the type of a size allow it, and none of size 1; at
// least one dimension.
struct View {
  std::vector<int32_t> shape;
  std::vector<int64_t> strides;
};

View merged(const mx::array& array) {
  View view;
  for (int d = 0; d < static_cast<int>(array.ndim()); ++d) {
    const int32_t size = array.shape(d);
    const int64_t stride = array.strides(d);
    if (size == 1) {
      continue;
    }
    const bool fits = !view.shape.empty() && view.shape.back() <= std::numeric_limits<int32_t>::max() / size;
    if (fits && view.strides.back() == stride * size) {
      view.shape.back() *= size;
      view.strides.back() = stride;
    } else {
      view.shape.push_back(size);
      view.strides.push_back(stride);
    }
  }
  if (view.shape.empty()) {
    view = {{1}, {1}};
  }
  return view;
}

// Element i of the first axis.
mx::array part(const mx::array& array, int i) {
  const mx::Shape shape(array.shape().begin() + 1, array.shape().end());
  const mx::Strides strides(array.strides().begin() + 1, array.strides().end());
  mx::array view(shape, array.dtype(), nullptr, {});
  view.copy_shared_buffer(array, strides, array.flags(), array.data_size(), i * array.strides(0));
  return view;
}

// An array of 8 bytes an element as pairs of words.
mx::array words_of(const mx::array& array) {
  mx::Shape shape = array.shape();
  mx::Strides strides = array.strides();
  for (int64_t& stride : strides) {
    stride *= 2;
  }
  shape.push_back(2);
  strides.push_back(1);
  mx::array view(std::move(shape), mx::uint32, nullptr, {});
  view.copy_shared_buffer(array, strides, array.flags(), 2 * array.data_size());
  return view;
}

void copy(const mx::array& source, mx::array& target, mx::Stream stream) {
  if (allocates_stand_ins()) {
    return;
  }
  if (source.itemsize() == 8) {
    mx::array words = words_of(target);
    copy(words_of(source), words, stream);
    return;
  }
  const bool by_kernel = stream.device == mx::Device::gpu || simulator_enabled();
  if (by_kernel && merged(source).shape.size() > kCopyDims + 1) {
    for (int i = 0; i < source.shape(0); ++i) {
      mx::array of_target = part(target, i);
      copy(part(source, i), of_target, stream);
    }
    return;
  }
  if (stream.device == mx::Device::gpu) {
    run_on_gpu(copy_launch(source, target), stream);
  } else if (simulator_enabled()) {
    run_in_simulator({copy_launch(source, target)}, stream);
  } else {
    mx::cpu::get_command_encoder(stream).dispatch(
        [from = source.data<void>(), to = target.data<void>(), item = source.itemsize(), view = merged(source)] {
          cpu::copy_strided(from, to, item, view.shape.data(), view.strides.data(), view.shape.size());
        });
  }
}

}  // namespace

Launch copy_launch(const mx::array& source, const mx::array& target) {
  const View view = merged(source);
  const size_t outer = view.shape.size() - 1;
  CopyParams params{};
  int64_t lowest = 0, highest = 0;  // elements that the view reaches, from its first
  for (size_t d = 0; d <= outer; ++d) {
    const int64_t reach = view.strides[d] * (view.shape[d] - 1);
    (reach < 0 ? lowest : highest) += reach;
    if (d < outer) {
      params.shape[d] = view.shape[d];
      params.strides[d] = view.strides[d];
    }
  }
  params.column_stride = view.strides[outer];
  params.start = -lowest;
  params.dims = static_cast<uint32_t>(outer);
  params.columns = view.shape[outer];
  params.chunks = ceil_divide(params.columns, kThreads);

  const int64_t item = source.itemsize();
  Launch launch;
  launch.file = "runtime/copy.metal";
  launch.kernel = "copy_strided_" + std::to_string(item);
  launch.threadgroups = {static_cast<uint32_t>(source.size() / params.columns * params.chunks), 1, 1};
  launch.threads = {std::min(kThreads, ceil_divide(params.columns, 32) * 32), 1, 1};
  launch.input(source, lowest * item, (highest - lowest + 1) * item).output(target).params(params);
  return launch;
}

mx::array contiguous(const mx::array& source, mx::Stream stream) {
  mx::array target = temporary(source.shape(), source.dtype(), stream);
  copy(source, target, stream);
  return target;
}

void fill_rows(mx::array& target, const mx::array* row, mx::Stream stream) {
  if (target.size() == 0) {
    return;
  }
  const mx::array source = row ? *row : mx::array(0.0f, target.dtype());
  keep_until_done({source}, stream);
  mx::Strides strides(target.ndim(), 0);
  strides.back() = row ? row->strides(0) : 0;
  mx::array rows(target.shape(), target.dtype(), nullptr, {});
  rows.copy_shared_buffer(source, strides, {}, source.data_size());
  copy(rows, target, stream);
}

bool is_row_contiguous(const mx::array& array, int64_t alignment) {
  return array.size() == 0 || (array.flags().row_contiguous && array.offset() % alignment == 0);
}

const Arrays& row_contiguous(const Arrays& inputs, mx::Stream stream, Arrays& copies, int64_t alignment) {
  return ready_inputs(inputs, stream, copies, [&](size_t i) { return is_row_contiguous(inputs[i], alignment); });
}

}  // namespace mittens
