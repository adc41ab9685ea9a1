// The gradients of recurrences on the CPU. On GPUs they come from the composition.
#include <functional>
#include <memory>

#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/transforms.h"
#include "ops/recurrence/recurrence.h"
#include "runtime/array_util.h"
#include "runtime/checks.h"

namespace mittens {

namespace {

// The inputs of a recurrence, then the cotangents -> gradients of q, k, v, gates, rates and the state.
class RecurrenceVjp : public KernelPrimitive {
 public:
  RecurrenceVjp(mx::Stream stream, const RecurrenceOptions& options) : KernelPrimitive(stream), options_(options) {}

  const char* name() const override {
    return "MittensRecurrenceVjp";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return options_ == static_cast<const RecurrenceVjp&>(other).options_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    const RecurrenceArrays arrays(inputs, options_);
    return {arrays.q.shape(),     arrays.k.shape(),     arrays.v.shape(),
            arrays.gates.shape(), arrays.rates.shape(), inputs.back().shape()};
  }

 protected:
  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    if (stream().device == mx::Device::gpu) {
      checks::fail<std::logic_error>("recurrence_vjp", "has no kernel");
    }
    mx::cpu::get_command_encoder(stream()).dispatch(native(inputs, outputs));
    return {};
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    const RecurrenceArrays arrays(inputs, options_);
    const mx::array &dy = inputs[inputs.size() - 2], &dstate = inputs.back();
    return [type = native_type(arrays.q.dtype()), sizes = arrays.native_sizes(), data = arrays.native_inputs(),
            dy = data_of(dy), dstate = dstate.data<float>(),
            gradients = cpu::RecurrenceGradients{data_of(outputs[0]), data_of(outputs[1]), data_of(outputs[2]),
                                                 outputs[3].data<float>(), outputs[4].data<float>(),
                                                 outputs[5].data<float>()}] {
      cpu::recurrence_vjp(type, sizes, data, dy, dstate, gradients);
    };
  }

  Arrays composed(const Arrays& inputs) override {
    const size_t of_recurrence = inputs.size() - 2;
    const Arrays cotangents(inputs.begin() + of_recurrence, inputs.end());
    Arrays primals(inputs.begin(), inputs.begin() + 5);
    primals[4] = in_dtype(primals[4], mx::float32, stream());
    primals.push_back(options_.has_state ? inputs[5] : mx::zeros(cotangents[1].shape(), mx::float32, stream()));
    const RecurrenceOptions with_state{true, options_.has_mask, options_.corrects};
    const auto function = [&](const Arrays& some) {
      Arrays all = some;
      if (options_.has_mask) {
        all.push_back(inputs[of_recurrence - 1]);
      }
      Arrays results = recurrence_composed(all, with_state, stream());
      results[0] = in_dtype(results[0], cotangents[0].dtype(), stream());
      return results;
    };
    return mx::vjp(function, primals, cotangents).second;
  }

 private:
  RecurrenceOptions options_;
};

}  // namespace

Arrays recurrence_vjp(const Arrays& inputs, const Arrays& cotangents, const RecurrenceOptions& options,
                      mx::Stream stream) {
  check_base<RecurrenceVjp>();
  Arrays all = inputs;
  all.insert(all.end(), cotangents.begin(), cotangents.end());
  auto primitive = std::make_shared<RecurrenceVjp>(stream, options);
  std::vector<mx::Shape> shapes = primitive->output_shapes(all);
  const mx::Dtype dtype = inputs[0].dtype();
  Arrays gradients = mx::array::make_arrays(
      std::move(shapes), {dtype, dtype, dtype, mx::float32, mx::float32, mx::float32}, primitive, all);
  gradients[4] = in_dtype(gradients[4], inputs[4].dtype(), stream);
  if (!options.has_state) {
    gradients.pop_back();
  }
  if (options.has_mask) {
    gradients.push_back(mx::zeros_like(inputs.back(), stream));
  }
  return gradients;
}

}  // namespace mittens
