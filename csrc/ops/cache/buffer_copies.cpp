#include "ops/cache/buffer_copies.h"

#include "backends/stand_in.h"
#include "cpu/copy.h"
#include "mlx_internals/buffer_ownership.h"
#include "runtime/contiguous.h"
#include "runtime/cpu_types.h"

namespace mittens {

namespace {

// Whether an output has memory of its own instead of the input's.
bool needs_copy(const mx::array& input, const mx::array& output) {
  return input.size() > 0 && !same_memory(input, output) && !allocates_stand_ins();
}

}  // namespace

std::vector<Launch> buffer_copies(const Arrays& inputs, const Arrays& outputs, size_t count) {
  std::vector<Launch> copies;
  copies.reserve(1 + count);  // and the append
  for (size_t i = 1; i <= count; ++i) {
    if (needs_copy(inputs[i], outputs[i])) {
      copies.push_back(copy_launch(inputs[i], outputs[i]));
    }
  }
  return copies;
}

std::function<void()> native_buffer_copies(const Arrays& inputs, Arrays& outputs, size_t count) {
  std::vector<std::function<void()>> copies;
  for (size_t i = 1; i <= count; ++i) {
    if (needs_copy(inputs[i], outputs[i])) {
      copies.push_back([from = data_of(inputs[i]), to = data_of(outputs[i]), item = inputs[i].itemsize(),
                        shape = inputs[i].shape(), strides = inputs[i].strides()] {
        cpu::copy_strided(from, to, item, shape.data(), strides.data(), shape.size());
      });
    }
  }
  return [copies = std::move(copies)] {
    for (const auto& copy : copies) {
      copy();
    }
  };
}

}  // namespace mittens
