#include "cpu/attention.h"

#include "cpu/isa/attention/attention_block.h"
#include "cpu/isa/attention/attention_rows.h"

namespace mittens::cpu::MITTENS_ISA {

// Up to so many rows that share keys go with lanes along a key; more fill lanes of their own.
constexpr size_t few_rows = width / 2;

// How the work is cut: heads times blocks of rows times shares of the keys.
struct AttentionPlan {
  size_t heads;
  size_t rows;  // of a head
  size_t block_rows;  // of one task
  size_t blocks;
  size_t share_keys;
  size_t shares;
  size_t grain;
};

static AttentionPlan plan_attention(const Attention& call) {
  constexpr size_t block_floats = 32 << 10;  // of queries and results that a task keeps close
  constexpr size_t fewest_share_keys = 256;
  constexpr size_t tasks_per_thread = 4;
  constexpr size_t serial_products = 512 << 10;
  AttentionPlan plan;
  plan.heads = call.batch * call.key_heads;
  plan.rows = call.heads / call.key_heads * call.queries;
  const size_t wanted = ceil_divide(tasks_per_thread * threads(), plan.heads);
  if (plan.rows <= few_rows) {
    plan.block_rows = plan.rows;
  } else {
    const size_t lanes = wide * width;
    const size_t most = block_floats / (call.width + call.value_width) / lanes * lanes;
    const size_t balanced = ceil_divide(ceil_divide(plan.rows, wanted), lanes) * lanes;
    plan.block_rows = smaller(most > lanes ? most : lanes, balanced);
  }
  plan.blocks = ceil_divide(plan.rows, plan.block_rows);
  const size_t keys = call.window ? smaller(call.keys, call.window + call.queries) : call.keys;
  const size_t most_shares = ceil_divide(keys, fewest_share_keys);
  plan.shares = smaller(ceil_divide(wanted, plan.blocks), most_shares);
  plan.share_keys = ceil_divide(ceil_divide(call.keys, plan.shares), 64) * 64;
  plan.shares = ceil_divide(call.keys, plan.share_keys);
  const size_t products = plan.rows * keys * (call.width + call.value_width) * plan.heads;
  plan.grain = products < serial_products ? plan.heads * plan.blocks * plan.shares : 1;
  return plan;
}

template <typename T>
static void run_attention(const Attention& call) {
  const AttentionPlan plan = plan_attention(call);
  const size_t row_size = Partials::row_size(call.value_width);
  const size_t head_size = plan.shares * plan.rows * row_size;
  const Scratch scratch(plan.shares > 1 ? plan.heads * head_size : 0);
  const auto partials = [&](size_t head) {
    return Partials(plan.shares > 1 ? scratch.data() + head * head_size : nullptr, call.value_width);
  };
  parallel_for(plan.heads * plan.blocks * plan.shares, plan.grain, [&](size_t begin, size_t end) {
    for (size_t task = begin; task < end; ++task) {
      const size_t share = task % plan.shares;
      // The last rows of a causal call see the most keys: they come first.
      const size_t block = plan.blocks - 1 - task / plan.shares % plan.blocks;
      const size_t index = task / plan.shares / plan.blocks;
      const Head<T> head(call, index);
      const Range keys{share * plan.share_keys, smaller((share + 1) * plan.share_keys, call.keys)};
      if (plan.rows <= few_rows) {
        FewRows<T>(head).run(keys, share, partials(index));
      } else {
        const size_t first = block * plan.block_rows;
        RowBlock<T>(head, first, smaller(plan.block_rows, plan.rows - first)).run(keys, share, partials(index));
      }
    }
  });
  if (plan.shares > 1) {
    parallel_for(plan.heads * plan.rows, ceil_divide(plan.heads * plan.rows, threads()), [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        const Head<T> head(call, i / plan.rows);
        combine(head, partials(i / plan.rows), i % plan.rows, plan.shares);
      }
    });
  }
}

void attention(const Attention& call) {
  with_type(call.type, [&](auto t) { run_attention<decltype(t)>(call); });
}

}  // namespace mittens::cpu::MITTENS_ISA
