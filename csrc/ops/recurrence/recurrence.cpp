// The recurrence behind the ops of this folder: one kernel, native code, or products of matrices.
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "mlx/ops.h"
#include "ops/recurrence/plan.h"
#include "ops/recurrence/recurrence_primitive.h"
#include "ops/recurrence/state_params.h"
#include "params/recurrence.h"
#include "runtime/array_util.h"
#include "runtime/checks.h"
#include "runtime/fallback.h"
#include "runtime/gpu.h"
#include "runtime/primitive.h"

namespace mittens {

namespace {

constexpr const char* kernel = "recurrence";
const Name file = "recurrence/recurrence.metal";

// The inputs of a recurrence -> y and the last state.
class RecurrenceStep : public RecurrencePrimitive {
 public:
  RecurrenceStep(mx::Stream stream, const RecurrenceOptions& options)
      : RecurrencePrimitive(stream), options_(options) {}

  const char* name() const override {
    return "MittensGatedDeltaUpdate";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return options_ == static_cast<const RecurrenceStep&>(other).options_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const RecurrenceArrays arrays(inputs, options_);
    return {arrays.v.shape(), {arrays.v.shape(0), arrays.v.shape(2), arrays.v.shape(3), arrays.q.shape(3)}};
  }

 protected:
  Parts parts(const Arrays& inputs) override {
    return {inputs, options_, std::nullopt};
  }

  std::optional<size_t> state_index() const override {
    return options_.has_state ? std::optional<size_t>(5) : std::nullopt;
  }

  bool is_read_in_packs(size_t input) const override {
    return input < 2 || input == 3;  // q and k, gates of columns
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const RecurrenceArrays arrays(inputs, options_);
    RecurrenceParams params;
    params.state = state_params(arrays.q, arrays.v, options_.has_state, options_.has_mask);
    params.gate_per_column = arrays.gate_per_column();
    params.rate_type = number_type(arrays.rates.dtype());
    Launch launch;
    launch.file = file;
    launch.kernel = kernel_name(arrays.q.dtype(), kernel);
    launch.threadgroups = state_grid(params.state, arrays.q.shape(0));
    launch.threads = {32 * kStateSimdgroups, 1, 1};
    launch.input(arrays.q).input(arrays.k).input(arrays.v).input(arrays.gates).input(arrays.rates);
    launch.input_if(options_.has_state, options_.has_state ? *arrays.state : arrays.gates);
    launch.input_if(options_.has_mask, options_.has_mask ? *arrays.mask : arrays.gates);
    return in_order(launch.output(outputs[0]).output(outputs[1]).params(params));
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    const RecurrenceArrays arrays(inputs, options_);
    return
        [type = native_type(arrays.q.dtype()), sizes = arrays.native_sizes(), data = arrays.native_inputs(),
         y = data_of(outputs[0]), state = outputs[1].data<float>()] { cpu::recurrence(type, sizes, data, y, state); };
  }

 private:
  RecurrenceOptions options_;
};

}  // namespace

void check_queries_keys_values(const char* op, const mx::array& q, const mx::array& k, const mx::array& v) {
  if (q.ndim() != 4) {
    checks::fail(op, "q has shape ", q.shape(), ": expected [batch, steps, key heads, columns]");
  }
  if (k.shape() != q.shape()) {
    checks::fail(op, "k has shape ", k.shape(), ", q has shape ", q.shape(), ": expected the same shape");
  }
  const int key_heads = q.shape(2);
  if (v.ndim() != 4 || v.shape(0) != q.shape(0) || v.shape(1) != q.shape(1) ||
      (key_heads == 0 ? v.shape(2) != 0 : v.shape(2) % key_heads != 0)) {
    checks::fail(op, "v has shape ", v.shape(), ", q has shape ", q.shape(),
                 ": expected [batch, steps, heads, rows], the heads a multiple of the key heads");
  }
}

bool goes_to_mx(const char* op, mx::Dtype dtype, const cpu::Recurrence& sizes, const char* why_mx, mx::Stream stream) {
  if (runs_kernels(stream) && sizes.columns > kMostStateColumns) {
    fallback(op, "more than " + std::to_string(kMostStateColumns) + " columns");
    return true;
  }
  return prefer_mx(recurrence_problem(op, dtype, sizes), why_mx, stream);
}

Arrays recurrence(const Arrays& inputs, const RecurrenceOptions& options, mx::Stream stream) {
  check_base<RecurrenceStep>();
  auto primitive = std::make_shared<RecurrenceStep>(stream, options);
  std::vector<mx::Shape> shapes = primitive->output_shapes(inputs);
  const mx::Dtype dtype = inputs[0].dtype();
  return mx::array::make_arrays(std::move(shapes), {dtype, mx::float32}, primitive, inputs);
}

}  // namespace mittens
