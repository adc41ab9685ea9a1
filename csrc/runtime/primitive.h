// The base of every primitive of ours: where it runs, and derivatives composed from mx where it has none of its own.
#pragma once

#include <functional>
#include <memory>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "backends/launch.h"
#include "mlx/primitives.h"
#include "runtime/asking.h"

namespace mittens {

using Arrays = std::vector<mx::array>;

// Whether MLX has yet to compute an array.
inline bool is_pending(const mx::array& array) {
  return array.status() == mx::array::Status::unscheduled && array.has_primitive();
}

// Whether MLX has yet to compute an array by a primitive of that name.
inline bool is_primitive(const mx::array& array, std::string_view name) {
  return is_pending(array) && array.primitive().name() == name;
}

// The array that a pending view of that name shows; another array as it is.
inline const mx::array& behind(const mx::array& array, std::string_view view) {
  return is_primitive(array, view) ? array.inputs()[0] : array;
}

// The base of an op's primitive. One that works along rows by the schedules of ops/norm/plan.h derives from
// RowPrimitive (ops/norm/row_primitive.h), which is a KernelPrimitive too.
class KernelPrimitive : public mx::Primitive, public Plannable {
 public:
  using mx::Primitive::Primitive;

  // GPU: allocate the outputs and run the launches. CPU: native code, by default the composition below, or the same
  // launches in the simulator.
  void eval_gpu(const Arrays& inputs, Arrays& outputs) final;
  void eval_cpu(const Arrays& inputs, Arrays& outputs) final;
  // The kernels that the above run, assuming that inputs are row contiguous and nobody else needs updated ones.
  void plan(const Arrays& inputs, const Arrays& outputs, CallPlan& plan) final;

  // Transformations of the composition below, unless a primitive overrides them.
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override;
  Arrays jvp(const Arrays& primals, const Arrays& tangents, const std::vector<int>& argnums) override;
  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs, const std::vector<int>& axes) override;

 protected:
  // The inputs as the kernels read them, by default row contiguous: themselves where they are so, else `copies`.
  virtual const Arrays& prepared(const Arrays& inputs, Arrays& copies);
  // Gives every output its memory; by default fresh, a primitive may take over a donated input's instead.
  virtual void allocate(const Arrays& inputs, Arrays& outputs);
  // Whether the outputs are sums of no terms: then they are zeros, plus the addend of the first. Neither launches() nor
  // native() is called in that case, nor where every output is empty.
  virtual bool sums_nothing(const Arrays&) const {
    return false;
  }
  // An array that is added to each row of the first output, one number a column; null if there is none.
  virtual const mx::array* addend(const Arrays&) const {
    return nullptr;
  }
  // The kernels that compute the outputs.
  virtual std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) = 0;
  // The work on the CPU, as a task that may run later on the stream's thread: it holds raw pointers, no arrays. Null
  // for an op without native code, whose composition runs instead.
  virtual std::function<void()> native(const Arrays& inputs, Arrays& outputs) {
    return nullptr;
  }
  // The same mathematics in mx operations on stream(), for derivatives of any order, for vmap, and for the CPU where
  // there is no native code. Returns arrays of the outputs' shapes and dtypes. It is not called where launches() is
  // not.
  virtual Arrays composed(const Arrays& inputs) = 0;

  // The outputs of a composition: y, and zeros for the float32 workspace where that is this primitive's second output.
  // Whether it is must be settled when the primitive is made: mx.compile may run it again on other shapes.
  Arrays with_workspace(const mx::array& y, const Arrays& inputs);

 private:
  // The composition, or zeros and the addend where the outputs are empty or sums of no terms.
  Arrays composition(const Arrays& inputs);
  // The outputs of vmap over an axis of no elements.
  Arrays outputs_of_nothing(const Arrays& inputs, const std::vector<int>& axes);
  // Whether this thread runs native code on the CPU where there is some.
  bool prefers_native() const;
  // Computes the outputs by the composition, on the stream of this primitive.
  void run_composed(const Arrays& inputs, Arrays& outputs);
  // Writes the outputs if no kernel is needed. Returns whether it did.
  bool write_trivial(const Arrays& inputs, Arrays& outputs);
  // The composition as a function of some of its inputs: others, such as packed integers, may have no derivative.
  std::function<Arrays(const Arrays&)> composed_of(const Arrays& primals, const std::vector<int>& argnums);
};

template <typename Primitive>
constexpr void check_base() {
  static_assert(std::is_base_of_v<KernelPrimitive, Primitive>,
                "the primitive of an op derives from mittens::KernelPrimitive (runtime/primitive.h), or from "
                "mittens::RowPrimitive (ops/norm/row_primitive.h) where it has the schedules of plan.h");
}

// The output of a new primitive that has no other, of the first input's dtype, where its shape is known.
template <typename Primitive>
mx::array only_output(mx::Shape shape, std::shared_ptr<Primitive> primitive, Arrays inputs) {
  check_base<Primitive>();
  const mx::Dtype dtype = inputs[0].dtype();
  return mx::array(std::move(shape), dtype, std::move(primitive), std::move(inputs));
}

// The same of a primitive that may have a second output, its float32 workspace. It takes the host more time.
template <typename Primitive>
mx::array first_output(std::shared_ptr<Primitive> primitive, Arrays inputs) {
  check_base<Primitive>();
  std::vector<mx::Shape> shapes = primitive->output_shapes(inputs);
  if (shapes.size() == 1) {
    return only_output(std::move(shapes[0]), std::move(primitive), std::move(inputs));
  }
  return mx::array::make_arrays(std::move(shapes), {inputs[0].dtype(), mx::float32}, primitive, inputs)[0];
}

}  // namespace mittens
