// Running kernels on an Apple GPU, through MLX's own Metal device and command encoder.
#pragma once

#include <string_view>
#include <vector>

#include "backends/launch.h"

namespace mittens::metal {

// Whether this build has Metal (macOS) at all.
bool built();

// Whether a GPU of this architecture, such as applegpu_g17s, has matrix units: that of the M5 and later, as MLX has it.
bool has_matrix_units(std::string_view architecture);

// Whether this machine's GPU has them, and its macOS what MLX's kernels reach them through.
bool has_matrix_units();

// Holds arrays until what was given to the stream so far is done.
void keep_until_done(std::vector<mx::array> arrays, mx::Stream stream);

void run(const Launch& launch, mx::Stream stream);

}  // namespace mittens::metal
