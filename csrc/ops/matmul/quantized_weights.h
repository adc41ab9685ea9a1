// Quantized weights as the ops take them: a triple of packed words, scales and biases. Modes but affine have no biases:
// there the scales stand in their place.
#pragma once

#include <optional>
#include <string>

#include "cpu/matmul/quantized_matmul.h"
#include "mlx/utils.h"
#include "params/matmul.h"
#include "runtime/primitive.h"

namespace mittens {

struct QuantizedFormat {
  int group_size;
  int bits;
  bool transpose;
  cpu::QuantizedMode mode = cpu::QuantizedMode::affine;

  bool has_biases() const {
    return mode == cpu::QuantizedMode::affine;
  }
  bool operator==(const QuantizedFormat&) const = default;
};

struct QuantizedShape {
  int columns;  // of x
  int outputs;
};

// MLX's defaults where nothing is given; throws unless mx knows mode, bits and group size.
QuantizedFormat quantized_format(const char* op, std::optional<int> group_size, std::optional<int> bits, bool transpose,
                                 const std::string& mode = "affine");

const char* mode_name(const QuantizedFormat& format);

// The part of kernels' names: 4bit for affine quantization, else the mode. For formats that have kernels.
const char* format_name(const QuantizedFormat& format);

// Affine quantization of 4 and 8 bits has all kernels. Other formats have those for Apple GPUs, which then serve on
// all, and native code.
bool has_affine_kernels(const QuantizedFormat& format);

// Why nothing but mx computes a product; null if kernels, or on a CPU native code, do.
const char* why_not_covered(const QuantizedFormat& format);

// Affine quantization of 4 and 8 bits and mxfp4, which most models have.
bool has_common_kernels(const QuantizedFormat& format);

// Throws unless a triple, which messages call so, has as many arrays as the format.
void check_triple_size(const char* op, const std::string& name, const Arrays& triple, const QuantizedFormat& format);

// Throws unless a triple of heads [batch, heads, tokens, ..] holds words and has four dimensions throughout.
void check_packed_heads(const char* op, const char* name, const mx::array& words, const mx::array& scales,
                        const mx::array& biases);

// The shape that a triple has; throws where its shapes contradict each other, the format or the columns of x.
QuantizedShape check_quantized(const char* op, int columns, const mx::array& w, const mx::array& scales,
                               const std::optional<mx::array>& biases, const QuantizedFormat& format);
QuantizedShape check_quantized(const char* op, const mx::array& x, const mx::array& w, const mx::array& scales,
                               const std::optional<mx::array>& biases, const QuantizedFormat& format);

// mx's product with quantized weights of any mode, for calls without a kernel.
mx::array quantized_matmul_of_mx(const mx::array& x, const mx::array& w, const mx::array& scales,
                                 const std::optional<mx::array>& biases, bool transpose, std::optional<int> group_size,
                                 std::optional<int> bits, const std::string& mode, mx::StreamOrDevice where);

// Whether the kernels can read a triple where it lies.
bool is_prepared_triple(const mx::array& w, const mx::array& scales, const mx::array& biases);

// A triple as the kernels read it.
Arrays prepared_triple(const mx::array& w, const mx::array& scales, const mx::array& biases, mx::Stream stream);

// The params that say where a triple's matrices lie; the arrays have been prepared.
QuantizedParams quantized_params(const mx::array& w, const mx::array& scales, const mx::array& biases,
                                 const QuantizedFormat& format);

// The same for the native code, one entry for each matrix.
std::vector<cpu::QuantizedWeights> native_quantized(const mx::array& w, const mx::array& scales,
                                                    const mx::array& biases, const QuantizedFormat& format);

}  // namespace mittens
