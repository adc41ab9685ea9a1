// Affine quantized weights as the ops take them: a triple of packed words, scales and biases.
#pragma once

#include <optional>
#include <string>

#include "cpu/quantized_matmul.h"
#include "mlx/utils.h"
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

}  // namespace mittens
