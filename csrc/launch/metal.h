// Running kernels on an Apple GPU, through MLX's own Metal device and command encoder.
#pragma once

#include "launch/launch.h"

namespace mittens::metal {

// Whether this build has Metal (macOS) at all.
bool built();

// Holds an array until what was given to the stream so far is done.
void keep_until_done(const mx::array& array, mx::Stream stream);

void run(const Launch& launch, mx::Stream stream);

}  // namespace mittens::metal
