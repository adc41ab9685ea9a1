// Quantized weights as the sources of products by rows (matmul/row_products.h).
#pragma once

#include "matmul/batch.h"
#include "mittens/instantiate.h"
#include "mittens/source/affine.h"
#include "mittens/source/small_floats.h"
#include "params/matmul.h"

namespace mittens {

enum QuantizedFormat {
  affine_2 = 2,
  affine_3 = 3,
  affine_4 = 4,
  affine_5 = 5,
  affine_6 = 6,
  affine_8 = 8,
  mxfp4 = 16,
  mxfp8 = 17,
  nvfp4 = 18,
};

// Matrices of a format, for E columns at a time where it leaves a choice.
template <typename T, QuantizedFormat F, int E, bool holds_floats = (F >= mxfp4)>
struct QuantizedRows {
  using Scale = conditional_t<holds_floats, uchar, T>;
  using Source = conditional_t<holds_floats, FloatRows<F == mxfp8 ? 8 : 4, F == nvfp4 ? 4 : 5, E>, Affine<T, F, E>>;

  // Matrix `index` of a stack.
  static Source of(
      const device uint* w, const device Scale* scales, const device Scale* biases, constant QuantizedParams& params,
      uint index) {
    if constexpr (holds_floats) {
      return {
          w + matrix_offset(params.batch, params.weight_strides, index),
          scales + matrix_offset(params.batch, params.scales_strides, index), params.weight_stride,
          params.scales_stride};
    } else {
      return {
          {w + matrix_offset(params.batch, params.weight_strides, index),
           scales + matrix_offset(params.batch, params.scales_strides, index),
           biases + matrix_offset(params.batch, params.biases_strides, index), params.weight_stride,
           params.scales_stride, params.biases_stride},
          params.group_shift};
    }
  }
};

// Of the scales of a format, and of biases where it has them.
template <typename T, QuantizedFormat F>
using ScaleOf = typename QuantizedRows<T, F, 16>::Scale;

}  // namespace mittens

// One instantiation for each format of mx.quantize and element type, called <name>_<format><suffix>_<dtype>.
#define instantiate_formats(name, suffix, function, ...)                           \
  instantiate_types(name "_2bit" suffix, function, affine_2, ##__VA_ARGS__)        \
  instantiate_types(name "_3bit" suffix, function, affine_3, ##__VA_ARGS__)        \
  instantiate_types(name "_4bit" suffix, function, affine_4, ##__VA_ARGS__)        \
  instantiate_types(name "_5bit" suffix, function, affine_5, ##__VA_ARGS__)        \
  instantiate_types(name "_6bit" suffix, function, affine_6, ##__VA_ARGS__)        \
  instantiate_types(name "_8bit" suffix, function, affine_8, ##__VA_ARGS__)        \
  instantiate_types(name "_mxfp4" suffix, function, mxfp4, ##__VA_ARGS__)          \
  instantiate_types(name "_mxfp8" suffix, function, mxfp8, ##__VA_ARGS__)          \
  instantiate_types(name "_nvfp4" suffix, function, nvfp4, ##__VA_ARGS__)

// Of formats whose runs may be 8 columns long.
#define instantiate_short_runs(name, suffix, function, ...)                        \
  instantiate_types(name "_4bit" suffix, function, affine_4, ##__VA_ARGS__)        \
  instantiate_types(name "_8bit" suffix, function, affine_8, ##__VA_ARGS__)        \
  instantiate_types(name "_mxfp4" suffix, function, mxfp4, ##__VA_ARGS__)          \
  instantiate_types(name "_mxfp8" suffix, function, mxfp8, ##__VA_ARGS__)          \
  instantiate_types(name "_nvfp4" suffix, function, nvfp4, ##__VA_ARGS__)

// Of the common ones.
#define instantiate_common(name, function, ...)                                    \
  instantiate_types(name "_4bit", function, affine_4, ##__VA_ARGS__)               \
  instantiate_types(name "_8bit", function, affine_8, ##__VA_ARGS__)               \
  instantiate_types(name "_mxfp4", function, mxfp4, ##__VA_ARGS__)

// Of several rows of x.
#define instantiate_several(name, function)                                        \
  instantiate_types(name "_4bit_2", function, affine_4, 2)                         \
  instantiate_types(name "_4bit_4", function, affine_4, 4)                         \
  instantiate_types(name "_4bit_8", function, affine_4, 8)                         \
  instantiate_types(name "_8bit_2", function, affine_8, 2)                         \
  instantiate_types(name "_8bit_4", function, affine_8, 4)                         \
  instantiate_types(name "_8bit_8", function, affine_8, 8)                         \
  instantiate_types(name "_mxfp4_2", function, mxfp4, 2)                           \
  instantiate_types(name "_mxfp4_4", function, mxfp4, 4)                           \
  instantiate_types(name "_mxfp4_8", function, mxfp4, 8)
