// Shared by the primitives of recurrences: each has a kernel and native code for its own inputs, and takes composition
// and gradients from the recurrence behind it.
#pragma once

#include <optional>

#include "ops/recurrence/recurrence.h"

namespace mittens {

class RecurrencePrimitive : public KernelPrimitive {
 public:
  using KernelPrimitive::KernelPrimitive;

  // By the recurrence's gradients, which have native code.
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override;
  Arrays composed(const Arrays& inputs) override;

 protected:
  struct Parts {
    Arrays inputs;  // of the recurrence; q, k and v may be wider than the op's
    RecurrenceOptions options;
    std::optional<mx::array> added;  // to its y
  };

  // The recurrence, by operations of mx.
  virtual Parts parts(const Arrays& inputs) = 0;
  // Which input is the first state; none: zeros.
  virtual std::optional<size_t> state_index() const = 0;
  virtual mx::Dtype y_dtype(const Arrays& inputs) const {
    return inputs[0].dtype();
  }
  // Whether an input is read 16 bytes at a time, beside the state.
  virtual bool is_read_in_packs(size_t input) const = 0;

  const Arrays& prepared(const Arrays& inputs, Arrays& copies) override;
  void allocate(const Arrays& inputs, Arrays& outputs) override;
};

}  // namespace mittens
