#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <utility>

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include "cpu/norm/head_norm.h"
#include "mlx/ops.h"
#include "ops/norm/norm_vjp.h"
#include "ops/norm/norms.h"
#include "ops/norm/plan.h"
#include "ops/norm/weight_offset.h"
#include "params/norm.h"
#include "python/registry.h"
#include "runtime/array_layout.h"
#include "runtime/array_util.h"
#include "runtime/checks.h"
#include "runtime/cpu_types.h"
#include "runtime/fallback.h"
#include "runtime/ready_inputs.h"
#include "runtime/op_binding.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace mittens {

namespace {

constexpr const char* op = "qk_norm";
const Name file = "norm/qk_norm.metal";

struct QkNormOptions {
  float eps;
  float weight_offset;
  bool has_query_weight;
  bool has_key_weight;

  bool operator==(const QkNormOptions&) const = default;
};

// Where the rows of an array are: its leading axes as three.
struct Rows {
  std::array<int64_t, 3> sizes = {1, 1, 1};
  std::array<int64_t, 3> strides = {0, 0, 0};

  int64_t count() const {
    return sizes[0] * sizes[1] * sizes[2];
  }

  // Elements from the first to the last.
  int64_t reach(int64_t columns) const {
    if (count() == 0) {
      return 0;
    }
    int64_t last = columns;
    for (int i : {0, 1, 2}) {
      last += (sizes[i] - 1) * strides[i];
    }
    return last;
  }
};

// None where rows are not contiguous themselves, or three strides are too few.
std::optional<Rows> rows_of(const mx::array& array) {
  if (!has_rows(array, 1)) {
    return std::nullopt;
  }
  Rows rows;
  int used = 0;  // from the last
  for (int axis = static_cast<int>(array.ndim()) - 2; axis >= 0; --axis) {
    const int64_t size = array.shape(axis), stride = array.strides(axis);
    if (size == 1) {
      continue;
    }
    if (used > 0 && stride == rows.strides[3 - used] * rows.sizes[3 - used]) {
      rows.sizes[3 - used] *= size;
      continue;
    }
    if (used == 3) {
      return std::nullopt;
    }
    ++used;
    rows.sizes[3 - used] = size;
    rows.strides[3 - used] = stride;
  }
  return rows;
}

HeadRows head_rows(const mx::array& array, const Rows& rows) {
  return {{rows.strides[0], rows.strides[1], rows.strides[2]},
          static_cast<uint32_t>(rows.sizes[1]),
          static_cast<uint32_t>(rows.sizes[2]),
          static_cast<uint32_t>(rows.count()),
          phase_of(array)};
}

// Whether every row starts on a 16-byte boundary and fills packs.
bool are_whole(const mx::array& array, const Rows& rows) {
  const int64_t pack = 16 / array.itemsize();
  const auto is_aligned = [&](int64_t stride) { return stride % pack == 0; };
  return array.shape(-1) % pack == 0 && phase_of(array) == 0 &&
         std::all_of(rows.strides.begin(), rows.strides.end(), is_aligned);
}

struct HeadVariant {
  uint32_t most_packs;  // of a row
  uint32_t lanes;  // threads that share a row; of the looped kernel at most
  const char* name;
};

// The first that fits is taken: the fewest lanes that hold a head in registers, else a threadgroup that reads it twice.
constexpr HeadVariant head_variants[] = {
    {8, 8, "simd8"},      {16, 16, "simd16"},    {32, 32, "simd32"},
    {64, 32, "simd32x2"}, {128, 32, "simd32x4"}, {no_limit, 512, "looped"},
};

struct HeadPlan {
  const char* variant;
  uint32_t threads;
  uint32_t threadgroups;
};

HeadPlan plan_heads(uint64_t rows, uint32_t columns, uint32_t itemsize) {
  constexpr uint32_t simdgroup = 32, most_simdgroups = 4, looped_packs = 4;
  const uint32_t pack = 16 / itemsize;
  const uint32_t packs = ceil_divide(columns, pack);
  const uint32_t edges = columns % pack == 0 ? pack : std::min(columns, 2 * pack - 2);  // each needs a lane
  const HeadVariant* variant = head_variants;
  while (packs > variant->most_packs || edges > variant->lanes) {
    ++variant;
  }
  if (variant->lanes > simdgroup) {
    const uint32_t threads = ceil_divide(ceil_divide(packs, looped_packs), simdgroup) * simdgroup;
    return {variant->name, std::min(threads, variant->lanes), static_cast<uint32_t>(rows)};
  }
  const uint32_t simdgroups = ceil_divide(rows, simdgroup / variant->lanes);
  const uint32_t together = std::min(simdgroups, most_simdgroups);
  return {variant->name, simdgroup * together, ceil_divide(simdgroups, together)};
}

// The problem for calibration: the heads of both, and their width.
Problem heads_problem(const mx::array& queries, const mx::array& keys, mx::Dtype dtype) {
  const size_t heads = leading_size(queries, 1) + leading_size(keys, 1);
  return {op, dtype, 0, {problem_size(heads), problem_size(queries.shape(-1)), 1, 1}};
}

// Queries and keys [.., columns], by any strides of their leading axes, and weights [columns], if there are any -> both
// normed, row contiguous.
class QkNorm : public KernelPrimitive {
 public:
  QkNorm(mx::Stream stream, const QkNormOptions& options) : KernelPrimitive(stream), options_(options) {}

  const char* name() const override {
    return "MittensQkNorm";
  }

  bool is_equivalent(const mx::Primitive& other) const override {
    return options_ == static_cast<const QkNorm&>(other).options_;
  }

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {inputs[0].shape(), inputs[1].shape()};
  }

  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums, const Arrays&) override {
    const auto is_wanted = [&](int argument) { return contains(argnums, argument); };
    std::optional<NormGradients> gradients[2];
    for (int i : {0, 1}) {
      const bool wants_weight = has_weight(i) && is_wanted(weight_index(i));
      if (is_wanted(i) || wants_weight) {
        gradients[i] = norm_gradients(
            primals[i], weight(primals, i), cotangents[i], std::nullopt,
            {.eps = options_.eps, .weight_gradient = wants_weight, .weight_offset = options_.weight_offset}, stream());
      }
    }
    Arrays selected;
    for (int argument : argnums) {
      const int of_keys = argument == 1 || (argument > 1 && (argument == 3 || !options_.has_query_weight));
      selected.push_back(argument < 2 ? gradients[of_keys]->x : *gradients[of_keys]->weight);
    }
    return selected;
  }

  // The op itself on one more axis, where heads and nothing else are batched.
  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs, const std::vector<int>& axes) override {
    for (int i = 0; i < static_cast<int>(inputs.size()); ++i) {
      if ((axes[i] >= 0) != (i < 2)) {
        return KernelPrimitive::vmap(inputs, axes);
      }
    }
    Arrays batched = inputs;
    for (int i : {0, 1}) {
      batched[i] = mx::moveaxis(inputs[i], axes[i], 0, stream());
    }
    return {results_of(std::make_shared<QkNorm>(stream(), options_), batched), {0, 0}};
  }

  static Arrays results_of(std::shared_ptr<QkNorm> primitive, Arrays inputs) {
    const mx::Dtype dtype = inputs[0].dtype();
    return mx::array::make_arrays({inputs[0].shape(), inputs[1].shape()}, {dtype, dtype}, primitive, inputs);
  }

 protected:
  const Arrays& prepared(const Arrays& inputs, Arrays& copies) override {
    return ready_inputs(inputs, stream(), copies,
                        [&](size_t i) { return i < 2 ? rows_of(inputs[i]).has_value() : has_rows(inputs[i], 1); });
  }

  void allocate(const Arrays& inputs, Arrays& outputs) override {
    for (int i : {0, 1}) {
      take_or_allocate(outputs[i], inputs[i], stream(), 2);
    }
  }

  std::vector<Launch> launches(const Arrays& inputs, Arrays& outputs) override {
    const mx::array& queries = inputs[0];
    const mx::array& keys = inputs[1];
    const Rows of_queries = rows_of(queries).value(), of_keys = rows_of(keys).value();
    check_count(of_queries.count() + of_keys.count());
    const mx::array& query_weight = has_weight(0) ? inputs[weight_index(0)] : queries;
    const mx::array& key_weight = has_weight(1) ? inputs[weight_index(1)] : queries;
    const int64_t columns = queries.shape(-1);
    const auto is_start = [](const mx::array& array) { return phase_of(array) == 0; };
    const bool whole = are_whole(queries, of_queries) && are_whole(keys, of_keys) && is_start(outputs[0]) &&
                       is_start(outputs[1]) && (!has_weight(0) || is_start(query_weight)) &&
                       (!has_weight(1) || is_start(key_weight));
    const uint32_t width = static_cast<uint32_t>(columns);
    const QkNormParams params{
        .row = {1, width, 1, ceil_divide(width, 16 / queries.itemsize()), whole},
        .queries = head_rows(queries, of_queries),
        .keys = head_rows(keys, of_keys),
        .query_weight_phase = phase_of(query_weight),
        .key_weight_phase = phase_of(key_weight),
        .query_output_phase = phase_of(outputs[0]),
        .key_output_phase = phase_of(outputs[1]),
        .has_query_weight = has_weight(0),
        .has_key_weight = has_weight(1),
        .eps = options_.eps,
        .weight_offset = options_.weight_offset,
    };
    const HeadPlan plan = plan_heads(of_queries.count() + of_keys.count(), width, queries.itemsize());
    Launch launch;
    launch.file = file;
    launch.kernel = kernel_name(queries.dtype(), op, plan.variant);
    launch.threadgroups = {plan.threadgroups, 1, 1};
    launch.threads = {plan.threads, 1, 1};
    for (const auto& [heads, rows] : {std::pair(&queries, &of_queries), std::pair(&keys, &of_keys)}) {
      launch.input(*heads, 0, rows->reach(columns) * heads->itemsize());
    }
    launch.input_if(has_weight(0), query_weight).input_if(has_weight(1), key_weight);
    launch.output(outputs[0]).output(outputs[1]).params(params);
    return in_order(std::move(launch));
  }

  std::function<void()> native(const Arrays& inputs, Arrays& outputs) override {
    struct Part {
      cpu::StridedRows rows;
      const void* weight;
      void* y;
    };
    std::array<Part, 2> parts;
    for (int i : {0, 1}) {
      const Rows rows = rows_of(inputs[i]).value();
      parts[i] = {{data_of(inputs[i]),
                   {rows.sizes[0], rows.sizes[1], rows.sizes[2]},
                   {rows.strides[0], rows.strides[1], rows.strides[2]}},
                  has_weight(i) ? data_of(inputs[weight_index(i)]) : nullptr,
                  data_of(outputs[i])};
    }
    return [type = native_type(inputs[0].dtype()), parts, columns = static_cast<size_t>(inputs[0].shape(-1)),
            options = options_] {
      for (const Part& part : parts) {
        cpu::head_norm(type, part.rows, part.weight, part.y, columns, options.eps, options.weight_offset);
      }
    };
  }

  Arrays composed(const Arrays& inputs) override {
    Arrays results;
    for (int i : {0, 1}) {
      const mx::array& x = inputs[i];
      results.push_back(x.size() == 0  // mx's reductions are not for such
                            ? x
                            : compose_rms_norm(x, weight(inputs, i), options_.eps,
                                               has_weight(i) ? options_.weight_offset : no_offset, stream()));
    }
    return results;
  }

 private:
  static void check_count(int64_t rows) {
    if (rows > std::numeric_limits<uint32_t>::max()) {
      checks::fail(op, "queries and keys have ", rows, " heads of tokens: expected fewer than 2^32");
    }
  }

  // Of queries (0) or keys (1).
  bool has_weight(int which) const {
    return which == 0 ? options_.has_query_weight : options_.has_key_weight;
  }
  int weight_index(int which) const {
    return 2 + (which == 1 && options_.has_query_weight);
  }
  std::optional<mx::array> weight(const Arrays& inputs, int which) const {
    return has_weight(which) ? std::optional(inputs[weight_index(which)]) : std::nullopt;
  }

  QkNormOptions options_;
};

std::pair<mx::array, mx::array> qk_norm(const mx::array& queries, const mx::array& keys,
                                        const std::optional<mx::array>& query_weight,
                                        const std::optional<mx::array>& key_weight, float eps, float weight_offset,
                                        mx::StreamOrDevice where) {
  checks::has_axis(op, "queries", queries);
  checks::has_axis(op, "keys", keys);
  if (queries.shape(-1) != keys.shape(-1)) {
    checks::fail(op, "queries has heads of width ", queries.shape(-1), ", keys of width ", keys.shape(-1),
                 ": expected the same width");
  }
  if (query_weight) {
    checks::per_column(op, "query_weight", *query_weight, queries);
  }
  if (key_weight) {
    checks::per_column(op, "key_weight", *key_weight, queries);
  }
  checks::epsilon(op, eps);
  const auto& either = query_weight ? query_weight : key_weight;
  const float offset = checked_offset(op, "weight_offset", weight_offset, "each weight", either);
  const mx::Dtype dtype = checks::floating(op, {{"queries", queries}, {"query_weight", query_weight}});
  const mx::Dtype key_dtype = checks::floating(op, {{"keys", keys}, {"key_weight", key_weight}});
  const mx::Stream stream = checks::checked_stream(op, where);
  if (dtype != key_dtype || !has_kernels(dtype) || prefer_mx(heads_problem(queries, keys, dtype), nullptr, stream)) {
    return {rms_norm(queries, query_weight, eps, query_weight ? offset : no_offset, stream),
            rms_norm(keys, key_weight, eps, key_weight ? offset : no_offset, stream)};
  }

  Arrays inputs;
  inputs.reserve(4);
  inputs.push_back(in_dtype(queries, dtype, stream));
  inputs.push_back(in_dtype(keys, dtype, stream));
  for (const auto* weight : {&query_weight, &key_weight}) {
    if (*weight) {
      inputs.push_back(in_dtype(**weight, dtype, stream));
    }
  }
  const QkNormOptions options{eps, offset, query_weight.has_value(), key_weight.has_value()};
  Arrays outputs = QkNorm::results_of(std::make_shared<QkNorm>(stream, options), std::move(inputs));
  return {std::move(outputs[0]), std::move(outputs[1])};
}

void bind(nb::module_& module) {
  bind_function(module, op, &qk_norm, "queries"_a, "keys"_a, "query_weight"_a.none(), "key_weight"_a.none(), "eps"_a,
                nb::kw_only(), "weight_offset"_a = 0.0f, "stream"_a = nb::none());
}

const Register registered(bind);

}  // namespace

}  // namespace mittens
