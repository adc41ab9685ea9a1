#include "runtime/nested_evaluation.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <unordered_set>
#include <utility>

#include "backends/memory.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "runtime/checks.h"

namespace mittens {

namespace {

// The pending arrays that some arrays need, and these, each after its inputs.
Arrays in_order_of_evaluation(const Arrays& arrays) {
  Arrays order;
  std::unordered_set<std::uintptr_t> seen;
  std::vector<std::pair<mx::array, size_t>> path;  // each with the next of its inputs to look at
  const auto enter = [&](const mx::array& array) {
    if (is_pending(array) && seen.insert(array.id()).second) {
      path.emplace_back(array, 0);
    }
  };
  for (const mx::array& array : arrays) {
    enter(array);
    while (!path.empty()) {
      auto& [last, next] = path.back();
      if (next < last.inputs().size()) {
        enter(last.inputs()[next++]);
      } else {
        order.push_back(last);
        path.pop_back();
      }
    }
  }
  return order;
}

using Buffers = std::vector<std::shared_ptr<mx::array::Data>>;

void add_buffers(Buffers& buffers, const Arrays& arrays) {
  for (const mx::array& array : arrays) {
    buffers.push_back(array.data_shared_ptr());  // null if it has not run
  }
}

// Holds buffers until all work given to the CPU stream so far is done, and with them the encoder's temporaries but the
// first `other_temporaries`, which belong to whoever runs the composition.
void hold_until_done(Buffers buffers, size_t other_temporaries, mx::Stream stream) {
  auto& encoder = mx::cpu::get_command_encoder(stream);
  Arrays& all = encoder.temporaries();
  const auto first = all.begin() + static_cast<std::ptrdiff_t>(other_temporaries);
  Arrays temporaries(std::make_move_iterator(first), std::make_move_iterator(all.end()));
  all.erase(first, all.end());
  encoder.dispatch([buffers = std::move(buffers), temporaries = std::move(temporaries)] {});
}

// Runs pending operations, each after its inputs. `evaluate` gets a node and its outputs, `hold` a node that has run,
// and `hold_failed` one that has thrown, its outputs and the nodes that will not run.
template <typename Evaluate, typename Hold, typename HoldFailed>
void run_in_order(Arrays order, Evaluate evaluate, Hold hold, HoldFailed hold_failed) {
  std::reverse(order.begin(), order.end());  // the next is the last
  while (!order.empty()) {
    mx::array node = std::move(order.back());
    order.pop_back();
    if (node.status() != mx::array::Status::unscheduled) {
      continue;  // an output of a primitive that has run
    }
    Arrays made = node.outputs();
    try {
      evaluate(node, made);
    } catch (...) {
      // Work under way may still write buffers that no operation will read now.
      hold_failed(node, made, order);
      throw;
    }
    for (mx::array& output : made) {
      output.set_status(mx::array::Status::evaluated);
    }
    // Leaves a buffer that an output has taken over to its readers, so that they can take it over too.
    hold(node);
    node.detach();
  }
}

// Keeps the operations' inputs until their last reader is done, as MLX's evaluation does: memory that only one
// operation reads is its to write, and is freed after it.
void run_on_cpu_in_order(Arrays order, const Arrays& results, mx::Stream stream) {
  const size_t other_temporaries = mx::cpu::get_command_encoder(stream).temporaries().size();
  const auto evaluate = [](mx::array& node, Arrays& made) { node.primitive().eval_cpu(node.inputs(), made); };
  const auto hold = [&](const mx::array& node) {
    Buffers buffers;
    add_buffers(buffers, node.inputs());
    add_buffers(buffers, node.siblings());
    std::erase(buffers, node.data_shared_ptr());
    hold_until_done(std::move(buffers), other_temporaries, stream);
  };
  const auto hold_failed = [&](const mx::array& node, const Arrays& made, const Arrays& left) {
    Buffers buffers;
    add_buffers(buffers, node.inputs());
    add_buffers(buffers, made);
    add_buffers(buffers, results);
    for (const mx::array& later : left) {
      add_buffers(buffers, later.inputs());
    }
    hold_until_done(std::move(buffers), other_temporaries, stream);
  };
  run_in_order(std::move(order), evaluate, hold, hold_failed);
}

// The same on a GPU, whose encoder keeps arrays.
void run_on_gpu_in_order(Arrays order, mx::Stream stream) {
  const auto evaluate = [](mx::array& node, Arrays& made) { node.primitive().eval_gpu(node.inputs(), made); };
  const auto hold = [&](const mx::array& node) {
    Arrays kept = node.inputs();
    kept.insert(kept.end(), node.siblings().begin(), node.siblings().end());
    std::erase_if(kept, [&](const mx::array& array) { return array.data_shared_ptr() == node.data_shared_ptr(); });
    keep_until_done(std::move(kept), stream);
  };
  const auto hold_failed = [&](const mx::array& node, const Arrays&, const Arrays& left) {
    Arrays kept = node.inputs();
    for (const mx::array& later : left) {
      kept.insert(kept.end(), later.inputs().begin(), later.inputs().end());
    }
    std::erase_if(kept, [](const mx::array& array) { return !array.data_shared_ptr(); });
    keep_until_done(std::move(kept), stream);
  };
  run_in_order(std::move(order), evaluate, hold, hold_failed);
}

}  // namespace

void evaluate_inside(const char* who, const char* maker, const Arrays& results, Arrays& outputs, mx::Stream stream) {
  const auto expect = [&](bool holds, const auto&... parts) {
    if (!holds) {
      checks::fail<std::logic_error>(who, maker, " ", parts...);
    }
  };
  expect(results.size() == outputs.size(), "returns ", results.size(), " arrays: expected ", outputs.size());
  for (size_t i = 0; i < outputs.size(); ++i) {
    expect(results[i].shape() == outputs[i].shape() && results[i].dtype() == outputs[i].dtype(), "returns array ", i,
           " of shape ", results[i].shape(), " and dtype ", results[i].dtype(), ": expected ", outputs[i].shape(),
           " and ", outputs[i].dtype());
  }
  Arrays order = in_order_of_evaluation(results);
  for (const mx::array& node : order) {
    expect(node.primitive().stream() == stream, "has an operation, ", node.primitive().name(),
           ", on another stream: expected stream() as the last argument of every mx operation");
  }
  for (mx::array& output : outputs) {
    output.set_data(mx::allocator::malloc(0));  // the results bring memory of their own
  }
  if (stream.device == mx::Device::gpu) {
    run_on_gpu_in_order(std::move(order), stream);
  } else {
    run_on_cpu_in_order(std::move(order), results, stream);
  }
  for (size_t i = 0; i < outputs.size(); ++i) {
    outputs[i].copy_shared_buffer(results[i]);
  }
}

}  // namespace mittens
