// Shared by the products with chosen experts: their indices, and all that depends on them.
//
// A pair is an input, [rows, columns] of x, and an expert, a matrix of a stack. Indices are computed when MLX evaluates
// them, so that nothing before can refuse one that is out of range: its pair gives NaN, and reads nothing.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "cpu/moe/gather.h"
#include "mlx/utils.h"
#include "ops/matmul/activation.h"
#include "ops/matmul/quantized_weights.h"
#include "ops/moe/plan.h"
#include "params/moe.h"
#include "runtime/numerics.h"
#include "runtime/primitive.h"

namespace mittens {

// The indices of the pairs, uint32 and of one shape. No inputs: pair p has input p / (pairs for each input).
struct Pairs {
  mx::array experts;
  std::optional<mx::array> inputs;
};

// As uint32, in which negative numbers are out of range. Indices of 64 bits stay out of range too.
mx::array as_indices(const mx::array& indices, mx::Stream stream);

// Throws DtypeError for indices that are no integers.
void check_indices(const char* op, const std::optional<mx::array>& lhs_indices,
                   const std::optional<mx::array>& rhs_indices);

// Why no kernel covers a call on a GPU, or null. by_tiles: whether takes_expert_tiles.
const char* why_not_gathered(const mx::array& x, const Pairs& pairs, bool transpose, mx::Stream stream,
                             bool by_tiles = false);

// Of x [.., rows, columns] times matrices of a stack.
ExpertSizes expert_sizes(const mx::array& x, const Pairs& pairs, const mx::array& stack, int outputs);

// The params of a kernel with stacks of quantized weights, but for the pairs and the grid.
GatherQmmParams gather_params(const Arrays& stack, const QuantizedFormat& format, const mx::array& x, int outputs);

// The rows of pairs by their experts, made on the GPU for kernels that take tiles of them (metal/moe/apple).
struct ExpertTiles {
  ExpertTilesPlan plan;
  std::shared_ptr<const Arrays> arrays;  // rows and tiles, which both launches own
  Launch launch;

  // As arguments of the kernel.
  void add_to(Launch& kernel) const;
};

// pair_rows: of each pair. inputs: of the pairs, or null. The arrays are not copied.
ExpertTiles expert_tiles(const PairParams& pairs, const mx::array& experts, const mx::array* inputs, uint32_t pair_rows,
                         const ExpertTilesPlan& plan, mx::Stream stream);

// The product of tiles with quantized experts. inputs: x and the triple. bias: of each output of each expert, or null.
Launch tiled_product(const ExpertTiles& tiles, const Arrays& inputs, const mx::array* bias, const mx::array& y,
                     const QuantizedFormat& format, const GatherQmmParams& params);

// The pairs of a call, whose indices broadcast; absent indices are the whole batch of x, or the whole stack.
Pairs gather_pairs(const char* op, const mx::array& x, const mx::array& stack,
                   const std::optional<mx::array>& lhs_indices, const std::optional<mx::array>& rhs_indices,
                   mx::Stream stream);

// The indices of the inputs, also where pairs leave them out.
mx::array input_indices(const Pairs& pairs, const mx::array& x, mx::Stream stream);

// Whether both indices of each pair are within their arrays, [pairs.., 1, 1].
mx::array are_valid(const Pairs& pairs, const mx::array& x, const mx::array& stack, mx::Stream stream);

// For the native code.
cpu::Gather native_gather(const Pairs& pairs, const mx::array& x, const mx::array& stack, int outputs);

// Throws unless bias has a number for each output of each of a stack's matrices [.., outputs, ..].
void check_bias_of_experts(const char* op, const char* name, const mx::array& bias, const mx::array& w);

// Products [indices.., rows, outputs] plus the biases of their experts. Absent indices are all of the stack.
mx::array plus_bias_of_experts(const mx::array& y, const mx::array& bias, const std::optional<mx::array>& indices,
                               mx::Stream stream);

// The pairs by mx's gather. It does not check indices: the product is asked for indices within the arrays, and pairs
// with others are NaN. It gets no indices of inputs where the pairs have none: given both, mx takes neither for sorted.
// Its result is [pairs.., rows, outputs], which must be given in case there is nothing to multiply.
mx::array guarded(
    const Pairs& pairs, const mx::array& x, const mx::array& stack, const mx::Shape& shape, mx::Dtype dtype,
    const std::function<mx::array(const std::optional<mx::array>& inputs, const mx::array& experts)>& product,
    mx::Stream stream);

// The primitive of such an op: x [.., rows, columns], the arrays of stacks [.., ..], the indices of experts, and those
// of inputs where there are any -> y [pairs.., rows, outputs].
class GatherPrimitive : public KernelPrimitive {
 public:
  // stacks: how many arrays the weights are.
  GatherPrimitive(mx::Stream stream, size_t stacks) : KernelPrimitive(stream), stacks_(stacks) {}

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override;

  // Of x by the op itself where it has a transposed one, else by the composition.
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override;

  // As one call with more inputs, or more experts.
  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs, const std::vector<int>& axes) override;

 protected:
  virtual int outputs_of(const Arrays& inputs) const = 0;
  // The op on other arrays.
  virtual mx::array apply(const mx::array& x, const Arrays& stacks, const Pairs& pairs) = 0;
  // The problem for calibration of the op on other arrays.
  virtual Problem problem(const mx::array& x, const Arrays& stacks, const Pairs& pairs) const = 0;
  // The cotangent of each pair times its expert transposed; nothing where the op is not linear in x.
  virtual std::optional<mx::array> transposed(const mx::array& dy, const Arrays& stacks, const mx::array& experts) {
    return std::nullopt;
  }
  // Of an expert of a stack in kernels that take tiles of rows, 2 for gate and up; 0 where there are none.
  virtual uint32_t tiled_matrices(const mx::array& stack) const {
    return 0;
  }
  // Gives the stacks [.., rows, row] the layout that the kernels read.
  virtual void prepare_stacks(Arrays& stacks) = 0;

  // No launches: the native code runs, where the simulator is on and there is no kernel for a call.
  std::vector<Launch> native_alone(const Arrays& inputs, Arrays& outputs);
  // Adds the indices to a launch.
  void add_pairs(Launch& launch, const Arrays& inputs) const;
  PairParams pair_params(const Arrays& inputs) const;
  // The params of a kernel with quantized weights, whose first triple is the first stacks; gives the launch its grid of
  // simdgroups of `simdgroup_outputs`.
  GatherQmmParams share_out_pairs(Launch& launch, const Arrays& inputs, const QuantizedFormat& format,
                                  uint32_t simdgroup_outputs);
  // The params of a kernel that takes tiles.
  GatherQmmParams tiled_params(const Arrays& inputs, const QuantizedFormat& format) const;
  // The tiles of the pairs, where the kernel for them is to run.
  std::optional<ExpertTiles> tiles_of(const Arrays& inputs, uint32_t tile_rows);
  // Whether pairs of the same expert are one product, in a kernel of its own.
  bool shares_pairs(const Arrays& inputs, const QuantizedFormat& format, uint32_t matrices) const;
  const Arrays& prepared(const Arrays& inputs, Arrays& copies) override;
  bool sums_nothing(const Arrays& inputs) const override {
    return inputs[0].shape(-1) == 0;
  }

  size_t stacks() const {
    return stacks_;
  }
  Arrays stacks_of(const Arrays& inputs) const {
    return {inputs.begin() + 1, inputs.begin() + 1 + static_cast<ptrdiff_t>(stacks_)};
  }
  Pairs pairs_of(const Arrays& inputs) const {
    return {inputs[1 + stacks_], inputs.size() > 2 + stacks_ ? std::optional(inputs[2 + stacks_]) : std::nullopt};
  }
  // For the native code.
  cpu::Gather native_gather(const Arrays& inputs) const {
    return mittens::native_gather(pairs_of(inputs), inputs[0], inputs[1], outputs_of(inputs));
  }

  const Numerics numerics_ = numerics();  // at the time of the call

 private:
  size_t stacks_;
};

// The inputs of such a primitive.
Arrays gather_inputs(const mx::array& x, Arrays stacks, const Pairs& pairs);

mx::array gather_mm(const mx::array& a, const mx::array& b, const std::optional<mx::array>& lhs_indices,
                    const std::optional<mx::array>& rhs_indices, bool sorted_indices, mx::StreamOrDevice where);

mx::array gather_qmm(const mx::array& x, const mx::array& w, const mx::array& scales,
                     const std::optional<mx::array>& biases, const std::optional<mx::array>& lhs_indices,
                     const std::optional<mx::array>& rhs_indices, bool transpose, std::optional<int> group_size,
                     std::optional<int> bits, const std::string& mode, const std::optional<mx::array>& global_scale,
                     bool sorted_indices, mx::StreamOrDevice where);

// The same of several: y[.., n] = sum_i weights[.., i] * (x[.., i] @ w[indices[.., i]].T + bias[indices[.., i]]).
mx::array gather_sum(const mx::array& x, const mx::array& w, const mx::array& scales,
                     const std::optional<mx::array>& biases, const mx::array& indices, const mx::array& weights,
                     const std::optional<mx::array>& bias, std::optional<int> group_size, std::optional<int> bits,
                     const std::string& mode, mx::StreamOrDevice where);

// An array that is to be gather_qmm's, by the transposes of its experts, and not yet computed. Its inputs are x, the
// triple and the indices.
struct PendingGather {
  QuantizedFormat format;
  bool sorted;  // the indices, as the caller promised

  bool operator==(const PendingGather&) const = default;
};

// Nothing for any other array.
std::optional<PendingGather> pending_gather(const mx::array& y);

// The activation of gate and up, two such arrays, as one: under the patch a model multiplies first and then asks for
// this. If a gradient depends on the gate they stay two.
std::optional<mx::array> try_gather_swiglu(const mx::array& gate, const mx::array& up, const Activation& activation);

}  // namespace mittens
