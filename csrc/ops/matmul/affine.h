// Affine quantized weights as the ops take them: a triple of packed words, scales and biases.
#pragma once

#include <optional>
#include <string>

#include "cpu/quantized_matmul.h"
#include "mlx/utils.h"
#include "ops/matmul/row_products.h"
#include "params/matmul.h"
#include "runtime/primitive.h"

namespace mittens {

struct AffineFormat {
  int group_size;
  int bits;
  bool transpose;

  bool operator==(const AffineFormat&) const = default;
};

struct AffineShape {
  int columns;  // of x
  int outputs;
};

// MLX's defaults where nothing is given; throws unless mx knows bits and group size.
AffineFormat affine_format(const char* op, std::optional<int> group_size, std::optional<int> bits, bool transpose);

// Whether there are kernels for the bits.
bool has_affine_kernels(const AffineFormat& format);

// What the shapes of a triple say; throws where they contradict each other, the format or x.
AffineShape check_affine(const char* op, const mx::array& x, const mx::array& w, const mx::array& scales,
                         const mx::array& biases, const AffineFormat& format);

// mx's product with quantized weights of any mode, for what no kernel covers.
mx::array quantized_matmul_of_mx(const mx::array& x, const mx::array& w, const mx::array& scales,
                                 const std::optional<mx::array>& biases, bool transpose, std::optional<int> group_size,
                                 std::optional<int> bits, const std::string& mode, mx::StreamOrDevice where);

// Whether the kernels can read a triple where it lies.
bool is_prepared_affine(const mx::array& w, const mx::array& scales, const mx::array& biases);

// A triple as the kernels read it.
Arrays prepared_affine(const mx::array& w, const mx::array& scales, const mx::array& biases, mx::Stream stream);

// The params that say where a triple's matrices lie; the arrays have been prepared.
QuantizedParams affine_params(const mx::array& w, const mx::array& scales, const mx::array& biases,
                              const AffineFormat& format);

// The same for the native code, one entry for each matrix.
std::vector<cpu::QuantizedWeights> native_affine(const mx::array& w, const mx::array& scales, const mx::array& biases,
                                                 const AffineFormat& format);

// Which rows kernel serves so many rows of x, and how its threadgroups are cut.
struct AffineRowsPlan : RowProductsPlan {
  uint32_t rows;  // of x that a threadgroup takes
};

// matrices: of weights that pass by one simdgroup, 2 for gate and up.
AffineRowsPlan plan_affine_rows(const AffineFormat& format, uint32_t rows, uint32_t columns, uint32_t outputs,
                                uint32_t batch, uint32_t most_rows, uint32_t matrices);

// Whether the kernels of one row of x by 8x8 matrices serve it (matmul/nvidia/qmv_mma.h): where tensor cores are many
// times faster than what unpacks the weights.
bool row_by_matrices(const AffineFormat& format, mx::Dtype dtype, uint32_t rows, mx::Stream stream);

// Whether mx takes a product of so many rows of x to an Apple GPU's matrix units.
bool goes_to_matrix_units(const AffineFormat& format, mx::Dtype dtype, size_t rows, int columns, int outputs,
                          mx::Stream stream);

// How its threadgroups are cut. matrices as above.
RowProductsPlan plan_affine_row(uint32_t columns, uint32_t outputs, uint32_t batch, uint32_t matrices);

// Which kernel of 8x8 matrices serves several rows.
struct AffineTilesPlan : AffineRowsPlan {
  uint32_t run;  // columns that have one scale
};

AffineTilesPlan plan_affine_tiles(const AffineFormat& format, mx::Dtype dtype, uint32_t rows, uint32_t columns,
                                  uint32_t outputs, uint32_t batch);

}  // namespace mittens
