// Penalties and a mask of logits before tokens are drawn: as a call gives them, and as primitives keep them.
#pragma once

#include <array>
#include <limits>
#include <optional>
#include <variant>

#include "cpu/sampling/adjust_logits.h"
#include "params/sampling.h"
#include "runtime/any_shape.h"

namespace mittens {

// One number for all rows, or an array of one for each.
using Penalty = std::variant<double, mx::array>;

// Repetition, presence and frequency, in the order in which they change a logit.
inline constexpr size_t penalties = 3;

// The arguments of a call. contexts: how many of a row's last tokens count.
struct Adjustment {
  std::optional<mx::array> mask;
  std::optional<mx::array> tokens;
  std::array<Penalty, penalties> numbers = {1.0, 0.0, 0.0};
  std::array<int, penalties> contexts = {all_tokens, all_tokens, all_tokens};

  static constexpr int all_tokens = std::numeric_limits<int>::max();
};

template <>
struct ArraysIn<Adjustment> {
  template <typename Visitor>
  static void visit(Adjustment& adjustment, const Visitor& visitor) {
    ArraysIn<std::optional<mx::array>>::visit(adjustment.mask, visitor);
    ArraysIn<std::optional<mx::array>>::visit(adjustment.tokens, visitor);
    for (Penalty& penalty : adjustment.numbers) {
      ArraysIn<Penalty>::visit(penalty, visitor);
    }
  }
};

// As a primitive keeps them; the arrays are among its inputs.
struct AdjustOptions {
  bool has_mask = false;
  bool has_tokens = false;
  std::array<bool, penalties> is_given{};  // in an array
  std::array<double, penalties> values{};  // where they are not
  std::array<int, penalties> contexts{};  // 0 where there is no such penalty

  bool operator==(const AdjustOptions&) const = default;

  bool any() const {
    return has_mask || has_tokens;
  }
  // The inputs from `first` on.
  struct Given {
    const mx::array* tokens = nullptr;
    const mx::array* mask = nullptr;
    std::array<const mx::array*, penalties> numbers{};
  };
  Given given(const Arrays& inputs, size_t first) const;
};

// Throws where something cannot be done to the logits.
void check_adjustment(const char* op, const mx::array& logits, const Adjustment& adjustment);

// Checks an adjustment and keeps the parts that change anything; their arrays become further inputs.
AdjustOptions add_adjustment(const char* op, const mx::array& logits, const Adjustment& adjustment, Arrays& inputs,
                             mx::Stream stream);

// Adjusted logits, by mx operations.
mx::array compose_adjusted(const mx::array& logits, const AdjustOptions& options, const AdjustOptions::Given& given,
                           mx::Stream stream);

// A number as one that is added to an array of the type, which mx rounds to it.
float rounded_to(double number, mx::Dtype dtype);

// Params for the kernel and native code, of row contiguous arrays.
AdjustParams adjust_params(const mx::array& logits, const AdjustOptions& options, const AdjustOptions::Given& given,
                           uint32_t splits);
cpu::Adjustment native_adjustment(const mx::array& logits, const AdjustOptions& options,
                                  const AdjustOptions::Given& given);

// Adds tokens, mask and penalties to a launch, in the order of the kernels' arguments.
void add_adjustment(Launch& launch, const mx::array& logits, const AdjustOptions::Given& given);

}  // namespace mittens
