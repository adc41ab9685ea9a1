// Row contiguous copies. Kernels read rows: an array that is not row contiguous is copied first, by a kernel of ours,
// when the op is evaluated. mx's own contiguous() would be one more node in every graph, and copies each slice of a
// larger array.
#pragma once

#include "runtime/primitive.h"

namespace mittens {

// The array's elements in row contiguous memory of their own, which lives until all work given to the stream so far,
// and the next, is done.
mx::array contiguous(const mx::array& array, mx::Stream stream);

// Copies an array, which need not be row contiguous, into one that is.
Launch copy_launch(const mx::array& source, const mx::array& target);

// Writes a row [columns], which may be a view, into every row of an output [.., columns]; zeros where there is no row.
void fill_rows(mx::array& target, const mx::array* row, mx::Stream stream);

// Whether an array is row contiguous and its start is aligned to `alignment` bytes.
bool is_row_contiguous(const mx::array& array, int64_t alignment = 1);

// The inputs of an evaluation, row contiguous and aligned: themselves where they are, else `copies`, which are made on
// the stream and live until their readers are done.
const Arrays& row_contiguous(const Arrays& inputs, mx::Stream stream, Arrays& copies, int64_t alignment = 1);

}  // namespace mittens
