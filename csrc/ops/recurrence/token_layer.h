// Shared by the ops of one token of a layer with states: checks, the primitive of a state for each head, its launch.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "cpu/recurrence/recurrence.h"
#include "params/recurrence.h"
#include "runtime/primitive.h"

namespace mittens {

void check_shape(const char* op, const char* name, const mx::array& array, const mx::Shape& shape);

// [channels, taps] of [channels, taps] or [channels, taps, 1]. Throws for other shapes, and other channels than those
// given.
mx::array taps_of_channels(const char* op, const mx::array& conv_weight, std::optional<int> channels, mx::Stream stream,
                           const char* name = "conv_weight");

// Whether mx is to compute a token: no kernel has that many rows, it is faster, or is_empty. All but the last are
// counted in mm.stats().
bool token_goes_to_mx(const char* op, mx::Dtype dtype, const cpu::Recurrence& sizes, bool is_empty, mx::Stream stream);

StateParams token_params(const cpu::Recurrence& sizes);

// A threadgroup for each head.
void share_out_heads(Launch& launch, const StateParams& params, size_t batch);

cpu::Numbers native_numbers(const mx::array& array);

// Makes the outputs of a primitive in the dtypes given.
Arrays results_of(std::shared_ptr<KernelPrimitive> primitive, Arrays inputs, const std::vector<mx::Dtype>& dtypes);

// Results y, states of the convolution, and the state of each head in float32, whose buffer is taken where it can be.
class HeadsOfToken : public KernelPrimitive {
 public:
  // state: its index among the inputs. convolutions: the index of the convolution's first state that is written in
  // place where it can be, as all up to the last are; 0 for none.
  HeadsOfToken(mx::Stream stream, size_t state, size_t convolutions = 0)
      : KernelPrimitive(stream), state_(state), convolutions_(convolutions) {}

  // The composition, for callers of the op.
  Arrays in_operations(const Arrays& inputs) {
    return composed(inputs);
  }

 protected:
  // Whether a launch reads an input as it lies in memory.
  virtual bool is_ready(const Arrays& inputs, size_t i) const;

  const Arrays& prepared(const Arrays& inputs, Arrays& copies) override;
  void allocate(const Arrays& inputs, Arrays& outputs) override;

 private:
  size_t state_;
  size_t convolutions_;
};

}  // namespace mittens
