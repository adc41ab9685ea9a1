// Running Metal kernels on an NVIDIA GPU: clang's PTX of them, through the CUDA driver, on MLX's own stream.
#pragma once

#include <string_view>
#include <vector>

#include "backends/launch.h"

namespace mittens::cuda {

// Whether the MLX that is loaded is a CUDA build.
bool available();

// What is missing for kernels to run, for people; empty when nothing is.
std::string_view missing();

// Holds arrays until what was given to the stream so far is done.
void keep_until_done(std::vector<mx::array> arrays, mx::Stream stream);

void run(const Launch& launch, mx::Stream stream);

}  // namespace mittens::cuda
