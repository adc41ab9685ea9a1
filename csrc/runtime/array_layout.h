// Shared by the ops on matrices of weights: views as the kernels read them, and the numbers of a grid.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backends/launch.h"
#include "runtime/contiguous.h"

namespace mittens {

// More rows of x than this are left to a matrix product.
inline constexpr size_t most_gemv_rows = 16;

constexpr uint32_t ceil_divide(uint64_t a, uint64_t b) {
  return static_cast<uint32_t>((a + b - 1) / b);
}

// Whether rows are contiguous, the first aligned to `alignment` bytes, a power of two, and the others as well as in a
// copy: to the largest power of two up to it that divides the bytes of a row.
bool has_rows(const mx::array& array, int64_t alignment);

// The array itself if it has such rows, else a copy.
mx::array with_rows(const mx::array& array, int64_t alignment, mx::Stream stream);

// Whether an array is row contiguous and starts where the widest loads may.
bool is_contiguous(const mx::array& array);

// The array itself if so, else a copy.
mx::array contiguous_rows(const mx::array& array, mx::Stream stream);

// Adds an input that is a view with rows.
void add_view(Launch& launch, const mx::array& view);

// Product of all dimensions but the last `inner`.
size_t leading_size(const mx::array& array, int inner);

// A shape with another last dimension.
inline mx::Shape with_columns(mx::Shape shape, int columns) {
  shape.back() = columns;
  return shape;
}

// Elements between the last 16-byte boundary and the array's start.
inline uint32_t phase_of(const mx::array& array) {
  return static_cast<uint32_t>(array.offset() % 16 / array.itemsize());
}

}  // namespace mittens
