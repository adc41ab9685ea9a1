// Stand-ins for arrays, to predict the effect of a call: of the same shape and dtype, but with a few bytes of memory.
// Nothing may run on them.
#pragma once

#include "mlx/array.h"

namespace mittens {

namespace mx = mlx::core;

// While an instance exists, this thread allocates stand-ins' memory, and streams keep no arrays.
class AllocatingStandIns {
 public:
  AllocatingStandIns();
  ~AllocatingStandIns();
  AllocatingStandIns(const AllocatingStandIns&) = delete;
  AllocatingStandIns& operator=(const AllocatingStandIns&) = delete;
};

bool allocates_stand_ins();

// Gives an array without data a stand-in's memory.
void allocate_stand_in(mx::array& array);

// An evaluated row contiguous array.
mx::array stand_in(mx::Shape shape, mx::Dtype dtype);

}  // namespace mittens
