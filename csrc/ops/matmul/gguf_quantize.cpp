// The ops block_quantize and block_dequantize: weights to GGUF blocks, and back.
#include <algorithm>
#include <iterator>
#include <limits>

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "mlx/ops.h"
#include "ops/matmul/gguf.h"
#include "params/matmul.h"
#include "python/registry.h"
#include "runtime/array_layout.h"
#include "runtime/checks.h"
#include "runtime/cpu_types.h"
#include "runtime/fallback.h"
#include "runtime/gpu.h"
#include "runtime/op_binding.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

const Name file = "matmul/gguf_quantize.metal";

// blocks uint8 [.., bytes of a row] -> w [.., columns].
class BlockDequantize : public KernelPrimitive {
 public:
  BlockDequantize(mx::Stream stream, cpu::BlockKind kind, mx::Dtype dtype)
      : KernelPrimitive(stream), kind_(kind), dtype_(dtype) {}

  const char* name() const override {
    return "MittensBlockDequantize";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& dequantize = static_cast<const BlockDequantize&>(other);
    return kind_ == dequantize.kind_ && dtype_ == dequantize.dtype_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    mx::Shape shape = inputs[0].shape();
    shape.back() =
        shape.back() / static_cast<int>(cpu::block_bytes(kind_)) * static_cast<int>(cpu::block_weights(kind_));
    return {shape};
  }

  // Bytes have no derivative.
  Arrays vjp(const Arrays& primals, const Arrays&, const std::vector<int>& argnums, const Arrays&) override {
    return Arrays(argnums.size(), mx::zeros_like(primals[0], stream()));
  }

  Arrays jvp(const Arrays& primals, const Arrays&, const std::vector<int>&) override {
    return {mx::zeros(output_shapes(primals)[0], dtype_, stream())};
  }

  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs, const std::vector<int>& axes) override {
    const mx::array blocks = mx::moveaxis(inputs[0], axes[0], 0, stream());
    return {{block_dequantize(blocks, block_kind_name(kind_), dtype_, stream())}, {0}};
  }

 protected:
  const Arrays& prepared(const Arrays& inputs, Arrays& copies) override {
    return row_contiguous(inputs, stream(), copies, runs_kernels(stream()) ? 16 : 1);
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    constexpr uint32_t threads = 256;
    const uint32_t runs = static_cast<uint32_t>(outputs[0].size() / kDequantizedColumns);
    Launch launch;
    launch.file = file;
    launch.kernel = kernel_name(dtype_, "block_dequantize");
    launch.threadgroups = {ceil_divide(runs, threads), 1, 1};
    launch.threads = {threads, 1, 1};
    launch.input(inputs[0]).output(outputs[0]).params(DequantizeParams{static_cast<uint32_t>(kind_), runs});
    return in_order(std::move(launch));
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    return [type = native_type(dtype_), kind = kind_, blocks = inputs[0].data<uint8_t>(), w = data_of(outputs[0]),
            count = outputs[0].size() / cpu::block_weights(kind_)] {
      cpu::block_dequantize(type, kind, blocks, w, count);
    };
  }

  Arrays composed(const Arrays& inputs) override {
    return {block_dequantize(inputs[0], block_kind_name(kind_), dtype_, stream())};
  }

 private:
  cpu::BlockKind kind_;
  mx::Dtype dtype_;
};

// w [.., columns] -> blocks uint8 [.., bytes of a row].
class BlockQuantize : public KernelPrimitive {
 public:
  BlockQuantize(mx::Stream stream, cpu::BlockKind kind) : KernelPrimitive(stream), kind_(kind) {}

  const char* name() const override {
    return "MittensBlockQuantize";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return kind_ == static_cast<const BlockQuantize&>(other).kind_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    mx::Shape shape = inputs[0].shape();
    shape.back() =
        shape.back() / static_cast<int>(cpu::block_weights(kind_)) * static_cast<int>(cpu::block_bytes(kind_));
    return {shape};
  }

  // Constant nearly everywhere.
  Arrays vjp(const Arrays& primals, const Arrays&, const std::vector<int>& argnums, const Arrays&) override {
    return Arrays(argnums.size(), mx::zeros_like(primals[0], stream()));
  }

  Arrays jvp(const Arrays& primals, const Arrays&, const std::vector<int>&) override {
    return {mx::zeros(output_shapes(primals)[0], mx::uint8, stream())};
  }

  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs, const std::vector<int>& axes) override {
    const mx::array w = mx::moveaxis(inputs[0], axes[0], 0, stream());
    return {{block_quantize(w, block_kind_name(kind_), stream())}, {0}};
  }

 protected:
  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    constexpr uint32_t simdgroups = 8;  // of a threadgroup, each with a block
    const size_t count = inputs[0].size() / cpu::block_weights(kind_);
    Launch launch;
    launch.file = file;
    launch.kernel = kernel_name(inputs[0].dtype(), "block_quantize", block_kind_name(kind_));
    launch.threadgroups = {ceil_divide(count, simdgroups), 1, 1};
    launch.threads = {32 * simdgroups, 1, 1};
    launch.input(inputs[0]).output(outputs[0]).params(BlockCountParams{static_cast<uint32_t>(count)});
    return in_order(std::move(launch));
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    return [type = native_type(inputs[0].dtype()), kind = kind_, w = data_of(inputs[0]),
            blocks = outputs[0].data<uint8_t>(), count = inputs[0].size() / cpu::block_weights(kind_)] {
      cpu::block_quantize(type, kind, w, blocks, count);
    };
  }

  Arrays composed(const Arrays& inputs) override {
    return {block_quantize(inputs[0], block_kind_name(kind_), stream())};
  }

 private:
  cpu::BlockKind kind_;
};

// In the order of cpu::BlockKind.
constexpr const char* kind_names[] = {"q4_0", "q4_1", "q5_0", "q5_1",   "q8_0",   "q2_k",  "q3_k",
                                      "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs", "mxfp4", "nvfp4"};

// Other kinds are made on a CPU.
bool has_quantize_kernel(cpu::BlockKind kind) {
  return kind == cpu::BlockKind::q4_0 || kind == cpu::BlockKind::q8_0;
}

mx::array only(const std::shared_ptr<KernelPrimitive>& primitive, mx::Dtype dtype, const mx::array& input) {
  return mx::array::make_arrays(primitive->output_shapes({input}), {dtype}, primitive, {input})[0];
}

}  // namespace

const char* block_kind_name(cpu::BlockKind kind) {
  return kind_names[static_cast<size_t>(kind)];
}

cpu::BlockKind block_kind(const char* op, const std::string& name) {
  const auto found = std::find(std::begin(kind_names), std::end(kind_names), name);
  if (found == std::end(kind_names)) {
    std::string known = kind_names[0];
    for (size_t i = 1; i < std::size(kind_names); ++i) {
      known += std::string(i + 1 < std::size(kind_names) ? ", " : " or ") + kind_names[i];
    }
    checks::fail(op, "kind is '", name, "': expected ", known);
  }
  return static_cast<cpu::BlockKind>(found - std::begin(kind_names));
}

void check_blocks(const char* op, const mx::array& blocks, cpu::BlockKind kind) {
  if (blocks.dtype() != mx::uint8) {
    checks::fail<DtypeError>(op, "blocks has dtype ", blocks.dtype(), ": expected uint8, as a .gguf file stores them");
  }
  if (blocks.ndim() < 1 || blocks.shape(-1) % cpu::block_bytes(kind) != 0) {
    checks::fail(op, "blocks has shape ", blocks.shape(), ": expected rows of a whole number of ",
                 block_kind_name(kind), " blocks, ", cpu::block_bytes(kind), " bytes each");
  }
}

mx::array block_dequantize(const mx::array& blocks, const std::string& kind_name, mx::Dtype dtype,
                           mx::StreamOrDevice where) {
  constexpr const char* op = "block_dequantize";
  const cpu::BlockKind kind = block_kind(op, kind_name);
  check_blocks(op, blocks, kind);
  if (!has_kernels(dtype)) {
    checks::fail<DtypeError>(op, "dtype is ", dtype, ": expected float32, float16 or bfloat16");
  }
  const int64_t columns = int64_t(blocks.shape(-1)) / cpu::block_bytes(kind) * cpu::block_weights(kind);
  if (columns > std::numeric_limits<int32_t>::max()) {
    checks::fail(op, "blocks has shape ", blocks.shape(), ", rows of ", columns,
                 " weights: expected at most 2**31 - 1, as an array of rows has");
  }
  const mx::Stream stream = checks::checked_stream(op, where);
  return only(std::make_shared<BlockDequantize>(stream, kind, dtype), dtype, blocks);
}

mx::array block_quantize(const mx::array& w, const std::string& kind_name, mx::StreamOrDevice where) {
  constexpr const char* op = "block_quantize";
  const cpu::BlockKind kind = block_kind(op, kind_name);
  if (!has_kernels(w.dtype())) {
    checks::fail<DtypeError>(op, "w has dtype ", w.dtype(), ": expected float32, float16 or bfloat16");
  }
  if (!cpu::is_quantizable(kind)) {
    checks::fail(op, "kind is '", kind_name, "', which the gguf package does not make either: expected q4_0, q4_1, ",
                 "q5_0, q5_1, q8_0 or mxfp4");
  }
  const int weights = static_cast<int>(cpu::block_weights(kind));
  if (w.ndim() < 1 || w.shape(-1) % weights != 0) {
    checks::fail(op, "w has shape ", w.shape(), ": expected a last axis that is a multiple of ", weights);
  }
  const mx::Stream stream = checks::checked_stream(op, where);
  if (runs_kernels(stream) && !has_quantize_kernel(kind)) {
    checks::fail(op, "kind is '", kind_name, "': expected q4_0 or q8_0 on a GPU; pass stream=mx.cpu");
  }
  return only(std::make_shared<BlockQuantize>(stream, kind), mx::uint8, w);
}

namespace {

void bind(nb::module_& module) {
  // A default of MLX's float32 would need mlx.core, which is not there where the stubs are made.
  const auto dequantize = [](const mx::array& blocks, const std::string& kind, std::optional<mx::Dtype> dtype,
                             mx::StreamOrDevice where) {
    static const auto function = for_any_shape("block_dequantize", &mittens::block_dequantize);
    return function(blocks, kind, dtype.value_or(mx::float32), where);
  };
  module.def("block_dequantize", dequantize, "blocks"_a, "kind"_a, "dtype"_a = nb::none(), nb::kw_only(),
             "stream"_a = nb::none());
  bind_function(module, "block_quantize", &block_quantize, "w"_a, "kind"_a, nb::kw_only(), "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
