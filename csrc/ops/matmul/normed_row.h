// A root mean square norm between two quantized products of one row, without a launch of its own: the product before it
// computes the sum that it is of, the product behind it takes it for its row (metal/matmul/normed_row.h). It is found
// when the product behind it is made, while nothing has computed the norm yet.
#pragma once

#include <optional>

#include "params/matmul.h"
#include "runtime/primitive.h"

namespace mittens {

// The norm, as the primitive of a product keeps it. Its first input is float32, and the squares are its last.
struct NormOfRow {
  float eps;
  mx::Dtype dtype;  // of the product

  bool operator==(const NormOfRow& other) const {
    return eps == other.eps && dtype == other.dtype;
  }
};

struct NormedRow {
  mx::array scaled;
  mx::array squares;
  NormOfRow norm;
};

// A primitive of another family whose first output of one row may be summed in its kernel too.
class SummedProduct {
 public:
  virtual ~SummedProduct() = default;

  // From its inputs: the sum with a residual, that times the weight of a norm in float32, and squares, the first three
  // of a new primitive's outputs. Nothing of several rows.
  virtual std::optional<Arrays> with_sum(const Arrays& inputs, const mx::array& residual, const mx::array& weight) = 0;
};

// A primitive whose first outputs are a sum, that times the weight of a norm in float32, and squares.
class HandsRowOn {
 public:
  virtual ~HandsRowOn() = default;

  // The weight among its inputs; null where it has no such outputs.
  virtual const mx::array* weight_of_row(const Arrays& inputs) const = 0;
};

// Blocks of outputs that have a sum of squares.
int square_blocks(int outputs);

// The norm y of the sum of a quantized product and a residual, in two parts that a kernel of the product computes. The
// sum becomes that kernel's for all who hold it, and y the norm of that sum, which runs only if anybody else reads it.
// Nothing where y is another array, where the product is of several rows or has a format without such a kernel, or
// where y has more than `holders`, not counting the sum: for other readers the norm is computed anyhow.
std::optional<NormedRow> take_normed_row(const mx::array& y, long holders, mx::Stream stream);

// The same of a norm whose row take_normed_row gave to another reader before: a norm may have several.
std::optional<NormedRow> handed_on_row(const mx::array& y, mx::Stream stream);

// The sum, that times the weight, and squares, in mx operations.
Arrays compose_sum(const mx::array& product, const mx::array& residual, const mx::array& weight, mx::Stream stream);

// The row in mx operations, from the inputs of a product of it.
mx::array compose_row(const Arrays& inputs, const NormOfRow& norm, mx::Stream stream);

NormParams norm_params(const NormOfRow& norm, const mx::array& squares);

}  // namespace mittens
