// The mathematics of a root mean square norm.
#pragma once

#include "mittens/pack.h"

namespace mittens {

inline float rstd(float square_sum, uint columns, float eps) {
  return precise::rsqrt(square_sum / float(columns) + eps);
}

}  // namespace mittens
