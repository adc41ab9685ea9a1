// Softcap on the CPU: y = cap * tanh(x / cap), in float32 inside. y may be x.
#pragma once

#include "cpu/types.h"

namespace mittens::cpu {

void softcap(Type type, const void* x, void* y, size_t size, float cap);

}  // namespace mittens::cpu
