// The Metal front end (the Python package mlx_mittens.frontend), as the executors call it. Each call takes the GIL.
#pragma once

#include <stdexcept>
#include <string>

namespace mittens::frontend {

// A kernel's text that its compiler refused; Python sees mlx_mittens.frontend.CompileError.
struct CompileError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

std::string ptx(const std::string& file, const std::string& kernel);
std::string simulator_library(const std::string& file);  // the path of a shared object
std::string metal_source(const std::string& file);       // one string, all headers within, for Metal's own compiler
std::string metallib();                                  // its path, empty where the package was built without one

}  // namespace mittens::frontend
