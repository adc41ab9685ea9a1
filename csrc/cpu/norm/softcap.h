// Softcap on the CPU: y = cap * tanh(x / cap), in float32 inside. y may be x.
#pragma once

#include "cpu/types.h"

namespace mittens::cpu {

void softcap(Type type, const void* x, void* y, size_t size, float cap);

// dx = dy * (1 - tanh(x / cap)^2); dx may be x or dy.
void softcap_vjp(Type type, const void* x, const void* dy, void* dx, size_t size, float cap);

}  // namespace mittens::cpu
