#include "ops/matmul/quantized_embedding.h"

#include <limits>
#include <memory>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "cpu/matmul/quantized_embedding.h"
#include "mlx/ops.h"
#include "ops/matmul/quantized_weights.h"
#include "params/matmul.h"
#include "python/registry.h"
#include "runtime/array_layout.h"
#include "runtime/array_util.h"
#include "runtime/checks.h"
#include "runtime/cpu_types.h"
#include "runtime/fallback.h"
#include "runtime/op_binding.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

constexpr const char* op = "quantized_embedding";
const Name file = "matmul/quantized_embedding.metal";

mx::Shape shape_of_rows(const mx::array& indices, const mx::array& w, const QuantizedFormat& format) {
  mx::Shape shape = indices.shape();
  shape.push_back(static_cast<int>(int64_t(w.shape(1)) * 32 / format.bits));
  return shape;
}

// As the kernels read them: of 32 bits, with a sign or without. A wider one stays out of range.
mx::array narrowed(const mx::array& indices, mx::Stream s) {
  const mx::Dtype dtype = indices.dtype();
  if (dtype == mx::int32 || dtype == mx::uint32) {
    return indices;
  }
  if (dtype == mx::uint64) {
    const mx::array most(uint64_t(std::numeric_limits<uint32_t>::max()), mx::uint64);
    return mx::astype(mx::minimum(indices, most, s), mx::uint32, s);
  }
  if (dtype == mx::int64) {
    const mx::array least(int64_t(std::numeric_limits<int32_t>::min()), mx::int64);
    const mx::array most(int64_t(std::numeric_limits<int32_t>::max()), mx::int64);
    return mx::astype(mx::clip(indices, least, most, s), mx::int32, s);
  }
  return mx::astype(indices, mx::issubdtype(dtype, mx::unsignedinteger) ? mx::uint32 : mx::int32, s);
}

// mx's two steps: gathers of rows, and one dequantization.
mx::array rows_of_mx(const mx::array& indices, const mx::array& w, const mx::array& scales,
                     const std::optional<mx::array>& biases, const QuantizedFormat& format, mx::Stream s) {
  const auto rows = [&](const mx::array& matrix) { return mx::take(matrix, mx::flatten(indices, s), 0, s); };
  const std::optional<mx::array> of_biases = biases ? std::optional(rows(*biases)) : std::nullopt;
  const mx::array y = mx::dequantize(rows(w), rows(scales), of_biases, format.group_size, format.bits,
                                     mode_name(format), std::nullopt, std::nullopt, s);
  return mx::reshape(y, shape_of_rows(indices, w, format), s);
}

// indices int32 or uint32 of any shape, w [rows, words], scales and biases [rows, groups]; without biases the scales
// stand in their place.
class QuantizedEmbedding : public KernelPrimitive {
 public:
  QuantizedEmbedding(mx::Stream stream, QuantizedFormat format, mx::Dtype dtype)
      : KernelPrimitive(stream), format_(format), dtype_(dtype) {}

  const char* name() const override {
    return "MittensQuantizedEmbedding";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return format_ == static_cast<const QuantizedEmbedding&>(other).format_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {shape_of_rows(inputs[0], inputs[1], format_)};
  }

  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs, const std::vector<int>& axes) override {
    if (axes[0] < 0 || axes[1] >= 0 || axes[2] >= 0 || axes[3] >= 0) {
      return KernelPrimitive::vmap(inputs, axes);
    }
    const mx::array y = quantized_embedding(inputs[0], inputs[1], inputs[2], biases_of(inputs), format_.group_size,
                                            format_.bits, mode_name(format_), stream());
    return {{y}, {axes[0]}};
  }

 protected:
  const Arrays& prepared(const Arrays& inputs, Arrays& copies) override {
    if (is_row_contiguous(inputs[0], 4) && is_prepared_triple(inputs[1], inputs[2], inputs[3])) {
      return inputs;
    }
    copies = prepared_triple(inputs[1], inputs[2], inputs[3], stream());
    copies.insert(copies.begin(), is_row_contiguous(inputs[0], 4) ? inputs[0] : contiguous(inputs[0], stream()));
    return copies;
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const QuantizedParams weights = quantized_params(inputs[1], inputs[2], inputs[3], format_);
    EmbeddingParams params{};
    params.count = static_cast<uint32_t>(inputs[0].size());
    params.rows = static_cast<uint32_t>(inputs[1].shape(0));
    params.columns = static_cast<uint32_t>(outputs[0].shape(-1));
    params.group_shift = weights.group_shift;
    params.words_stride = weights.weight_stride;
    params.scales_stride = weights.scales_stride;
    params.biases_stride = weights.biases_stride;
    params.is_signed = inputs[0].dtype() == mx::int32;
    Launch launch;
    launch.file = file;
    launch.kernel = kernel_name(dtype_, op, format_name(format_));
    launch.threadgroups = {ceil_divide(outputs[0].size() / run_of(format_), uint32_t(kEmbeddingThreads)), 1, 1};
    launch.threads = {kEmbeddingThreads, 1, 1};
    launch.input(inputs[0]);
    add_view(launch, inputs[1]);
    add_view(launch, inputs[2]);
    if (format_.has_biases()) {
      add_view(launch, inputs[3]);
    } else {
      launch.stand_in(inputs[3]);
    }
    return in_order(launch.output(outputs[0]).params(params));
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    return
        [type = native_type(dtype_), w = native_quantized(inputs[1], inputs[2], inputs[3], format_)[0],
         indices = inputs[0].data<uint32_t>(), is_signed = inputs[0].dtype() == mx::int32, count = inputs[0].size(),
         rows = static_cast<size_t>(inputs[1].shape(0)), columns = static_cast<size_t>(outputs[0].shape(-1)),
         y = data_of(outputs[0])] { cpu::quantized_embedding(type, w, indices, is_signed, count, rows, columns, y); };
  }

  Arrays composed(const Arrays& inputs) override {
    const mx::Stream s = stream();
    const int rows = inputs[1].shape(0);
    const mx::array nan(std::numeric_limits<float>::quiet_NaN(), dtype_);
    if (rows == 0) {
      return {mx::full(output_shapes(inputs)[0], nan, s)};
    }
    mx::array indices = inputs[0];
    mx::array is_there = mx::less(indices, mx::array(rows, indices.dtype()), s);
    if (indices.dtype() == mx::int32) {
      const mx::array zero(0, mx::int32);
      indices = mx::where(mx::less(indices, zero, s), mx::add(indices, mx::array(rows), s), indices, s);
      is_there = mx::logical_and(is_there, mx::greater_equal(indices, zero, s), s);
    }
    const mx::array within = mx::where(is_there, indices, mx::zeros_like(indices, s), s);
    const mx::array y = rows_of_mx(within, inputs[1], inputs[2], biases_of(inputs), format_, s);
    return {mx::where(mx::expand_dims(is_there, -1, s), y, nan, s)};
  }

 private:
  std::optional<mx::array> biases_of(const Arrays& inputs) const {
    return format_.has_biases() ? std::optional(inputs[3]) : std::nullopt;
  }

  // Columns of a thread.
  static uint32_t run_of(const QuantizedFormat& format) {
    return format.bits == 1 ? 32 : format.bits == 4 || format.bits == 8 ? 8 : 16;
  }

  QuantizedFormat format_;
  mx::Dtype dtype_;
};

// The format of matrices that fit each other and the indices.
QuantizedFormat checked_format(const mx::array& indices, const mx::array& w, const mx::array& scales,
                               const std::optional<mx::array>& biases, std::optional<int> group_size,
                               std::optional<int> bits, const std::string& mode) {
  const QuantizedFormat format = quantized_format(op, group_size, bits, true, mode);
  if (!mx::issubdtype(indices.dtype(), mx::integer)) {
    checks::fail<DtypeError>(op, "indices has dtype ", indices.dtype(), ": expected integers");
  }
  if (w.ndim() != 2) {
    checks::fail(op, "w has shape ", w.shape(), ": expected two dimensions, rows of packed integers");
  }
  check_quantized(op, static_cast<int>(int64_t(w.shape(1)) * 32 / format.bits), w, scales, biases, format);
  return format;
}

// Why mx computes a call; null where ours does.
const char* why_not(const mx::array& scales, const std::optional<mx::array>& biases, uint64_t size) {
  if (biases && biases->dtype() != scales.dtype()) {
    return "scales and biases of two dtypes";
  }
  if (biases && !has_kernels(scales.dtype())) {
    return "float64";
  }
  return size > uint64_t(std::numeric_limits<uint32_t>::max()) * 8 ? "more than 2**35 elements" : nullptr;
}

}  // namespace

std::optional<mx::array> try_quantized_embedding(const mx::array& indices, const mx::array& w, const mx::array& scales,
                                                 const std::optional<mx::array>& biases, std::optional<int> group_size,
                                                 std::optional<int> bits, const std::string& mode,
                                                 mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  const QuantizedFormat format = checked_format(indices, w, scales, biases, group_size, bits, mode);
  const mx::Dtype dtype = format.has_biases() ? scales.dtype() : mx::bfloat16;
  mx::Shape shape = shape_of_rows(indices, w, format);
  const uint64_t size = uint64_t(indices.size()) * shape.back();
  if (const char* reason = why_not(scales, biases, size)) {
    return fallback(op, reason);
  }
  if (is_switched_off(op)) {
    return std::nullopt;
  }
  if (size == 0) {
    return mx::zeros(shape, dtype, stream);
  }
  Arrays inputs = {narrowed(indices, stream), w, scales, biases ? *biases : scales};
  auto primitive = std::make_shared<QuantizedEmbedding>(stream, format, dtype);
  return mx::array(std::move(shape), dtype, std::move(primitive), std::move(inputs));
}

mx::array quantized_embedding(const mx::array& indices, const mx::array& w, const mx::array& scales,
                              const std::optional<mx::array>& biases, std::optional<int> group_size,
                              std::optional<int> bits, const std::string& mode, mx::StreamOrDevice where) {
  auto y = try_quantized_embedding(indices, w, scales, biases, group_size, bits, mode, where);
  if (y) {
    return *std::move(y);
  }
  return rows_of_mx(indices, w, scales, biases, quantized_format(op, group_size, bits, true, mode),
                    mx::to_stream(where));
}

namespace {

void bind(nb::module_& module) {
  bind_function(module, op, &quantized_embedding, "indices"_a, "w"_a, "scales"_a, "biases"_a.none() = nb::none(),
                "group_size"_a.none() = nb::none(), "bits"_a.none() = nb::none(), "mode"_a = "affine", nb::kw_only(),
                "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
