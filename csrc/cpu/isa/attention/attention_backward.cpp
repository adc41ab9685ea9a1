#include "cpu/attention/attention_backward.h"

#include "cpu/isa/attention/attention_backward_block.h"

namespace mittens::cpu::MITTENS_ISA {

namespace {

// Keys whose gradients a task sums up before it goes on.
constexpr size_t chunk_keys = 4 * block_keys;

// Whoever shares the keys of a head has a sum of its own for the head's dq. How many do so does not depend on the
// number of threads, nor does the order in which these sums are added.
struct BackwardPlan {
  size_t heads;  // of keys, of all batches
  size_t rows;  // of a head
  size_t shares;
  size_t share_keys;
  size_t columns;  // of dq's sums
  size_t grain;
};

BackwardPlan plan_backward(const Attention& call) {
  constexpr size_t wanted_tasks = 16;
  constexpr size_t most_shares = 8;
  constexpr size_t serial_products = 128 << 10;
  BackwardPlan plan;
  plan.heads = call.batch * call.key_heads;
  plan.rows = call.heads / call.key_heads * call.queries;
  const size_t chunks = ceil_divide(call.keys, chunk_keys);
  plan.shares = smaller(smaller(ceil_divide(wanted_tasks, plan.heads), most_shares), chunks);
  plan.share_keys = ceil_divide(chunks, plan.shares) * chunk_keys;
  plan.shares = ceil_divide(call.keys, plan.share_keys);
  plan.columns = padded_width(call.width);
  const size_t products = plan.heads * plan.rows * call.keys * (call.width + call.value_width);
  plan.grain = products < serial_products ? plan.heads * plan.shares : 1;
  return plan;
}

// The views of a call by which Head finds rows: of the queries, of the cotangents.
struct Views {
  Attention forward;
  Attention cotangents;

  explicit Views(const AttentionBackward& call) : forward(call.forward), cotangents(call.forward) {
    cotangents.q = call.dy;
  }

  template <typename T>
  BackwardHead<T> head(size_t index, const float* logsumexp, const float* delta) const {
    return {Head<T>(forward, index), Head<T>(cotangents, index), logsumexp, delta};
  }
};

template <typename T>
void store_row(T* to, const float* from, size_t columns) {
  for (size_t c = 0; c < columns; c += width) {
    store_one(to + c, read<Float>(from + c, All()), columns - c);
  }
}

// delta [batch, heads, queries]
template <typename T>
void sum_delta(const AttentionBackward& call, float* delta) {
  Attention results = call.forward;
  results.q = call.y;
  const Views views(call);
  const size_t heads = call.forward.batch * call.forward.key_heads;
  const size_t rows = call.forward.heads / call.forward.key_heads * call.forward.queries;
  parallel_for(heads * rows, 256, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const Head<T> y(results, i / rows), dy(views.cotangents, i / rows);
      const T* a = y.query(i % rows);
      const T* b = dy.query(i % rows);
      Float sum = {};
      each_vector(call.forward.value_width, [&](size_t c, auto part) MITTENS_INLINED {
        sum = fma(load_one(a + c, part), load_one(b + c, part), sum);
      });
      delta[y.index(i % rows)] = sum_of(sum);
    }
  });
}

template <typename T>
void write_dsinks(const AttentionBackward& call, const float* delta) {
  const size_t heads = call.forward.heads, queries = call.forward.queries;
  parallel_for(heads, 1, [&](size_t begin, size_t end) {
    for (size_t head = begin; head < end; ++head) {
      const float sink = load_one(static_cast<const T*>(call.forward.sinks) + head, Some{1})[0];
      double sum = 0;
      for (size_t row = 0; row < call.forward.batch * queries; ++row) {
        const size_t i = (row / queries * heads + head) * queries + row % queries;
        sum -= call.logsumexp[i] == -infinity ? 0.0f : exp(sink - call.logsumexp[i]) * delta[i];
      }
      const float result = static_cast<float>(sum);
      store_one(static_cast<T*>(call.dsinks) + head, spread(result), 1);
    }
  });
}

// One share of a head's keys: their dk and dv, and their terms of the head's dq.
template <typename T>
class KeyShare {
 public:
  KeyShare(const AttentionBackward& call, const BackwardHead<T>& head, size_t index)
      : call_(call), forward_(call.forward), head_(head), index_(index) {}

  // dq: [rows, columns] of float32, nullptr where it is not wanted.
  void run(size_t first, size_t end, float* dq) const {
    const size_t rows = head_.head.rows;
    const size_t columns = padded_width(forward_.width), value_columns = padded_width(forward_.value_width);
    const size_t stride = Panel::stride_of(columns), value_stride = Panel::stride_of(value_columns);
    const bool hides = may_hide(forward_);
    const Scratch scratch(BackwardBlock<T>::memory(forward_) +
                          chunk_keys * ((hides ? 3 : 2) * stride + 2 * value_stride));
    float* memory = scratch.data();
    BackwardBlock<T> block(head_, memory);
    memory += BackwardBlock<T>::memory(forward_);
    const Panel k{memory, stride}, dk{k.at + chunk_keys * stride, stride};
    const Panel v{dk.at + chunk_keys * stride, value_stride}, dv{v.at + chunk_keys * value_stride, value_stride};
    const Panel finite_k{hides ? dv.at + chunk_keys * value_stride : k.at, stride};
    if (dq) {
      fill_zeros(dq, rows * columns);
    }
    for (size_t begin = first; begin < end; begin += chunk_keys) {
      const size_t n = smaller(chunk_keys, end - begin);
      head_.head.keys.widen(begin, n, k.at, stride);
      head_.head.values.widen(begin, n, v.at, value_stride);
      if (hides) {
        copy_finite(k, finite_k, n, columns);
      }
      fill_zeros(dk.at, n * stride);
      fill_zeros(dv.at, n * value_stride);
      for (size_t row = 0; row < rows; row += block_rows) {
        const size_t count = smaller(block_rows, rows - row);
        const Range all = head_.head.range(row, count);
        const Range seen{all.begin > begin ? all.begin : begin, smaller(all.end, begin + n)};
        if (seen.begin >= seen.end) {
          continue;
        }
        block.pack(row, count);
        for (size_t key = seen.begin; key < seen.end; key += block_keys) {
          const size_t keys = smaller(block_keys, seen.end - key), at = key - begin;
          const auto from = [&](Panel panel) { return Panel{panel.row(at), panel.stride}; };
          if (!block.weigh(from(k), from(v), key, keys)) {
            continue;
          }
          if (call_.dv) {
            product<column_tall, column_wide>(keys, value_columns, {block.p().at, block_rows, 1}, block.dy(), count,
                                              from(dv), true);
          }
          if (call_.dk) {
            product<column_tall, column_wide>(keys, columns, {block.ds().at, block_rows, 1}, block.q(), count, from(dk),
                                              true);
          }
          if (dq) {
            product<column_tall, column_wide>(count, columns, {block.ds().at, 1, block_rows}, from(finite_k), keys,
                                              {dq + row * columns, columns}, true);
          }
        }
      }
      for (size_t i = 0; i < n; ++i) {
        const size_t key = index_ * forward_.keys + begin + i;
        if (call_.dk) {
          store_row(static_cast<T*>(call_.dk) + key * forward_.width, dk.row(i), forward_.width);
        }
        if (call_.dv) {
          store_row(static_cast<T*>(call_.dv) + key * forward_.value_width, dv.row(i), forward_.value_width);
        }
      }
    }
  }

 private:
  static void fill_zeros(float* p, size_t n) {
    __builtin_memset(p, 0, n * sizeof(float));
  }

  const AttentionBackward& call_;
  const Attention& forward_;
  const BackwardHead<T>& head_;
  size_t index_;
};

// Sums the shares of dq.
template <typename T>
void write_dq(const AttentionBackward& call, const BackwardPlan& plan, float* partials) {
  const Float scale = spread(call.forward.scale);
  parallel_for(plan.heads * plan.rows, 256, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const Head<T> head(call.forward, i / plan.rows);
      float* const sum = partials + (i / plan.rows * plan.shares * plan.rows + i % plan.rows) * plan.columns;
      for (size_t c = 0; c < plan.columns; c += width) {
        Float total = read<Float>(sum + c, All());
        for (size_t share = 1; share < plan.shares; ++share) {
          total = total + read<Float>(sum + share * plan.rows * plan.columns + c, All());
        }
        write(sum + c, total * scale, All());
      }
      store_row(static_cast<T*>(call.dq) + head.index(i % plan.rows) * call.forward.width, sum, call.forward.width);
    }
  });
}

template <typename T>
void write_gradients(const AttentionBackward& call, const float* delta) {
  const BackwardPlan plan = plan_backward(call.forward);
  const size_t share_size = plan.rows * plan.columns;
  const Scratch partials(call.dq ? plan.heads * plan.shares * share_size : 0);
  const Views views(call);
  parallel_for(plan.heads * plan.shares, plan.grain, [&](size_t begin, size_t end) {
    for (size_t task = begin; task < end; ++task) {
      const size_t index = task / plan.shares, first = task % plan.shares * plan.share_keys;
      const BackwardHead<T> head = views.head<T>(index, call.logsumexp, delta);
      KeyShare<T>(call, head, index)
          .run(first, smaller(first + plan.share_keys, call.forward.keys),
               call.dq ? partials.data() + task * share_size : nullptr);
    }
  });
  if (call.dq) {
    write_dq<T>(call, plan, partials.data());
  }
}

// The sums of ds over the axes that the mask is broadcast along, for a block of the mask's rows and keys.
template <typename T>
class MaskBlock {
 public:
  MaskBlock(const AttentionBackward& call, const float* delta) : call_(call), forward_(call.forward), delta_(delta) {}

  // Of the mask's batch and head; rows and keys: of the scores that it is for.
  void run(size_t batch, size_t head, Range rows, Range keys) const {
    const size_t* sizes = call_.mask_sizes;
    const size_t stride = Panel::stride_of(forward_.width), value_stride = Panel::stride_of(forward_.value_width);
    const size_t block_size = BackwardBlock<T>::memory(forward_);
    const Scratch scratch(block_size + block_keys * (stride + value_stride + block_rows));
    const Panel k{scratch.data() + block_size, stride}, v{k.at + block_keys * stride, value_stride};
    const Panel sums{v.at + block_keys * value_stride, block_rows};
    __builtin_memset(sums.at, 0, block_keys * block_rows * sizeof(float));
    for (size_t b = sizes[0] == 1 ? 0 : batch; b < (sizes[0] == 1 ? forward_.batch : batch + 1); ++b) {
      for (size_t h = sizes[1] == 1 ? 0 : head; h < (sizes[1] == 1 ? forward_.heads : head + 1); ++h) {
        add(b, h, rows, keys, scratch.data(), k, v, sums);
      }
    }
    const size_t n = sizes[2] == 1 ? 1 : rows.end - rows.begin, m = sizes[3] == 1 ? 1 : keys.end - keys.begin;
    T* const to = static_cast<T*>(call_.dmask) +
                  ((batch * sizes[1] + head) * sizes[2] + (sizes[2] == 1 ? 0 : rows.begin)) * sizes[3] +
                  (sizes[3] == 1 ? 0 : keys.begin);
    for (size_t i = 0; i < n; ++i) {
      for (size_t j = 0; j < m; ++j) {
        float sum = 0;
        for (size_t key = j; key < (sizes[3] == 1 ? block_keys : j + 1); ++key) {
          for (size_t row = i; row < (sizes[2] == 1 ? block_rows : i + 1); ++row) {
            sum += sums.row(key)[row];
          }
        }
        store_one(to + i * sizes[3] + j, spread(sum), 1);
      }
    }
  }

 private:
  void add(size_t b, size_t h, Range rows, Range keys, float* memory, Panel k, Panel v, Panel sums) const {
    const size_t key_head = h / (forward_.heads / forward_.key_heads);
    AttentionBackward alone = call_;  // of this head
    alone.forward.batch = alone.forward.heads = alone.forward.key_heads = 1;
    move_to(alone.forward.q, b, h, sizeof(T));
    move_to(alone.dy, b, h, sizeof(T));
    move_to(alone.forward.k.rows, b, key_head, sizeof(T));
    move_to(alone.forward.v.rows, b, key_head, sizeof(T));
    move_to(alone.forward.mask.values, b, h, sizeof(T));  // it is additive
    const Views views(alone);
    const size_t first = (b * forward_.heads + h) * forward_.queries;
    const BackwardHead<T> head = views.head<T>(0, call_.logsumexp + first, delta_ + first);
    BackwardBlock<T> block(head, memory);
    for (size_t row = rows.begin; row < rows.end; row += block_rows) {
      block.pack(row, smaller(block_rows, rows.end - row));
      const Range seen = block.seen();
      for (size_t key = keys.begin; key < keys.end; key += block_keys) {
        const size_t count = smaller(block_keys, keys.end - key);
        if (key >= seen.end || key + count <= seen.begin) {
          continue;
        }
        head.head.keys.widen(key, count, k.at, k.stride);
        head.head.values.widen(key, count, v.at, v.stride);
        if (block.weigh(k, v, key, count)) {
          for (size_t i = 0; i < count; ++i) {
            for (size_t r = 0; r < block.padded_rows(); r += width) {
              float* const sum = sums.row(i) + r;
              write(sum, read<Float>(sum, All()) + read<Float>(block.ds().row(i) + r, All()), All());
            }
          }
        }
      }
    }
  }

  static void move_to(AttentionView& view, size_t batch, size_t head, size_t item) {
    const int64_t offset = static_cast<int64_t>(batch) * view.batch + static_cast<int64_t>(head) * view.head;
    view.data = static_cast<const char*>(view.data) + offset * static_cast<int64_t>(item);
  }

  const AttentionBackward& call_;
  const Attention& forward_;
  const float* delta_;
};

template <typename T>
void write_dmask(const AttentionBackward& call, const float* delta) {
  const size_t* sizes = call.mask_sizes;
  const size_t rows = call.forward.queries, keys = call.forward.keys;
  const size_t row_blocks = sizes[2] == 1 ? 1 : ceil_divide(rows, block_rows);
  const size_t key_blocks = sizes[3] == 1 ? 1 : ceil_divide(keys, block_keys);
  const auto part = [](size_t i, size_t blocks, size_t size, size_t all) {
    return blocks == 1 ? Range{0, all} : Range{i * size, smaller((i + 1) * size, all)};
  };
  parallel_for(sizes[0] * sizes[1] * row_blocks * key_blocks, 1, [&](size_t begin, size_t end) {
    for (size_t task = begin; task < end; ++task) {
      const size_t head = task / key_blocks / row_blocks;
      MaskBlock<T>(call, delta)
          .run(head / sizes[1], head % sizes[1], part(task / key_blocks % row_blocks, row_blocks, block_rows, rows),
               part(task % key_blocks, key_blocks, block_keys, keys));
    }
  });
}

template <typename T>
void run_backward(const AttentionBackward& call) {
  const Scratch delta(call.forward.batch * call.forward.heads * call.forward.queries);
  sum_delta<T>(call, delta.data());
  if (call.dq || call.dk || call.dv) {
    write_gradients<T>(call, delta.data());
  }
  if (call.dmask) {
    write_dmask<T>(call, delta.data());
  }
  if (call.dsinks) {
    write_dsinks<T>(call, delta.data());
  }
}

}  // namespace

void attention_backward(const AttentionBackward& call) {
  with_type(call.forward.type, [&](auto t) { run_backward<decltype(t)>(call); });
}

}  // namespace mittens::cpu::MITTENS_ISA
