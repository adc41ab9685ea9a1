// Copies of the inputs that a launch cannot read as they lie in memory.
#pragma once

#include "runtime/contiguous.h"

namespace mittens {

// The inputs where all are ready, else `copies`: ready ones as they are, the rest row contiguous. is_ready(i): of input
// i.
template <typename IsReady>
const Arrays& ready_inputs(const Arrays& inputs, mx::Stream stream, Arrays& copies, const IsReady& is_ready) {
  size_t ready = 0;
  while (ready < inputs.size() && is_ready(ready)) {
    ++ready;
  }
  if (ready == inputs.size()) {
    return inputs;
  }
  copies.reserve(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    copies.push_back(is_ready(i) ? inputs[i] : contiguous(inputs[i], stream));
  }
  return copies;
}

}  // namespace mittens
