// Merges the attention of shared keys with each row's own, by their logsumexps (cascade_attention).
#include "cpu/attention/cascade_attention.h"

#include "cpu/isa/row_op.h"

namespace mittens::cpu::MITTENS_ISA {

void attention_merge(const AttentionMerge& call) {
  with_type(call.type, [&](auto t) {
    using T = decltype(t);
    const size_t rows = call.batch * call.heads * call.queries;
    parallel_for(rows, ceil_divide(16384, call.width), [&](size_t begin, size_t end) {
      for (size_t row = begin; row < end; ++row) {
        const size_t query = row % call.queries, head = row / call.queries % call.heads;
        const size_t batch = row / call.queries / call.heads;
        const size_t shared_row = (head * call.batch + batch) * call.queries + query;
        const float first = call.prefix_logsumexp[shared_row], second = call.own_logsumexp[row];
        const float top = second > first ? second : first;
        const float base = top == -infinity ? 0.0f : top;
        const float of_first = exp(first - base), of_second = exp(second - base);
        const float total = of_first + of_second;
        const float factor = total == 0.0f ? 0.0f : 1.0f / total;
        const T* prefix = (const T*)call.prefix + shared_row * call.width;
        const T* own = (const T*)call.own + row * call.width;
        each_vector(call.width, [&](size_t column, auto part) MITTENS_INLINED {
          const Float sum = load_in_order(prefix + column, part) * (of_first * factor) +
                            load_in_order(own + column, part) * (of_second * factor);
          store_in_order((T*)call.y + row * call.width + column, sum, part);
        });
      }
    });
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
