// The simulator as this process uses it: one switch, one table of open libraries, a record of launches.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "mlx/array.h"
#include "simulator/simulator.h"

namespace mittens {

namespace mx = mlx::core;

simulator::Options simulator_options();

// These bytes of an array, from so far off its first element; its room ends where the array's memory does.
simulator::Buffer buffer_of(const mx::array& array, int64_t offset, size_t bytes, simulator::Buffer::Role role);

using Constants = std::map<uint32_t, std::string>;  // function constants by index, as C++ writes them

// Waits for the inputs of a primitive on this CPU stream. The simulator runs on the thread that evaluates, so that a
// fault is an exception of the call: MLX's Metal backend commits work encoded for a GPU after that. Errors of GPU
// streams of this thread are thrown here.
void wait_for_inputs(mx::Stream stream);

// Runs a dispatch in the library at this path, and notes it under the file and constants that the library was made of.
void simulate(const std::string& file, const std::string& library, const simulator::Dispatch& dispatch,
              const simulator::Options& options, const Constants& constants = {});

}  // namespace mittens
