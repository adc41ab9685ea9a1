// The Metal front end (the Python package mlx_mittens.frontend), as the executors call it. Each call takes the GIL.
#pragma once

#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>

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
std::string simulator_library(const std::string& file, bool watch,
                              const Constants& constants);  // a shared object's path
std::string metal_source(const std::string& file);  // one string, all headers within, for Metal's own compiler
std::string metallib();  // its path, empty where the package was built without one

}  // namespace mittens::frontend
