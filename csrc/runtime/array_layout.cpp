#include "runtime/array_layout.h"

#include "backends/memory.h"

namespace mittens {

bool has_rows(const mx::array& array, int64_t alignment) {
  if (array.size() == 0) {
    return true;
  }
  const auto is_aligned = [past = alignment - 1](int64_t bytes) { return (bytes & past) == 0; };
  const int64_t item = array.itemsize();
  const int last = static_cast<int>(array.ndim()) - 1;
  if (array.flags().row_contiguous && is_aligned(array.offset() | array.shape(last) * item)) {
    return true;
  }
  if (!is_aligned(array.offset()) || (array.shape(last) > 1 && array.strides(last) != 1)) {
    return false;
  }
  for (int d = 0; d < last; ++d) {
    if (array.shape(d) > 1 && (array.strides(d) < 0 || !is_aligned(array.strides(d) * item))) {
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
