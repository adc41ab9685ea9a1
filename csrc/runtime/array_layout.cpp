#include "runtime/array_layout.h"

#include "backends/memory.h"

namespace mittens {

bool has_rows(const mx::array& array, int64_t alignment) {
  if (array.size() == 0) {
    return true;
  }
  const auto is_aligned = [](int64_t bytes, int64_t boundary) { return (bytes & (boundary - 1)) == 0; };
  const int64_t item = array.itemsize();
  const int last = static_cast<int>(array.ndim()) - 1;
  const int64_t row = array.shape(last) * item;
  const int64_t of_rows = std::min(alignment, row & -row);  // the largest power of two that divides a row
  if (!is_aligned(array.offset(), alignment) || (array.shape(last) > 1 && array.strides(last) != 1)) {
    return false;
  }
  for (int d = 0; d < last; ++d) {
    if (array.shape(d) > 1 && (array.strides(d) < 0 || !is_aligned(array.strides(d) * item, of_rows))) {
      return false;
    }
  }
  return true;
}

mx::array with_rows(const mx::array& array, int64_t alignment, mx::Stream stream) {
  return has_rows(array, alignment) ? array : contiguous(array, stream);
}

bool is_contiguous(const mx::array& array) {
  return is_row_contiguous(array, 16);
}

mx::array contiguous_rows(const mx::array& array, mx::Stream stream) {
  return is_contiguous(array) ? array : contiguous(array, stream);
}

void add_view(Launch& launch, const mx::array& view) {
  const Span span = span_of(view);
  launch.input(view, span.offset, span.bytes);
}

size_t leading_size(const mx::array& array, int inner) {
  size_t size = 1;
  for (int d = 0; d < static_cast<int>(array.ndim()) - inner; ++d) {
    size *= array.shape(d);
  }
  return size;
}

}  // namespace mittens
