// The Metal front end (the Python package mlx_mittens.frontend), as the executors call it. Each call takes the GIL.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "simulator/simulator.h"

namespace mittens::frontend {

// A kernel's text that its compiler refused; Python sees mlx_mittens.frontend.CompileError.
struct CompileError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Values of a kernel's function constants, by index, as C++ writes them.
using Constants = std::map<uint32_t, std::string>;

// bytes_sizes: the buffers of `constant T*` parameters whose bytes themselves are handed over, and how many they are.
std::string ptx(const std::string& file, const std::string& kernel, const std::map<uint32_t, size_t>& bytes_sizes,
                const Constants& constants);
std::string simulator_library(const std::string& file, const simulator::Options& options,
                              const Constants& constants);  // a shared object's path
// The library of a user's kernel, from the text that MLX generated.
std::string user_library(const std::string& file, const std::string& text, const std::string& kernel,
                         const simulator::Options& options);
// A fault's message, and below it the text of the lines that it names.
std::string with_source_lines(const std::string& message, const std::string& file, const std::string& library);

// One string, all headers within, for Metal's own compiler.
struct MetalText {
  std::string text;
  std::string kernel;  // the only one in it; empty if the text has all kernels of the file
};
MetalText metal_text(const std::string& file, const std::string& kernel);
std::vector<std::string> metal_kernels(const std::string& file);  // empty where only a compiler can tell
std::string metallib(const std::string& file);  // the path of the library built ahead that has its kernels, or empty

}  // namespace mittens::frontend
