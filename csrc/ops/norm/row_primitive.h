// Shared by the primitives that work along rows: outputs of x's shape, and a workspace where a row is split.
#pragma once

#include <initializer_list>
#include <memory>

#include "ops/norm/plan.h"
#include "ops/norm/weight_offset.h"
#include "runtime/primitive.h"

namespace mittens {

// Inputs are `row_inputs` arrays of one shape [.., columns], the first of them x, then arrays [columns]. Outputs are
// `results` arrays of x's shape and dtype, then the workspace, if there is one.
class RowPrimitive : public KernelPrimitive {
 public:
  struct Layout {
    int row_inputs;
    int results;
    int workspace;  // float32 numbers that each of a split row's threadgroups leaves; 0 where rows are not split
    uint32_t packs = usual_packs;  // that a thread of the op's block kernels holds at most
  };

  RowPrimitive(mx::Stream stream, const char* op, Layout layout, const mx::array& x)
      : KernelPrimitive(stream),
        op_(op),
        layout_(layout),
        has_workspace_(layout.workspace > 0 && wants_workspace(x, stream, plan_options(no_limit))) {}

  // The lazy result of a primitive that has one.
  static mx::array result_of(std::shared_ptr<RowPrimitive> primitive, Arrays inputs);

  // The lazy outputs of a primitive.
  static Arrays outputs_of(const std::shared_ptr<RowPrimitive>& primitive, const Arrays& inputs);

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override;

  // The op itself on one more axis, where all row inputs and nothing else are batched.
  std::pair<Arrays, std::vector<int>> vmap(const Arrays& inputs, const std::vector<int>& axes) override;

 protected:
  // This primitive for another x.
  virtual std::shared_ptr<RowPrimitive> like(const mx::array& x) = 0;

  void allocate(const Arrays& inputs, Arrays& outputs) override;

  // An array [columns] of a row op's kernels: its input, -1 where it is absent, and the number that is added to it.
  struct Weight {
    Weight(int input, float offset = no_offset) : input(input), offset(offset) {}

    int input;
    float offset;
  };

  // The launches of a row op's kernels (metal/mittens/row_op.h), "<file's stem>_<kind><variant>". Inputs are as the
  // class has them, outputs as the launches. With two results, the second is written first and then reread.
  std::vector<Launch> row_launches(Name file, const Arrays& inputs, std::initializer_list<Weight> weights,
                                   const Arrays& outputs, float eps = 0, const char* kind = "");

  bool has_workspace() const {
    return has_workspace_;
  }

  // Adds an unused workspace to the results of a composition, if this primitive has one.
  Arrays with_workspace(Arrays results);

 private:
  RowPlanOptions plan_options(uint32_t most_splits) const {
    return {op_, most_splits, layout_.packs};
  }

  mx::Shape shape_of_workspace(const mx::array& x);

  const char* op_;
  Layout layout_;
  bool has_workspace_;
};

}  // namespace mittens
