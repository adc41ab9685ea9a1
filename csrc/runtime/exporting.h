// Functions that MLX exports. It saves primitives of its own only, so the patch and our modules step aside while it
// traces one, and an op of ours that is called there is an error.
#pragma once

#include <stdexcept>

namespace mittens {

// An op of ours in an exported function. Python sees a ValueError, which MLX raises for primitives that it does not
// know.
class ExportError : public std::invalid_argument {
 public:
  explicit ExportError(const char* op);
};

// Whether this thread runs a function that was marked for export (mlx_mittens/exporting.py).
bool exporting();

// Throws ExportError while it does.
inline void refuse_export(const char* op) {
  if (exporting()) {
    throw ExportError(op);
  }
}

}  // namespace mittens
