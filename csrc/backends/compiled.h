// How long each kernel waited for its compiler before its first launch in this process.
#pragma once

#include <string>
#include <vector>

namespace mittens {

struct Compiled {
  std::string file;
  std::string kernel;
  double seconds;  // near 0 where a cache had it
};

// Keeps the first report about a kernel.
void note_compiled(const std::string& file, const std::string& kernel, double seconds);

// In the order of the first launches.
std::vector<Compiled> compiled_kernels();

}  // namespace mittens
