// One key/value head of an attention call: rows are the queries that share its keys, from all its query heads,
// token by token.
#pragma once

#include "cpu/attention/attention.h"
#include "cpu/isa/attention/attention_vectors.h"
#include "cpu/isa/row_op.h"

namespace mittens::cpu::MITTENS_ISA {

// Keys that a query sees, before a mask hides some.
struct Range {
  size_t begin;
  size_t end;
};

// Keys or values of the head.
template <typename T>
class HeadRows {
 public:
  HeadRows(const AttentionRows& rows, const BlockTable& table, size_t batch, size_t head, size_t columns)
      : rows_(rows),
        table_(table.entries ? &table : nullptr),
        columns_(columns),
        words_(at<uint32_t>(rows.rows, table_ ? 0 : batch, head)),
        scales_(at<T>(rows.scales, table_ ? 0 : batch, head)),
        biases_(at<T>(rows.biases, table_ ? 0 : batch, head)),
        values_(at<T>(rows.rows, table_ ? 0 : batch, head)) {}

  // Whether rows can be loaded in whole vectors as they lie.
  bool whole() const {
    return rows_.bits == 0 && columns_ % width == 0;
  }

  const T* row(size_t i) const {
    return values_ + place(rows_.rows, i);
  }
  int64_t stride() const {
    return rows_.rows.row;
  }
  // How many of n rows from one on lie `stride` from each other.
  size_t together(size_t i, size_t n) const {
    return table_ ? smaller(n, (((i >> table_->shift) + 1) << table_->shift) - i) : n;
  }

  // Brings a row into the caches; it may lie beyond the last. Of packed rows, the words.
  MITTENS_INLINE void prefetch(size_t i) const {
    if (table_ && ((i >> table_->shift) >= table_->count || !table_->has(i >> table_->shift))) {
      return;
    }
    const bool packed = rows_.bits != 0;
    const char* p =
        packed ? reinterpret_cast<const char*>(words_ + place(rows_.rows, i)) : reinterpret_cast<const char*>(row(i));
    const size_t bytes = packed ? columns_ * rows_.bits / 8 : columns_ * sizeof(T);
    for (size_t at = 0; at < bytes; at += 64) {
      __builtin_prefetch(p + at, 0, 2);
    }
  }

  // Widens rows to float32, in whole vectors, padded with zeros.
  void widen(size_t first, size_t n, float* out, size_t out_stride) const {
    for (size_t i = 0; i < n; ++i, out += out_stride) {
      if (rows_.bits == 0) {
        widen_row(row(first + i), out);
      } else if (rows_.bits == 8) {
        unpack_row<8>(first + i, out);
      } else {
        unpack_row<4>(first + i, out);
      }
    }
  }

 private:
  template <typename U>
  static const U* at(const AttentionView& view, size_t batch, size_t head) {
    return static_cast<const U*>(view.data) + static_cast<int64_t>(batch) * view.batch +
           static_cast<int64_t>(head) * view.head;
  }

  // Where a row is from the first on.
  MITTENS_INLINE int64_t place(const AttentionView& view, size_t i) const {
    if (!table_) {
      return static_cast<int64_t>(i) * view.row;
    }
    const size_t within = i & ((size_t(1) << table_->shift) - 1);
    return table_->entries[i >> table_->shift] * view.batch + static_cast<int64_t>(within) * view.row;
  }

  void widen_row(const T* row, float* out) const {
    each_vector(columns_, [&](size_t i, auto part) MITTENS_INLINED { write(out + i, load_one(row + i, part), All()); });
  }

  template <int bits>
  void unpack_row(size_t i, float* out) const {
    const uint32_t* words = words_ + place(rows_.rows, i);
    const T* scales = scales_ + place(rows_.scales, i);
    const T* biases = biases_ + place(rows_.biases, i);
    const size_t group = rows_.group_size;
    for (size_t g = 0; g * group < columns_; ++g) {
      const Float scale = spread(value(scales[g]));
      const Float bias = spread(value(biases[g]));
      for (size_t c = g * group; c < (g + 1) * group; c += 32) {
        unrolled<32 / width>([&](size_t i) MITTENS_INLINED {
          const size_t at = c + i * width;
          write(out + at, fma(integers<bits>(words, at), scale, bias), All());
        });
      }
    }
  }

  // Columns c and on.
  template <int bits>
  static MITTENS_INLINE Float integers(const uint32_t* words, size_t c) {
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(words) + c * bits / 8;
    if constexpr (bits == 8) {
      return __builtin_convertvector(widen_bytes(read<Bytes>(bytes, All())), Float);
    } else {
      return __builtin_convertvector(widen_nibbles(bytes), Float);
    }
  }

  static MITTENS_INLINE float value(T x) {
    if constexpr (__is_same(T, float)) {
      return x;
    } else if constexpr (__is_same(T, bfloat16)) {
      return __builtin_bit_cast(float, uint32_t(x.bits) << 16);
    } else {
#if defined(__AVX2__)
      return _cvtsh_ss(x.bits);
#else
      return MITTENS_ISA::widen(Half{x.bits})[0];
#endif
    }
  }

  const AttentionRows& rows_;
  const BlockTable* table_;  // or null; of the row of the batch
  size_t columns_;
  const uint32_t* words_;
  const T* scales_;
  const T* biases_;
  const T* values_;
};

template <typename T>
class Head {
 public:
  Head(const Attention& call, size_t index)
      : call(call),
        batch_(index / call.key_heads),
        head_(index % call.key_heads),
        ratio_(call.heads / call.key_heads),
        rows(ratio_ * call.queries),
        keys(call.k, call.table, batch_, head_, call.width),
        values(call.v, call.table, batch_, head_, call.value_width) {}

  const Attention& call;

 private:
  size_t batch_;
  size_t head_;
  size_t ratio_;

 public:
  size_t rows;
  HeadRows<T> keys;
  HeadRows<T> values;

  const T* query(size_t row) const {
    return static_cast<const T*>(call.q.data) + offset(call.q, row);
  }

  // Of a row among all rows of the call, [batch, heads, queries].
  size_t index(size_t row) const {
    return (batch_ * call.heads + head(row)) * call.queries + token(row);
  }

  T* output(size_t row) const {
    return static_cast<T*>(call.y) + index(row) * call.value_width;
  }

  Range range(size_t row) const {
    if (!call.causal && call.window == 0) {
      return {0, call.keys};
    }
    const int64_t keys = static_cast<int64_t>(call.keys);
    const int64_t end = static_cast<int64_t>(token(row)) + 1 + keys - static_cast<int64_t>(call.queries);
    const int64_t begin = call.window ? end - call.window : 0;
    return {clamped(begin, keys), clamped(end, keys)};
  }

  // The first key that one of the rows sees, and the one after the last.
  Range range(size_t first, size_t n) const {
    return {range(first).begin, range(first + n - 1).end};
  }

  bool has_sinks() const {
    return call.sinks != nullptr;
  }
  float sink(size_t row) const {
    return load_one(static_cast<const T*>(call.sinks) + head(row), Some{1})[0];
  }

  // The mask of n keys from the first on, as terms of their scores: 0 or -infinity for a bool mask.
  MITTENS_INLINE Float mask(size_t row, size_t first, size_t n) const {
    const int64_t at = offset(call.mask.values, row) + static_cast<int64_t>(first) * call.mask.column;
    if (call.mask.kind == MaskKind::additive) {
      return strided<T>(static_cast<const T*>(call.mask.values.data) + at, n);
    }
    const uint8_t* p = static_cast<const uint8_t*>(call.mask.values.data) + at;
    Bytes bytes = {};
    if (call.mask.column == 1) {
      __builtin_memcpy(&bytes, p, n < width ? n : width);
    } else {
      for (size_t i = 0; i < n && i < width; ++i) {
        bytes[i] = p[static_cast<int64_t>(i) * call.mask.column];
      }
    }
    return widen_bytes(bytes) == 0 ? Float{} - infinity : Float{};
  }

  // A score with the result of mask().
  MITTENS_INLINE Float masked(Float score, Float mask) const {
    if (call.mask.kind == MaskKind::additive) {
      return mask == -infinity ? mask : score + mask;  // a hidden score may be NaN
    }
    return mask < 0.0f ? mask : score;
  }

  // Writes a row's result from its state: the largest score, the sum of exponentials relative to it, and the sum of
  // values so weighted, in whole vectors.
  void finish(size_t row, float max, float sum, float* values) const {
    if (call.logsumexp) {
      call.logsumexp[index(row)] = logsumexp(row, max, sum);
    }
    if (max == -infinity && sum == 0.0f && !sees_key(row)) {
      return write_zeros(row);
    }
    float factor = 1.0f / sum;
    if (has_sinks()) {
      const float sink = this->sink(row);
      const float top = sink > max ? sink : max;
      const float part = exp(max - top);
      factor = part / (sum * part + exp(sink - top));
    }
    const bool is_nan = sum != sum;  // all of the row is, whatever its values
    if (!is_nan && !all_finite(values)) {
      average_anew(row, max, factor, values);
      factor = 1.0f;
    }
    T* y = output(row);
    for (size_t i = 0; i < call.value_width; i += width) {
      store_one(y + i, read<Float>(values + i, All()) * factor, call.value_width - i);
    }
  }

 private:
  float logsumexp(size_t row, float max, float sum) const {
    const float sink = has_sinks() ? this->sink(row) : -infinity;
    const float top = sink > max ? sink : max;
    return top == -infinity ? top : top + __builtin_logf(sum * exp(max - top) + exp(sink - top));
  }

  bool all_finite(const float* sums) const {
    Float zeros = {};
    for (size_t i = 0; i < call.value_width; i += width) {
      zeros = fma(read<Float>(sums + i, All()), Float{}, zeros);
    }
    return sum_of(zeros) == 0.0f;
  }

  // Multiplies sums with a row's factor. Sums that are not finite are made anew, of the keys alone that the row sees
  // and with weights of sum one, until all of them are NaN: blocks of keys multiply all values with the weights of all
  // rows, and 0 times NaN or infinity is NaN; and sums of values near the largest float overflow where their average
  // does not.
  void average_anew(size_t row, float max, float factor, float* sums) const {
    const size_t columns = padded_width(call.width);
    const size_t value_columns = padded_width(call.value_width);
    const Scratch scratch(2 * columns + 2 * value_columns);
    float* const query = scratch.data();
    float* const key_row = query + columns;
    float* const value_row = key_row + columns;
    float* const anew = value_row + value_columns;
    each_vector(call.width, [&](size_t i, auto part) MITTENS_INLINED {
      write(query + i, load_one(this->query(row) + i, part) * call.scale, All());
    });
    for (size_t i = 0; i < value_columns; i += width) {
      write(anew + i, Float{}, All());
    }
    const float shift = max == -infinity ? 0.0f : max;
    const Range seen = range(row);
    bool left = true;
    for (size_t key = seen.begin; key < seen.end && left; ++key) {
      const Float hides = call.mask.kind == MaskKind::none ? Float{} : mask(row, key, 1);
      if (hides[0] == -infinity) {
        continue;
      }
      keys.widen(key, 1, key_row, 0);
      Float products = {};
      for (size_t i = 0; i < columns; i += width) {
        products = fma(read<Float>(query + i, All()), read<Float>(key_row + i, All()), products);
      }
      const Float weight = spread(exp_one<T>(masked(spread(sum_of(products)), hides) - shift)[0] * factor);
      values.widen(key, 1, value_row, 0);
      Float open = {};
      for (size_t i = 0; i < value_columns; i += width) {
        const Float before = read<Float>(sums + i, All());
        const Float sum = fma(weight, read<Float>(value_row + i, All()), read<Float>(anew + i, All()));
        write(anew + i, sum, All());
        open += (before - before == 0.0f) | (sum != sum) ? Float{} : Float{} + 1.0f;
      }
      left = sum_of(open) != 0.0f;
    }
    for (size_t i = 0; i < value_columns; i += width) {
      const Float before = read<Float>(sums + i, All());
      write(sums + i, before - before == 0.0f ? before * factor : read<Float>(anew + i, All()), All());
    }
  }

  size_t token(size_t row) const {
    return row / ratio_;
  }
  size_t head(size_t row) const {
    return head_ * ratio_ + row % ratio_;
  }

  int64_t offset(const AttentionView& view, size_t row) const {
    return static_cast<int64_t>(batch_) * view.batch + static_cast<int64_t>(head(row)) * view.head +
           static_cast<int64_t>(token(row)) * view.row;
  }

  static size_t clamped(int64_t key, int64_t keys) {
    return static_cast<size_t>(key < 0 ? 0 : key > keys ? keys : key);
  }

  template <typename U>
  MITTENS_INLINE Float strided(const U* p, size_t n) const {
    if (call.mask.column == 1) {
      return n < width ? load_one(p, Some{n}) : load_one(p);
    }
    U few[width] = {};
    for (size_t i = 0; i < n && i < width; ++i) {
      few[i] = p[static_cast<int64_t>(i) * call.mask.column];
    }
    return load_one(few);
  }

  bool sees_key(size_t row) const {
    const Range seen = range(row);
    if (call.mask.kind == MaskKind::none) {
      return seen.begin < seen.end;
    }
    for (size_t key = seen.begin; key < seen.end; ++key) {
      if (mask(row, key, 1)[0] != -infinity) {
        return true;
      }
    }
    return false;
  }

  void write_zeros(size_t row) const {
    T* y = output(row);
    for (size_t i = 0; i < call.value_width; i += width) {
      store_one(y + i, Float{}, call.value_width - i);
    }
  }
};

}  // namespace mittens::cpu::MITTENS_ISA
