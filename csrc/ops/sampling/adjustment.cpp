#include "ops/sampling/adjustment.h"

#include <algorithm>
#include <cmath>

#include "mlx/ops.h"
#include "runtime/array_layout.h"
#include "runtime/array_util.h"
#include "runtime/checks.h"

namespace mittens {

namespace {

constexpr std::array<const char*, penalties> names = {"repetition_penalty", "presence_penalty", "frequency_penalty"};
enum { repetition, presence, frequency };

constexpr int word_bits = 32;

int words_of(const mx::array& logits) {
  return static_cast<int>(ceil_divide(logits.shape(-1), word_bits));
}

// Whether an array has the leading dimensions of the logits, or none, and `inner` of its own.
bool has_rows_of(const mx::array& array, const mx::array& logits, size_t inner) {
  if (array.ndim() == inner) {
    return true;
  }
  const size_t lead = logits.ndim() - 1;
  return array.ndim() == lead + inner &&
         std::equal(logits.shape().begin(), logits.shape().end() - 1, array.shape().begin());
}

// Whether all rows share an array.
bool is_shared(const mx::array& array, const mx::array& logits, size_t inner) {
  return array.ndim() == inner && logits.ndim() > 1;
}

void check_mask(const char* op, const mx::array& mask, const mx::array& logits) {
  if (mask.dtype() != mx::uint32 && mask.dtype() != mx::int32) {
    checks::fail<DtypeError>(op, "mask has dtype ", mask.dtype(),
                             ": expected uint32 or int32, words with a bit for each token, as xgrammar fills them");
  }
  const int words = words_of(logits);
  if (!has_rows_of(mask, logits, 1) || mask.shape(-1) != words) {
    checks::fail(op, "mask has shape ", mask.shape(), ", logits has shape ", logits.shape(), ": expected ", words,
                 " words of 32 tokens, for all rows or for each");
  }
}

void check_tokens(const char* op, const mx::array& tokens, const mx::array& logits) {
  const mx::Dtype dtype = tokens.dtype();
  if (dtype != mx::int32 && dtype != mx::uint32 && dtype != mx::int64 && dtype != mx::uint64) {
    checks::fail<DtypeError>(op, "tokens has dtype ", dtype, ": expected int32, uint32, int64 or uint64");
  }
  if (tokens.ndim() == 0 || !has_rows_of(tokens, logits, 1)) {
    checks::fail(op, "tokens has shape ", tokens.shape(), ", logits has shape ", logits.shape(),
                 ": expected the last tokens of each row, (.., tokens), or of all rows, (tokens)");
  }
}

void check_penalty(const char* op, size_t i, const Penalty& penalty, const mx::array& logits) {
  if (const auto* number = std::get_if<double>(&penalty)) {
    if (!std::isfinite(*number) || (i == repetition && *number < 0)) {
      checks::fail(op, names[i], " is ", *number, ": expected ",
                   i == repetition ? "a positive number, or 0 for no penalty" : "a finite number");
    }
    return;
  }
  const auto& numbers = std::get<mx::array>(penalty);
  if (!has_kernels(numbers.dtype())) {
    checks::fail<DtypeError>(op, names[i], " has dtype ", numbers.dtype(),
                             ": expected float32, float16 or bfloat16, or a number");
  }
  if (!has_rows_of(numbers, logits, 0)) {
    checks::fail(op, names[i], " has shape ", numbers.shape(), ", logits has shape ", logits.shape(),
                 ": expected a number, or one for each row");
  }
}

// Whether a penalty may change a logit.
bool changes(size_t i, const Penalty& penalty) {
  const auto* number = std::get_if<double>(&penalty);
  return !number || (*number != 0 && (i != repetition || *number != 1));
}

// For every row; inner: the dimensions behind the rows.
mx::array for_rows(const mx::array& array, const mx::array& logits, size_t inner, mx::Stream s) {
  mx::Shape shape = logits.shape();
  shape.pop_back();
  shape.insert(shape.end(), array.shape().end() - inner, array.shape().end());
  return array.shape() == shape ? array : mx::broadcast_to(array, shape, s);
}

// The last ones along the last axis.
mx::array last_of(const mx::array& array, int count, mx::Stream s) {
  if (count >= array.shape(-1)) {
    return array;
  }
  mx::Shape start(array.ndim(), 0);
  start.back() = array.shape(-1) - count;
  return mx::slice(array, start, array.shape(), s);
}

mx::array compose_mask(const mx::array& x, const mx::array& mask, mx::Stream s) {
  const mx::array columns = mx::arange(0, x.shape(-1), mx::uint32, s);
  const mx::array size(word_bits, mx::uint32);
  const mx::array words = mx::take(mx::view(mask, mx::uint32, s), mx::floor_divide(columns, size, s), -1, s);
  // By division, as mx has vmap wrong for shifts of a row by numbers that all rows share.
  const mx::array bit = mx::left_shift(mx::array(1, mx::uint32), mx::remainder(columns, size, s), s);
  const mx::array odd = mx::remainder(mx::floor_divide(words, bit, s), mx::array(2, mx::uint32), s);
  const mx::array allowed = mx::astype(odd, mx::bool_, s);
  return mx::where(allowed, x, mx::array(-std::numeric_limits<float>::infinity(), x.dtype()), s);
}

// mlx-lm's processors, one after the other. Tokens outside of the row go to a column behind it.
mx::array compose_penalties(const mx::array& logits, const AdjustOptions& options, const AdjustOptions::Given& given,
                            mx::Stream s) {
  const int columns = logits.shape(-1);
  const mx::Dtype dtype = logits.dtype();
  mx::Shape one = logits.shape();
  one.back() = 1;
  mx::array x = mx::concatenate({logits, mx::zeros(one, dtype, s)}, -1, s);
  const mx::array tokens = for_rows(mx::astype(*given.tokens, mx::int64, s), logits, 1, s);
  const mx::array outside = mx::logical_or(mx::less(tokens, mx::array(0, mx::int64), s),
                                           mx::greater_equal(tokens, mx::array(columns, mx::int64), s), s);
  const mx::array places = mx::astype(mx::where(outside, mx::array(columns, mx::int64), tokens, s), mx::int32, s);
  for (size_t i = 0; i < penalties; ++i) {
    if (options.contexts[i] == 0) {
      continue;
    }
    const mx::array at = last_of(places, options.contexts[i], s);
    mx::array penalty = mx::array(options.values[i], dtype);
    if (options.is_given[i]) {
      const mx::array& numbers = *given.numbers[i];
      const mx::array none = mx::equal(numbers, mx::array(0.0f, numbers.dtype()), s);
      penalty = mx::astype(numbers, dtype, s);
      penalty = i == repetition ? mx::where(none, mx::array(1, dtype), penalty, s) : penalty;
      penalty = mx::reshape(for_rows(penalty, logits, 0, s), one, s);
    }
    if (i != frequency) {
      // Of each element by itself: written to its place from several tokens, it would have a gradient of each of them.
      const mx::array none = mx::zeros(x.shape(), mx::int32, s);
      const mx::array is_seen = mx::astype(mx::put_along_axis(none, at, mx::array(1, mx::int32), -1, s), mx::bool_, s);
      const mx::array is_negative = mx::less(x, mx::array(0, dtype), s);
      const mx::array changed = i == repetition
                                    ? mx::where(is_negative, mx::multiply(x, penalty, s), mx::divide(x, penalty, s), s)
                                    : mx::subtract(x, penalty, s);
      x = mx::where(is_seen, changed, x, s);
    } else {
      x = mx::scatter_add_axis(x, at, mx::broadcast_to(mx::negative(penalty, s), at.shape(), s), -1, s);
    }
  }
  return mx::slice(x, mx::Shape(x.ndim(), 0), logits.shape(), s);
}

}  // namespace

AdjustOptions::Given AdjustOptions::given(const Arrays& inputs, size_t first) const {
  Given given;
  given.tokens = has_tokens ? &inputs[first++] : nullptr;
  given.mask = has_mask ? &inputs[first++] : nullptr;
  for (size_t i = 0; i < penalties; ++i) {
    given.numbers[i] = is_given[i] ? &inputs[first++] : nullptr;
  }
  return given;
}

void check_adjustment(const char* op, const mx::array& logits, const Adjustment& adjustment) {
  if (adjustment.tokens) {
    check_tokens(op, *adjustment.tokens, logits);
  }
  if (adjustment.mask) {
    check_mask(op, *adjustment.mask, logits);
  }
  for (size_t i = 0; i < penalties; ++i) {
    check_penalty(op, i, adjustment.numbers[i], logits);
    if (changes(i, adjustment.numbers[i]) && !adjustment.tokens) {
      checks::fail(op, names[i], " is given, and tokens is None: expected the tokens that it is for");
    }
  }
}

AdjustOptions add_adjustment(const char* op, const mx::array& logits, const Adjustment& adjustment, Arrays& inputs,
                             mx::Stream stream) {
  check_adjustment(op, logits, adjustment);
  AdjustOptions options;
  options.has_mask = adjustment.mask.has_value();
  for (size_t i = 0; adjustment.tokens && i < penalties; ++i) {
    options.contexts[i] =
        changes(i, adjustment.numbers[i]) ? std::min(adjustment.contexts[i], adjustment.tokens->shape(-1)) : 0;
    options.has_tokens = options.has_tokens || options.contexts[i] > 0;
  }
  if (options.has_tokens) {
    inputs.push_back(*adjustment.tokens);
  }
  if (options.has_mask) {
    inputs.push_back(*adjustment.mask);
  }
  for (size_t i = 0; i < penalties; ++i) {
    if (options.contexts[i] == 0) {
      continue;
    }
    if (const auto* numbers = std::get_if<mx::array>(&adjustment.numbers[i])) {
      options.is_given[i] = true;
      inputs.push_back(in_dtype(*numbers, mx::float32, stream));
    } else {
      options.values[i] = std::get<double>(adjustment.numbers[i]);
    }
  }
  return options;
}

mx::array compose_adjusted(const mx::array& logits, const AdjustOptions& options, const AdjustOptions::Given& given,
                           mx::Stream stream) {
  const mx::array x = options.has_tokens ? compose_penalties(logits, options, given, stream) : logits;
  return options.has_mask ? compose_mask(x, *given.mask, stream) : x;
}

float rounded_to(double number, mx::Dtype dtype) {
  const float v = static_cast<float>(number);
  return dtype == mx::float16    ? static_cast<float>(static_cast<mx::float16_t>(v))
         : dtype == mx::bfloat16 ? static_cast<float>(static_cast<mx::bfloat16_t>(v))
                                 : v;
}

AdjustParams adjust_params(const mx::array& logits, const AdjustOptions& options, const AdjustOptions::Given& given,
                           uint32_t splits) {
  const auto penalty = [&](size_t i) {
    const mx::array* numbers = given.numbers[i];
    return PenaltyParams{
        .context = static_cast<uint32_t>(options.contexts[i]),
        .step = numbers && !is_shared(*numbers, logits, 0),
        .is_given = options.is_given[i],
        .value = rounded_to(options.values[i], logits.dtype()),
    };
  };
  const auto step = [&](const mx::array* array) {
    return array && !is_shared(*array, logits, 1) ? static_cast<uint32_t>(array->shape(-1)) : 0;
  };
  const uint32_t packs = ceil_divide(logits.shape(-1), 16 / logits.itemsize());
  return {
      .columns = static_cast<uint32_t>(logits.shape(-1)),
      .phase = phase_of(logits),
      .splits = splits,
      .packs_per_split = ceil_divide(packs, splits),
      .tokens = given.tokens ? static_cast<uint32_t>(given.tokens->shape(-1)) : 0,
      .token_step = step(given.tokens),
      .token_words = given.tokens ? static_cast<uint32_t>(given.tokens->itemsize() / sizeof(uint32_t)) : 1,
      .context = static_cast<uint32_t>(*std::max_element(options.contexts.begin(), options.contexts.end())),
      .has_mask = options.has_mask,
      .mask_step = step(given.mask),
      .repetition = penalty(repetition),
      .presence = penalty(presence),
      .frequency = penalty(frequency),
  };
}

cpu::Adjustment native_adjustment(const mx::array& logits, const AdjustOptions& options,
                                  const AdjustOptions::Given& given) {
  const AdjustParams params = adjust_params(logits, options, given, 1);
  const auto penalty = [&](const PenaltyParams& p, size_t i) {
    return cpu::LogitPenalty{p.context, p.step, p.is_given ? given.numbers[i]->data<float>() : nullptr, p.value};
  };
  return {
      .tokens = given.tokens ? static_cast<const uint32_t*>(given.tokens->data<void>()) : nullptr,
      .count = params.tokens,
      .words = params.token_words,
      .token_step = params.token_step,
      .mask = given.mask ? static_cast<const uint32_t*>(given.mask->data<void>()) : nullptr,
      .mask_step = params.mask_step,
      .repetition = penalty(params.repetition, repetition),
      .presence = penalty(params.presence, presence),
      .frequency = penalty(params.frequency, frequency),
  };
}

void add_adjustment(Launch& launch, const mx::array& logits, const AdjustOptions::Given& given) {
  const auto add = [&](const mx::array* array) { launch.input_if(array, array ? *array : logits); };
  add(given.tokens);
  add(given.mask);
  std::for_each(given.numbers.begin(), given.numbers.end(), add);
}

}  // namespace mittens
