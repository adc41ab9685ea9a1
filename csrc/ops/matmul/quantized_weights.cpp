#include "ops/matmul/quantized_weights.h"

#include <algorithm>
#include <bit>

#include "mlx/ops.h"
#include "params/matmul.h"
#include "runtime/array_layout.h"
#include "runtime/checks.h"
#include "runtime/cpu_types.h"

namespace mittens {

namespace {

constexpr size_t most_batch_axes = 4;
constexpr int64_t word_alignment = 16;

// In the order of cpu::QuantizedMode, with MLX's defaults.
struct Mode {
  const char* name;
  cpu::QuantizedMode mode;
  int group_size;
  int bits;
};
constexpr Mode modes[] = {
    {"affine", cpu::QuantizedMode::affine, 64, 4},
    {"mxfp4", cpu::QuantizedMode::mxfp4, 32, 4},
    {"mxfp8", cpu::QuantizedMode::mxfp8, 32, 8},
    {"nvfp4", cpu::QuantizedMode::nvfp4, 16, 4},
};

// The axes before the last two of an array's view, merged where the strides of all three arrays of a triple allow.
struct Stack {
  std::vector<uint32_t> shape;
  std::vector<int64_t> strides[3];
};

Stack stack_of(const mx::array& w, const mx::array& scales, const mx::array& biases) {
  const mx::array* arrays[3] = {&w, &scales, &biases};
  Stack stack;
  for (int d = 0; d < static_cast<int>(w.ndim()) - 2; ++d) {
    const int64_t size = w.shape(d);
    if (size == 1) {
      continue;
    }
    bool merges = !stack.shape.empty();
    for (int i = 0; i < 3 && merges; ++i) {
      merges = stack.strides[i].back() == arrays[i]->strides(d) * size;
    }
    if (merges) {
      stack.shape.back() *= size;
    } else {
      stack.shape.push_back(size);
    }
    for (int i = 0; i < 3; ++i) {
      if (merges) {
        stack.strides[i].back() = arrays[i]->strides(d);
      } else {
        stack.strides[i].push_back(arrays[i]->strides(d));
      }
    }
  }
  return stack;
}

bool has_few_axes(const mx::array& w, const mx::array& scales, const mx::array& biases) {
  return w.ndim() - 2 <= most_batch_axes || stack_of(w, scales, biases).shape.size() <= most_batch_axes;
}

}  // namespace

QuantizedFormat quantized_format(const char* op, std::optional<int> group_size, std::optional<int> bits, bool transpose,
                                 const std::string& mode) {
  const Mode* known = std::find_if(std::begin(modes), std::end(modes), [&](const Mode& m) { return mode == m.name; });
  if (known == std::end(modes)) {
    checks::fail(op, "mode is '", mode, "': expected affine, mxfp4, mxfp8 or nvfp4");
  }
  const QuantizedFormat format{group_size.value_or(known->group_size), bits.value_or(known->bits), transpose,
                               known->mode};
  if (!format.has_biases()) {
    if (format.bits != known->bits || format.group_size != known->group_size) {
      checks::fail(op, "bits is ", format.bits, " and group_size is ", format.group_size, ": mode ", mode, " expects ",
                   known->bits, " and ", known->group_size);
    }
    return format;
  }
  if (format.bits < 1 || format.bits > 8 || format.bits == 7) {
    checks::fail(op, "bits is ", format.bits, ": expected 1, 2, 3, 4, 5, 6 or 8");
  }
  if (format.group_size != 32 && format.group_size != 64 && format.group_size != 128) {
    checks::fail(op, "group_size is ", format.group_size, ": expected 32, 64 or 128");
  }
  return format;
}

const char* mode_name(const QuantizedFormat& format) {
  return modes[static_cast<size_t>(format.mode)].name;
}

const char* format_name(const QuantizedFormat& format) {
  constexpr const char* affine[] = {"", "1bit", "2bit", "3bit", "4bit", "5bit", "6bit", "", "8bit"};
  return format.has_biases() ? affine[format.bits] : mode_name(format);
}

bool has_affine_kernels(const QuantizedFormat& format) {
  return format.has_biases() && (format.bits == 4 || format.bits == 8);
}

const char* why_not_covered(const QuantizedFormat& format) {
  return format.bits == 1 ? "1 bit" : nullptr;
}

bool has_common_kernels(const QuantizedFormat& format) {
  return has_affine_kernels(format) || format.mode == cpu::QuantizedMode::mxfp4;
}

void check_triple_size(const char* op, const std::string& name, const Arrays& triple, const QuantizedFormat& format) {
  const size_t expected = format.has_biases() ? 3 : 2;
  if (triple.size() != expected) {
    checks::fail(op, name, " has ", triple.size(), " arrays: mode ", mode_name(format), " expects ", expected,
                 expected == 3 ? ", w, scales and biases" : ", w and scales");
  }
}

void check_packed_heads(const char* op, const char* name, const mx::array& words, const mx::array& scales,
                        const mx::array& biases) {
  if (words.dtype() != mx::uint32) {
    checks::fail<DtypeError>(op, name, " has words of dtype ", words.dtype(),
                             ": expected uint32, as mx.quantize packs them");
  }
  for (const auto* array : {&words, &scales, &biases}) {
    if (array->ndim() != 4) {
      checks::fail(op, name, " has an array of shape ", array->shape(), ": expected four dimensions");
    }
  }
}

QuantizedShape check_quantized(const char* op, const mx::array& x, const mx::array& w, const mx::array& scales,
                               const std::optional<mx::array>& biases, const QuantizedFormat& format) {
  if (x.ndim() < 1) {
    checks::fail(op, "x has no dimensions: expected at least one");
  }
  return check_quantized(op, x.shape(-1), w, scales, biases, format);
}

QuantizedShape check_quantized(const char* op, int columns, const mx::array& w, const mx::array& scales,
                               const std::optional<mx::array>& biases, const QuantizedFormat& format) {
  if (w.dtype() != mx::uint32) {
    checks::fail<DtypeError>(op, "w has dtype ", w.dtype(), ": expected uint32, as mx.quantize packs it");
  }
  if (w.ndim() < 2) {
    checks::fail(op, "w has shape ", w.shape(), ": expected at least two dimensions");
  }
  if (format.has_biases()) {
    if (!biases) {
      checks::fail(op, "biases is None: expected an array, which affine quantization has");
    }
    checks::floating(op, {{"scales", scales}});
    checks::floating(op, {{"biases", *biases}});
    if (biases->shape() != scales.shape()) {
      checks::fail(op, "biases has shape ", biases->shape(), ", scales has shape ", scales.shape(),
                   ": expected the same shape");
    }
  } else {
    if (biases) {
      checks::fail(op, "biases has shape ", biases->shape(), ": expected None, as mode ", mode_name(format),
                   " has no biases");
    }
    if (scales.dtype() != mx::uint8) {
      checks::fail<DtypeError>(op, "scales has dtype ", scales.dtype(),
                               ": expected uint8, as mx.quantize gives them in ", "mode ", mode_name(format));
    }
  }
  const int packed = static_cast<int>(int64_t(w.shape(-1)) * 32 / format.bits);
  const bool is_of_w =
      scales.ndim() == w.ndim() && std::equal(scales.shape().begin(), scales.shape().end() - 1, w.shape().begin());
  if (!is_of_w || int64_t(scales.shape(-1)) * format.group_size != packed) {
    mx::Shape expected = w.shape();
    expected.back() = packed / format.group_size;
    checks::fail(op, "scales has shape ", scales.shape(), ", w has shape ", w.shape(), ", which is ", packed,
                 " integers of ", format.bits, " bits a row: expected shape ", expected, " for groups of ",
                 format.group_size);
  }
  const QuantizedShape shape{format.transpose ? packed : w.shape(-2), format.transpose ? w.shape(-2) : packed};
  if (columns != shape.columns) {
    checks::fail(op, "x has ", columns, " columns, w has shape ", w.shape(), ", which is ", shape.columns, " by ",
                 shape.outputs, " of ", format.bits, " bits with transpose=", format.transpose ? "True" : "False",
                 ": expected ", shape.columns, " columns");
  }
  return shape;
}

mx::array quantized_matmul_of_mx(const mx::array& x, const mx::array& w, const mx::array& scales,
                                 const std::optional<mx::array>& biases, bool transpose, std::optional<int> group_size,
                                 std::optional<int> bits, const std::string& mode, mx::StreamOrDevice where) {
  // mx multiplies the matrices of a stack one by one, on NVIDIA GPUs also by one and the same: a batch of B tokens,
  // [B, 1, columns], is B products of one row there. Rows that share a matrix are one product.
  // Its derivatives want two axes.
  const bool is_row = x.ndim() == 1, share_matrix = x.ndim() > 2 && w.ndim() == 2;
  const mx::array rows = is_row ? mx::expand_dims(x, 0, where) : share_matrix ? mx::flatten(x, 0, -2, where) : x;
  mx::array y = mx::quantized_matmul(rows, w, scales, biases, transpose, group_size, bits, mode, where);
  if (is_row) {
    y = mx::squeeze(y, -2, where);
  } else if (share_matrix) {
    y = mx::unflatten(y, 0, mx::Shape(x.shape().begin(), x.shape().end() - 1), where);
  }
  // Its evaluation is not for sizes of zero.
  const bool is_evaluable = y.size() > 0 && x.shape(-1) > 0;
  return is_evaluable ? y : mx::zeros(y.shape(), y.dtype(), where);
}

bool is_prepared_triple(const mx::array& w, const mx::array& scales, const mx::array& biases) {
  return has_rows(w, word_alignment) && has_rows(scales, 1) && has_rows(biases, 1) && has_few_axes(w, scales, biases);
}

Arrays prepared_triple(const mx::array& w, const mx::array& scales, const mx::array& biases, mx::Stream stream) {
  Arrays ready = {with_rows(w, word_alignment, stream), with_rows(scales, 1, stream), with_rows(biases, 1, stream)};
  if (!has_few_axes(ready[0], ready[1], ready[2])) {
    return {contiguous(w, stream), contiguous(scales, stream), contiguous(biases, stream)};
  }
  return ready;
}

QuantizedParams quantized_params(const mx::array& w, const mx::array& scales, const mx::array& biases,
                                 const QuantizedFormat& format) {
  QuantizedParams params{};
  std::fill(std::begin(params.batch.shape), std::end(params.batch.shape), 1u);
  if (w.ndim() > 2) {
    const Stack stack = stack_of(w, scales, biases);
    params.batch.axes = static_cast<uint32_t>(stack.shape.size());
    std::copy(stack.shape.begin(), stack.shape.end(), params.batch.shape);
    std::copy(stack.strides[0].begin(), stack.strides[0].end(), params.weight_strides);
    std::copy(stack.strides[1].begin(), stack.strides[1].end(), params.scales_strides);
    std::copy(stack.strides[2].begin(), stack.strides[2].end(), params.biases_strides);
  }
  params.matrices = static_cast<uint32_t>(leading_size(w, 2));
  params.group_shift = std::countr_zero(static_cast<unsigned>(format.group_size));
  params.weight_stride = static_cast<uint32_t>(w.strides(-2));
  params.scales_stride = static_cast<uint32_t>(scales.strides(-2));
  params.biases_stride = static_cast<uint32_t>(biases.strides(-2));
  params.two23 = std::bit_cast<uint32_t>(8388608.0f);
  return params;
}

std::vector<cpu::QuantizedWeights> native_quantized(const mx::array& w, const mx::array& scales,
                                                    const mx::array& biases, const QuantizedFormat& format) {
  const Stack stack = stack_of(w, scales, biases);
  const int64_t item = scales.itemsize();
  std::vector<cpu::QuantizedWeights> matrices(leading_size(w, 2));
  for (size_t i = 0; i < matrices.size(); ++i) {
    int64_t offsets[3] = {0, 0, 0};
    size_t rest = i;
    for (size_t d = stack.shape.size(); d-- > 0; rest /= stack.shape[d]) {
      for (int a = 0; a < 3; ++a) {
        offsets[a] += static_cast<int64_t>(rest % stack.shape[d]) * stack.strides[a][d];
      }
    }
    matrices[i] = {
        .words = w.data<uint32_t>() + offsets[0],
        .scales = static_cast<const char*>(data_of(scales)) + offsets[1] * item,
        .biases = static_cast<const char*>(data_of(biases)) + offsets[2] * item,
        .words_stride = static_cast<size_t>(w.strides(-2)),
        .scales_stride = static_cast<size_t>(scales.strides(-2)),
        .biases_stride = static_cast<size_t>(biases.strides(-2)),
        .mode = format.mode,
        .bits = format.bits,
        .group_size = format.group_size,
        .transpose = format.transpose,
    };
  }
  return matrices;
}

}  // namespace mittens
