// Running kernels on an Apple GPU, through MLX's own Metal device and command encoder.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backends/launch.h"

namespace mittens::metal {

// Whether this build has Metal (macOS) at all.
bool built();

// Whether a GPU of this architecture, such as applegpu_g17s, has matrix units: the M5's and later ones, as MLX has it.
bool has_matrix_units(std::string_view architecture);

// Whether this machine's GPU has them, and its macOS the API that MLX's kernels reach them through.
bool has_matrix_units();

// Holds arrays until the work given to the stream so far is done.
void keep_until_done(std::vector<mx::array> arrays, mx::Stream stream);

void run(const Launch& launch, mx::Stream stream);

// Launches, and MB of buffers that they read, after which MLX ends a command buffer; none without Metal, and where a
// release of MLX does not say.
std::optional<std::pair<int, int>> command_buffer_limits();

// Figures of a kernel as this GPU's compiler made it. The most threads follow from the registers of one.
struct Pipeline {
  uint64_t max_total_threads_per_threadgroup;
  uint64_t static_threadgroup_memory_length;
  uint64_t thread_execution_width;
};

// The kernels of a .metal file; of all files where they were built ahead into one library.
std::vector<std::string> kernels(const std::string& file);
// Compiles a kernel for this GPU, if it was not yet. Throws Metal's error.
Pipeline pipeline(const std::string& file, const std::string& kernel);

}  // namespace mittens::metal
