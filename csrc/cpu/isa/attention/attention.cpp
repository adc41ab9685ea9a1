#include "cpu/attention/attention.h"

#include "cpu/isa/attention/attention_row_block.h"
#include "cpu/isa/attention/attention_few_rows.h"

namespace mittens::cpu::MITTENS_ISA {

// The most rows sharing keys that go with lanes along a key; more rows fill lanes of their own.
constexpr size_t few_rows = width / 2;

constexpr size_t tasks_per_thread = 4;
constexpr size_t serial_products = 512 << 10;  // fewer are done sooner than another thread wakes up

// How the work is cut: heads times blocks of rows times shares of the keys.
struct AttentionSplit {
  size_t heads;
  size_t rows;  // of a head
  size_t block_rows;  // of one task
  size_t blocks;
  size_t share_keys;
  size_t shares;
  size_t grain;
};

static AttentionSplit split_attention(const Attention& call) {
  constexpr size_t block_floats = 32 << 10;  // of queries and results that a task keeps close
  constexpr size_t fewest_share_keys = 256;
  AttentionSplit split;
  split.heads = call.batch * call.key_heads;
  split.rows = call.heads / call.key_heads * call.queries;
  const size_t wanted = ceil_divide(tasks_per_thread * threads(), split.heads);
  if (split.rows <= few_rows) {
    split.block_rows = split.rows;
  } else {
    const size_t lanes = wide * width;
    const size_t most = block_floats / (call.width + call.value_width) / lanes * lanes;
    const size_t balanced = ceil_divide(ceil_divide(split.rows, wanted), lanes) * lanes;
    split.block_rows = smaller(most > lanes ? most : lanes, balanced);
  }
  split.blocks = ceil_divide(split.rows, split.block_rows);
  const size_t keys = call.window ? smaller(call.keys, call.window + call.queries) : call.keys;
  const size_t most_shares = ceil_divide(keys, fewest_share_keys);
  split.shares = smaller(ceil_divide(wanted, split.blocks), most_shares);
  split.share_keys = ceil_divide(ceil_divide(call.keys, split.shares), 64) * 64;
  split.shares = ceil_divide(call.keys, split.share_keys);
  const size_t products = split.rows * keys * (call.width + call.value_width) * split.heads;
  split.grain = products < serial_products ? split.heads * split.blocks * split.shares : 1;
  return split;
}

template <typename T>
static void run_attention(const Attention& call) {
  const AttentionSplit split = split_attention(call);
  const size_t row_size = Partials::row_size(call.value_width);
  const size_t head_size = split.shares * split.rows * row_size;
  const Scratch scratch(split.shares > 1 ? split.heads * head_size : 0);
  const auto partials = [&](size_t head) {
    return Partials(split.shares > 1 ? scratch.data() + head * head_size : nullptr, call.value_width, split.rows);
  };
  parallel_for(split.heads * split.blocks * split.shares, split.grain, [&](size_t begin, size_t end) {
    for (size_t task = begin; task < end; ++task) {
      const size_t share = task % split.shares;
      // The last rows of a causal call see the most keys: they come first.
      const size_t block = split.blocks - 1 - task / split.shares % split.blocks;
      const size_t index = task / split.shares / split.blocks;
      const Head<T> head(call, index);
      const Range keys{share * split.share_keys, smaller((share + 1) * split.share_keys, call.keys)};
      if (split.rows <= few_rows) {
        FewRows<T>(head, 0, split.rows).run(keys, share, partials(index));
      } else {
        const size_t first = block * split.block_rows;
        RowBlock<T>(head, first, smaller(split.block_rows, split.rows - first)).run(keys, share, partials(index));
      }
    }
  });
  if (split.shares > 1) {
    parallel_for(split.heads * split.rows, ceil_divide(split.heads * split.rows, threads()),
                 [&](size_t begin, size_t end) {
                   for (size_t i = begin; i < end; ++i) {
                     const Head<T> head(call, i / split.rows);
                     combine(head, partials(i / split.rows), i % split.rows, {0, split.shares});
                   }
                 });
  }
}

static Range both(Range a, Range b) {
  return {a.begin > b.begin ? a.begin : b.begin, smaller(a.end, b.end)};
}

// Keys or values in float32, where they cannot be loaded as they lie and are read more than once.
template <typename T>
struct Widened {
  Scratch memory;
  WideRows rows;

  Widened(const HeadRows<T>& from, bool repeats, Range range, size_t columns)
      : memory(repeats && !from.whole() ? (range.end - range.begin) * columns : 0) {
    if (repeats && !from.whole()) {
      from.widen(range.begin, range.end - range.begin, memory.data(), columns);
      rows = {memory.data(), range.begin};
    }
  }
};

// Each token by itself, in shares that begin at the same keys in every call: neither the number of tokens nor of
// threads changes its operations or their order.
template <typename T>
static void run_token_by_token(const Attention& call) {
  constexpr size_t share_keys = 512;
  constexpr size_t most_tokens = 16;  // that read a share of the keys one after the other, while the caches hold it
  const auto shares_of = [](Range keys) {
    return keys.begin < keys.end ? Range{keys.begin / share_keys, ceil_divide(keys.end, share_keys)} : Range{0, 0};
  };
  const size_t heads = call.batch * call.key_heads, ratio = call.heads / call.key_heads;
  for (size_t first = 0; first < call.queries; first += most_tokens) {
    const size_t tokens = smaller(most_tokens, call.queries - first), rows = tokens * ratio;
    const Range reach = Head<T>(call, 0).range(first * ratio, rows), all = shares_of(reach);
    const size_t shares = all.end - all.begin;
    const size_t head_size = shares * rows * Partials::row_size(call.value_width);
    const Scratch scratch(heads * head_size);
    const auto partials = [&](size_t head) {
      return Partials(scratch.data() + head * head_size, call.value_width, rows, first * ratio, all.begin);
    };
    const size_t pieces = heads * shares < tasks_per_thread * threads() ? tokens : 1;
    const size_t products = heads * rows * (reach.end - reach.begin) * (call.width + call.value_width);
    const size_t tasks = heads * pieces * shares;
    parallel_for(tasks, products < serial_products ? tasks : 1, [&](size_t begin, size_t end) {
      for (size_t task = begin; task < end; ++task) {
        const size_t share = all.begin + task % shares, piece = task / shares % pieces, index = task / shares / pieces;
        const Range part{share * share_keys, smaller((share + 1) * share_keys, call.keys)};
        const Head<T> head(call, index);
        const size_t begin_token = first + piece * tokens / pieces, end_token = first + (piece + 1) * tokens / pieces;
        const Range read = both(part, head.range(begin_token * ratio, (end_token - begin_token) * ratio));
        const bool repeats = end_token - begin_token > 1 && read.begin < read.end;
        const Widened<T> keys(head.keys, repeats, read, padded_width(call.width));
        const Widened<T> values(head.values, repeats, read, padded_width(call.value_width));
        for (size_t token = begin_token; token < end_token; ++token) {
          const Range seen = both(part, head.range(token * ratio));
          if (seen.begin < seen.end) {
            FewRows<T>(head, token * ratio, ratio, keys.rows, values.rows).run(part, share, partials(index));
          }
        }
      }
    });
    parallel_for(heads * rows, ceil_divide(heads * rows, threads()), [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        const Head<T> head(call, i / rows);
        const size_t row = first * ratio + i % rows;
        combine(head, partials(i / rows), row, shares_of(head.range(row)));
      }
    });
  }
}

void attention(const Attention& call) {
  with_type(call.type, [&](auto t) {
    using T = decltype(t);
    call.exact ? run_token_by_token<T>(call) : run_attention<T>(call);
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
