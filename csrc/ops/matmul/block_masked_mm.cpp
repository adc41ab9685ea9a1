#include <algorithm>
#include <optional>
#include <string>

#include <nanobind/nanobind.h>

#include "mlx/ops.h"
#include "ops/matmul/plan.h"
#include "params/matmul.h"
#include "python/registry.h"
#include "runtime/array_layout.h"
#include "runtime/array_util.h"
#include "runtime/checks.h"
#include "runtime/fallback.h"
#include "runtime/op_binding.h"
#include "runtime/primitive.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

constexpr const char* op = "block_masked_mm";
const Name tiles_file = "matmul/apple/block_masked_mm.metal";
const Name row_file = "matmul/apple/block_masked_row.metal";

using Mask = std::optional<mx::array>;

// Operands and masks of a call, in the order of a primitive's inputs. Each has three dimensions; the first, and of
// masks the others too, may be 1 and broadcast.
enum Input { of_a, of_b, masks_y, masks_a, masks_b, inputs_count };

mx::array swapped(const mx::array& array, mx::Stream stream) {
  return mx::swapaxes(array, -1, -2, stream);
}

// A mask for each element. rows, columns: of the masked matrix.
mx::array expanded(const mx::array& mask, int block_size, int rows, int columns, mx::Stream stream) {
  mx::array wide = mask;
  for (const auto& [axis, size] : {std::pair(-2, rows), std::pair(-1, columns)}) {
    if (wide.shape(axis) > 1) {
      wide = mx::repeat(wide, block_size, axis < 0 ? static_cast<int>(wide.ndim()) + axis : axis, stream);
      mx::Shape stop = wide.shape();
      stop[wide.ndim() + axis] = size;
      wide = mx::slice(wide, mx::Shape(wide.ndim(), 0), stop, stream);
    }
  }
  return wide;
}

// Neither NaN nor infinity passes a mask that is zero.
mx::array masked(const mx::array& array, const mx::array& mask, int block_size, mx::Stream stream) {
  const mx::array wide = expanded(mask, block_size, array.shape(-2), array.shape(-1), stream);
  const mx::array zero = mx::array(0.0f, array.dtype());
  if (wide.dtype() == mx::bool_) {
    return mx::where(wide, array, zero, stream);
  }
  const mx::array number = mx::astype(wide, array.dtype(), stream);
  const mx::array passes = mx::logical_or(mx::not_equal(number, zero, stream), mx::isfinite(array, stream), stream);
  return mx::multiply(mx::where(passes, array, zero, stream), number, stream);
}

// a [matrices, rows, columns], b [matrices, columns, outputs] and masks of the result, of a and of b
// -> [matrices, rows, outputs].
class BlockMaskedMm : public KernelPrimitive {
 public:
  BlockMaskedMm(mx::Stream stream, int block_size) : KernelPrimitive(stream), block_size_(block_size) {}

  const char* name() const override {
    return "MittensBlockMaskedMm";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return block_size_ == static_cast<const BlockMaskedMm&>(other).block_size_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    int matrices = 1;
    for (const mx::array& input : inputs) {
      matrices = input.shape(0) == 1 ? matrices : input.shape(0);
    }
    return {{matrices, inputs[of_a].shape(1), inputs[of_b].shape(2)}};
  }

  // Gradients of the operands are products with the masks exchanged.
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override {
    const auto turned = [&](Input input) { return swapped(primals[input], stream()); };
    Arrays gradients;
    for (int argument : argnums) {
      const bool is_composed = primals[of_a].size() == 0 || primals[of_b].size() == 0 || cotangents[0].size() == 0;
      if (is_composed || argument > of_b) {
        gradients.push_back(KernelPrimitive::vjp(primals, cotangents, {argument}, outputs)[0]);
        continue;
      }
      const mx::array gradient =
          argument == of_a
              ? product({cotangents[0], turned(of_b), primals[masks_a], primals[masks_y], turned(masks_b)})
              : product({turned(of_a), cotangents[0], primals[masks_b], turned(masks_a), primals[masks_y]});
      const bool is_shared = primals[argument].shape(0) < gradient.shape(0);
      gradients.push_back(is_shared ? mx::sum(gradient, 0, true, stream()) : gradient);
    }
    return gradients;
  }

  mx::array of_operations(const Arrays& inputs) {
    return composed(inputs)[0];
  }

  mx::array product(Arrays inputs) {
    const ProductSizes sizes = sizes_of(inputs);
    if (!why_no_masked_kernel(sizes, inputs[of_a].dtype(), stream())) {
      return first_output(std::make_shared<BlockMaskedMm>(stream(), block_size_), std::move(inputs));
    }
    return composed(inputs)[0];
  }

  ProductSizes sizes_of(const Arrays& inputs) {
    return {static_cast<uint32_t>(output_shapes(inputs)[0][0]), static_cast<uint32_t>(inputs[of_a].shape(1)),
            static_cast<uint32_t>(inputs[of_a].shape(2)), static_cast<uint32_t>(inputs[of_b].shape(2))};
  }

 protected:
  bool sums_nothing(const Arrays& inputs) const override {
    return inputs[of_a].shape(2) == 0;
  }

  const Arrays& prepared(const Arrays& inputs, Arrays& copies) override {
    copies = {contiguous_rows(inputs[of_a], stream()), inputs[of_b]};
    if (!lies_by_outputs(inputs[of_b]) && !lies_by_columns(inputs[of_b])) {
      // Rows of columns are whole 16 bytes, rows of outputs may not be.
      copies[of_b] = turned_view(contiguous(turned_view(inputs[of_b]), stream()));
    }
    for (int i = masks_y; i < inputs_count; ++i) {
      copies.push_back(has_short_strides(inputs[i]) ? inputs[i] : contiguous(inputs[i], stream()));
    }
    return copies;
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const mx::array& a = inputs[of_a];
    const mx::array& b = inputs[of_b];
    const ProductSizes sizes = sizes_of(inputs);
    const bool by_rows = lies_by_outputs(b);  // of b's transpose
    const bool is_scaled = inputs[masks_a].dtype() != mx::bool_;
    const MaskedPlan plan = plan_masked(sizes, by_rows, block_size_, is_scaled, a.dtype(), stream());
    BlockMaskedParams params{};
    params.matrices = sizes.matrices;
    params.rows = sizes.rows;
    params.columns = sizes.columns;
    params.outputs = sizes.outputs;
    params.weight_stride = static_cast<uint32_t>(by_rows ? stride_of(b, 2) : stride_of(b, 1));
    params.block_shift = block_size_ == 32 ? 5 : 6;
    params.has_bools_of_y = inputs[masks_y].dtype() == mx::bool_;
    params.has_one_x = a.shape(0) == 1;
    params.has_one_w = b.shape(0) == 1;
    params.matrix_elements = stride_of(b, 0);
    params.of_x = mask_params(inputs[masks_a], 1, 2);
    params.of_w = mask_params(inputs[masks_b], 2, 1);
    params.of_y = mask_params(inputs[masks_y], 1, 2);

    Launch launch;
    launch.file = plan.by_tiles ? tiles_file : row_file;
    const char* scaled = is_scaled ? "_scaled" : "";
    const char* kind = by_rows ? "" : "columns_";
    launch.kernel = plan.by_tiles ? kernel_name(a.dtype(), op, kind, "tiles_", plan.rows, "x", plan.outputs, scaled)
                                  : kernel_name(a.dtype(), op, kind, "row", scaled);
    launch.threadgroups = plan.threadgroups;
    launch.threads = plan.threads;
    launch.input(a);
    add_view(launch, b);
    for (Input mask : {masks_a, masks_b, masks_y}) {
      add_view(launch, inputs[mask]);
    }
    return in_order(launch.output(outputs[0]).params(params));
  }

  Arrays composed(const Arrays& inputs) override {
    if (is_for_mx(inputs)) {
      return {of_mx(inputs)};
    }
    const auto wide = [&](Input input, Input mask) {
      return masked(in_dtype(inputs[input], mx::float32, stream()), inputs[mask], block_size_, stream());
    };
    const mx::array y = mx::matmul(wide(of_a, masks_a), wide(of_b, masks_b), stream());
    const mx::array result = masked(y, inputs[masks_y], block_size_, stream());
    const mx::Shape shape = output_shapes(inputs)[0];
    return {mx::broadcast_to(in_dtype(result, inputs[of_a].dtype(), stream()), shape, stream())};
  }

 private:
  // On a CPU mx has a product of its own in float32, without derivatives in a direction and without vmap. It masks a
  // matrix that several share once for each of them.
  bool is_for_mx(const Arrays& inputs) {
    const int matrices = output_shapes(inputs)[0][0];
    const bool is_traced = std::any_of(inputs.begin(), inputs.end(), [](const mx::array& a) { return a.is_tracer(); });
    const bool is_shared = inputs[of_a].shape(0) < matrices || inputs[of_b].shape(0) < matrices;
    return !is_traced && !is_shared && stream().device == mx::Device::cpu && inputs[of_a].dtype() == mx::float32;
  }

  mx::array of_mx(const Arrays& inputs) {
    const ProductSizes sizes = sizes_of(inputs);
    const auto blocks = [&](uint32_t size) { return static_cast<int>(ceil_divide(size, block_size_)); };
    const auto mask = [&](Input input, uint32_t rows, uint32_t columns) {
      return mx::broadcast_to(inputs[input], {inputs[input].shape(0), blocks(rows), blocks(columns)}, stream());
    };
    return mx::block_masked_mm(inputs[of_a], inputs[of_b], block_size_, mask(masks_y, sizes.rows, sizes.outputs),
                               mask(masks_a, sizes.rows, sizes.columns), mask(masks_b, sizes.columns, sizes.outputs),
                               stream());
  }

  static int64_t stride_of(const mx::array& array, int axis) {
    return array.shape(axis) > 1 ? array.strides(axis) : 0;
  }

  static bool has_short_strides(const mx::array& array) {
    for (int axis = 0; axis < 3; ++axis) {
      if (stride_of(array, axis) < 0 || stride_of(array, axis) >= (int64_t(1) << 32)) {
        return false;
      }
    }
    return true;
  }

  // Whether rows along an axis lie in memory as they are, whole and on 16 bytes.
  static bool lies_along(const mx::array& b, int axis) {
    const int64_t pack = 16 / static_cast<int64_t>(b.itemsize());
    const int across = 3 - axis;
    return b.shape(axis) % pack == 0 && (b.shape(axis) == 1 || b.strides(axis) == 1) && b.offset() % 16 == 0 &&
           has_short_strides(b) && stride_of(b, across) % pack == 0 && stride_of(b, 0) % pack == 0 &&
           uint64_t(stride_of(b, across)) * b.shape(across) < (uint64_t(1) << 32);
  }

  // [outputs, columns] in memory.
  static bool lies_by_outputs(const mx::array& b) {
    return lies_along(b, 1);
  }

  static bool lies_by_columns(const mx::array& b) {
    return lies_along(b, 2);
  }

  static mx::array turned_view(const mx::array& array) {
    mx::Shape shape = array.shape();
    mx::Strides strides = array.strides();
    std::swap(shape[1], shape[2]);
    std::swap(strides[1], strides[2]);
    mx::array view(std::move(shape), array.dtype(), nullptr, {});
    view.copy_shared_buffer(array, strides, {}, array.data_size());
    return view;
  }

  static BlockMaskParams mask_params(const mx::array& mask, int across, int along) {
    const auto stride = [&](int axis) { return static_cast<uint32_t>(stride_of(mask, axis)); };
    return {stride(0), stride(across), stride(along)};
  }

  int block_size_;
};

// The arrays and sizes of a call.
struct Call {
  Arrays inputs;
  mx::Shape shape;  // of the result
};

// An array of at least two dimensions with those before them as one, or 1 where they are the same for all of a batch.
mx::array with_one_batch(const mx::array& array, const mx::Shape& batch, mx::Stream stream) {
  const int rows = array.shape(-2), columns = array.shape(-1);
  if (leading_size(array, 2) == 1) {
    return mx::reshape(array, {1, rows, columns}, stream);
  }
  mx::Shape shape = batch;
  shape.insert(shape.end(), {rows, columns});
  int matrices = 1;
  for (int size : batch) {
    matrices *= size;
  }
  return mx::reshape(mx::broadcast_to(array, shape, stream), {matrices, rows, columns}, stream);
}

// A mask of blocks of [rows, columns]. has_rows, has_columns: whether the array that it masks has such an axis.
mx::array checked_mask(const char* name, const Mask& mask, const mx::Shape& batch, int blocks_of_rows,
                       int blocks_of_columns, bool has_rows, bool has_columns, mx::Dtype dtype, mx::Stream stream) {
  if (!mask) {
    return mx::reshape(mx::array(true), {1, 1, 1}, stream);
  }
  mx::array own = *mask;
  std::vector<int> axes;
  if (!has_rows) {
    axes.push_back(-2);
  }
  if (!has_columns) {
    axes.push_back(-1);
  }
  own = axes.empty() ? own : mx::expand_dims(own, axes, stream);
  mx::Shape expected = batch;
  expected.insert(expected.end(), {blocks_of_rows, blocks_of_columns});
  bool fits = own.ndim() <= expected.size();
  for (size_t i = 1; fits && i <= own.ndim(); ++i) {
    const int size = own.shape(-static_cast<int>(i));
    fits = size == 1 || size == expected[expected.size() - i];
  }
  if (!fits) {
    checks::fail(op, name, " has shape ", mask->shape(), ": expected one that broadcasts to ", expected,
                 ", a value for each block");
  }
  while (own.ndim() < 2) {
    own = mx::expand_dims(own, 0, stream);
  }
  return with_one_batch(in_dtype(own, own.dtype() == mx::bool_ ? mx::bool_ : dtype, stream), batch, stream);
}

void check_shapes(const mx::array& a, const mx::array& b, int block_size) {
  if (block_size != 32 && block_size != 64) {
    checks::fail(op, "block_size is ", block_size, ": expected 32 or 64");
  }
  for (const auto& [name, array] : {std::pair("a", &a), std::pair("b", &b)}) {
    if (array->ndim() == 0) {
      checks::fail(op, name, " has no dimensions: expected at least one");
    }
  }
  const int columns = b.shape(b.ndim() == 1 ? 0 : -2);
  if (a.shape(-1) != columns) {
    checks::fail(op, "a has ", a.shape(-1), " columns, b has shape ", b.shape(), ": expected ", columns, " columns");
  }
}

Call call_of(const mx::array& a, const mx::array& b, int block_size, const Mask& mask_out, const Mask& mask_lhs,
             const Mask& mask_rhs, mx::Dtype dtype, mx::Stream stream) {
  const bool has_rows = a.ndim() > 1, has_columns = b.ndim() > 1;
  const mx::array rows = has_rows ? a : mx::expand_dims(a, 0, stream);
  const mx::array columns = has_columns ? b : mx::expand_dims(b, 1, stream);
  const auto batch_of = [](const mx::array& array) {
    return mx::Shape(array.shape().begin(), array.shape().end() - 2);
  };
  const mx::Shape batch = mx::broadcast_shapes(batch_of(rows), batch_of(columns));
  const auto blocks = [&](int size) { return (size + block_size - 1) / block_size; };
  const int m = blocks(rows.shape(-2)), k = blocks(rows.shape(-1)), n = blocks(columns.shape(-1));
  Call call;
  call.inputs = {with_one_batch(in_dtype(rows, dtype, stream), batch, stream),
                 with_one_batch(in_dtype(columns, dtype, stream), batch, stream),
                 checked_mask("mask_out", mask_out, batch, m, n, has_rows, has_columns, dtype, stream),
                 checked_mask("mask_lhs", mask_lhs, batch, m, k, has_rows, true, dtype, stream),
                 checked_mask("mask_rhs", mask_rhs, batch, k, n, true, has_columns, dtype, stream)};
  if (call.inputs[masks_a].dtype() != call.inputs[masks_b].dtype()) {
    call.inputs[masks_a] = in_dtype(call.inputs[masks_a], dtype, stream);
    call.inputs[masks_b] = in_dtype(call.inputs[masks_b], dtype, stream);
  }
  call.shape = batch;
  if (has_rows) {
    call.shape.push_back(rows.shape(-2));
  }
  if (has_columns) {
    call.shape.push_back(columns.shape(-1));
  }
  return call;
}

std::optional<mx::array> try_block_masked_mm(const mx::array& a, const mx::array& b, int block_size,
                                             const Mask& mask_out, const Mask& mask_lhs, const Mask& mask_rhs,
                                             mx::StreamOrDevice where) {
  const mx::Stream stream = checks::checked_stream(op, where);
  check_shapes(a, b, block_size);
  const mx::Dtype dtype = checks::kernel_dtype(op, {{"a", a}, {"b", b}});
  if (!mask_out && !mask_lhs && !mask_rhs) {
    return fallback(op, "no mask");
  }
  Call call = call_of(a, b, block_size, mask_out, mask_lhs, mask_rhs, dtype, stream);
  auto primitive = std::make_shared<BlockMaskedMm>(stream, block_size);
  // Of one column of b, which is a row of its transpose, the product is turned.
  const bool is_turned = call.inputs[of_b].shape(2) == 1 && call.inputs[of_a].shape(1) > 1;
  if (is_turned) {
    std::swap(call.inputs[of_a], call.inputs[of_b]);
    std::swap(call.inputs[masks_a], call.inputs[masks_b]);
    for (mx::array& input : call.inputs) {
      input = swapped(input, stream);
    }
  }
  const ProductSizes sizes = primitive->sizes_of(call.inputs);
  const bool is_empty = sizes.matrices == 0 || sizes.rows == 0 || sizes.columns == 0 || sizes.outputs == 0;
  if (const char* reason = is_empty ? nullptr : why_no_masked_kernel(sizes, dtype, stream)) {
    return fallback(op, reason);
  }
  if (is_switched_off(op)) {
    return std::nullopt;
  }
  const mx::array y = first_output(std::move(primitive), std::move(call.inputs));
  return mx::reshape(is_turned ? swapped(y, stream) : y, std::move(call.shape), stream);
}

// mx's where it has one for the type and the device, else of its operations.
mx::array of_mx(const mx::array& a, const mx::array& b, int block_size, const Mask& mask_out, const Mask& mask_lhs,
                const Mask& mask_rhs, mx::Stream stream) {
  const mx::Dtype dtype = mx::promote_types(a.dtype(), b.dtype());
  const bool has_masks = mask_out || mask_lhs || mask_rhs;
  if (!has_masks || mx_has_masked(stream)) {
    return mx::block_masked_mm(a, b, block_size, mask_out, mask_lhs, mask_rhs, stream);
  }
  Call call = call_of(a, b, block_size, mask_out, mask_lhs, mask_rhs, dtype, stream);
  const auto primitive = std::make_shared<BlockMaskedMm>(stream, block_size);
  return mx::reshape(primitive->of_operations(call.inputs), std::move(call.shape), stream);
}

mx::array block_masked_mm(const mx::array& a, const mx::array& b, int block_size, const Mask& mask_out,
                          const Mask& mask_lhs, const Mask& mask_rhs, mx::StreamOrDevice where) {
  if (auto y = try_block_masked_mm(a, b, block_size, mask_out, mask_lhs, mask_rhs, where)) {
    return *std::move(y);
  }
  return of_mx(a, b, block_size, mask_out, mask_lhs, mask_rhs, checks::checked_stream(op, where));
}

void bind(nb::module_& module) {
  define(module, op, &try_block_masked_mm, &block_masked_mm, nb::arg(), nb::arg(), "block_size"_a = 64,
         "mask_out"_a.none() = nb::none(), "mask_lhs"_a.none() = nb::none(), "mask_rhs"_a.none() = nb::none(),
         nb::kw_only(), "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
