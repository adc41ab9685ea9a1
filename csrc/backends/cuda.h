// Running Metal kernels on an NVIDIA GPU: clang's PTX of them, through the CUDA driver, on MLX's own stream.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "backends/launch.h"

namespace mittens::cuda {

// Whether the MLX that is loaded is a CUDA build.
bool available();

// A sentence that says why kernels cannot run; empty if they can.
std::string_view missing();

// A GPU, as the driver has it.
struct Device {
  std::string name;
  int compute_capability;  // times ten
  int multiprocessors;
  int clock_khz;
  int memory_clock_khz;
  int memory_bus_bits;
  int second_cache_bytes;
};

Device device(int index);

// Holds arrays until the work given to the stream so far is done.
void keep_until_done(std::vector<mx::array> arrays, mx::Stream stream);

void run(const Launch& launch, mx::Stream stream);

}  // namespace mittens::cuda
