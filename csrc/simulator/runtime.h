// The table of functions that every library calls while its kernels run.
#pragma once

#include "simulator/abi.h"

namespace mittens::simulator {

abi::Runtime* runtime();

}  // namespace mittens::simulator
