// What every primitive of ours shares: where it runs, and derivatives composed from mx where it brings none of its own.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "backends/launch.h"
#include "mlx/primitives.h"

namespace mittens {

using Arrays = std::vector<mx::array>;

// Whether MLX has yet to compute an array.
inline bool is_pending(const mx::array& array) {
  return array.status() == mx::array::Status::unscheduled && array.has_primitive();
}

// The first output of a new primitive, of the first input's dtype; a second one is its float32 workspace.
mx::array first_output(std::shared_ptr<mx::Primitive> primitive, Arrays inputs);

// The same of one that has no other, whose shape is known: it takes the host less time.
mx::array only_output(mx::Shape shape, std::shared_ptr<mx::Primitive> primitive, Arrays inputs);

class KernelPrimitive : public mx::Primitive {
 public:
  using mx::Primitive::Primitive;

  // GPU: allocate the outputs and run the launches. CPU: native code, or the same launches in the simulator.
  void eval_gpu(const Arrays& inputs, Arrays& outputs) final;
  void eval_cpu(const Arrays& inputs, Arrays& outputs) final;

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
  // What is added to each row of the first output, one number a column; null if there is nothing.
  virtual const mx::array* addend(const Arrays&) const {
    return nullptr;
  }
  // The kernels that compute the outputs.
  virtual std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) = 0;
  // The work on the CPU, as a task that may run later on the stream's thread: it holds raw pointers, no arrays.
  virtual std::function<void()> native(const Arrays& inputs, Arrays& outputs) = 0;
  // The same mathematics in mx operations, for derivatives of any order and for vmap. It is not called where launches()
  // is not.
  virtual Arrays composed(const Arrays& inputs) = 0;

  // The outputs of a composition: y, and zeros for the float32 workspace where that is this primitive's second output.
  // Whether it is must be settled when the primitive is made: mx.compile may run it again on other shapes.
  Arrays with_workspace(const mx::array& y, const Arrays& inputs);

 private:
  // The composition, or zeros and the addend where the outputs are empty or sums of no terms.
  Arrays composition(const Arrays& inputs);
  // The outputs of vmap over an axis of no elements.
  Arrays outputs_of_nothing(const Arrays& inputs, const std::vector<int>& axes);
  // Writes the outputs if that takes no kernel. Returns whether it did.
  bool write_trivial(const Arrays& inputs, Arrays& outputs);
  // The composition as a function of some of its inputs: others, such as packed integers, may have no derivative.
  std::function<Arrays(const Arrays&)> composed_of(const Arrays& primals, const std::vector<int>& argnums);
};

}  // namespace mittens
