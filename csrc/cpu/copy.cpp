#include "cpu/copy.h"

#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu/parallel.h"

namespace mittens::cpu {

namespace {

constexpr size_t piece_elements = 1 << 14;  // for one thread at a time

template <typename T>
void copy_rows(const T* source, T* target, const int32_t* shape, const int64_t* strides, size_t dims) {
  const size_t outer = dims - 1;
  const size_t columns = shape[outer];
  size_t rows = 1;
  for (size_t d = 0; d < outer; ++d) {
    rows *= shape[d];
  }
  parallel_for(rows, piece_elements / columns + 1, [&](size_t begin, size_t end) {
    for (size_t row = begin; row < end; ++row) {
      int64_t start = 0;
      for (size_t d = outer, rest = row; d-- > 0; rest /= shape[d]) {
        start += static_cast<int64_t>(rest % shape[d]) * strides[d];
      }
      const T* from = source + start;
      T* to = target + row * columns;
      if (strides[outer] == 1) {
        std::memcpy(to, from, columns * sizeof(T));
      } else {
        for (size_t c = 0; c < columns; ++c) {
          to[c] = from[static_cast<int64_t>(c) * strides[outer]];
        }
      }
    }
  });
}

}  // namespace

void copy_strided(const void* source, void* target, size_t item_bytes, const int32_t* shape, const int64_t* strides,
                  size_t dims) {
  switch (item_bytes) {
    case 1:
      return copy_rows(static_cast<const uint8_t*>(source), static_cast<uint8_t*>(target), shape, strides, dims);
    case 2:
      return copy_rows(static_cast<const uint16_t*>(source), static_cast<uint16_t*>(target), shape, strides, dims);
    case 4:
      return copy_rows(static_cast<const uint32_t*>(source), static_cast<uint32_t*>(target), shape, strides, dims);
  }
  throw std::logic_error("[mlx_mittens] elements of " + std::to_string(item_bytes) + " bytes are not copied");
}

}  // namespace mittens::cpu
