#include "cpu/moe/gather.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/matmul/gemv.h"
#include "cpu/parallel.h"

namespace mittens::cpu {

namespace {

constexpr size_t copied_bytes = 64 << 10;  // by one thread at a time

void fill_nan(Type type, void* y, size_t count) {
  if (type == Type::float32) {
    std::fill_n(static_cast<uint32_t*>(y), count, 0x7fc00000u);
  } else {
    std::fill_n(static_cast<uint16_t*>(y), count, static_cast<uint16_t>(type == Type::float16 ? 0x7e00 : 0x7fc0));
  }
}

// The pairs of each chosen matrix; a pair with an index out of range has none.
class Groups {
 public:
  explicit Groups(const Gather& gather) : gather_(gather), first_(gather.stack + 1, 0) {
    for (size_t p = 0; p < gather.pairs; ++p) {
      if (is_valid(p)) {
        ++first_[gather.matrices[p] + 1];
      }
    }
    for (size_t i = 0; i < gather.stack; ++i) {
      if (first_[i + 1] > 0) {
        chosen_.push_back(static_cast<uint32_t>(i));
      }
      first_[i + 1] += first_[i];
    }
    pairs_.resize(first_.back());
    std::vector<size_t> next(first_.begin(), first_.end() - 1);
    for (size_t p = 0; p < gather.pairs; ++p) {
      if (is_valid(p)) {
        pairs_[next[gather.matrices[p]]++] = p;
      }
    }
    std::stable_sort(chosen_.begin(), chosen_.end(), [&](uint32_t a, uint32_t b) { return size(a) < size(b); });
  }

  bool is_valid(size_t p) const {
    return gather_.matrices[p] < gather_.stack && input_of(p) < gather_.input_count;
  }

  size_t input_of(size_t p) const {
    return gather_.inputs ? gather_.inputs[p] : p / gather_.pairs_per_input;
  }

  size_t size(uint32_t matrix) const {
    return first_[matrix + 1] - first_[matrix];
  }

  const std::vector<uint32_t>& chosen() const {
    return chosen_;
  }

  // Calls f(matrices, count, pairs of each) for the chosen matrices of each number of pairs.
  template <typename F>
  void each_size(const F& f) const {
    for (size_t begin = 0, end; begin < chosen_.size(); begin = end) {
      end = begin + 1;
      while (end < chosen_.size() && size(chosen_[end]) == size(chosen_[begin])) {
        ++end;
      }
      f(chosen_.data() + begin, end - begin, size(chosen_[begin]));
    }
  }

  const size_t* pairs_of(uint32_t matrix) const {
    return pairs_.data() + first_[matrix];
  }

 private:
  const Gather& gather_;
  std::vector<size_t> first_;  // of each matrix, in pairs_
  std::vector<size_t> pairs_;
  std::vector<uint32_t> chosen_;  // by the number of their pairs
};

// Calls product(matrices, count, x, y, rows) for chosen matrices with the same number of rows, which lie one after
// another in x and y.
template <typename Product>
void gather_products(Type type, const Gather& gather, const void* x, void* y, const Product& product) {
  const size_t item = type == Type::float32 ? 4 : 2;
  const size_t x_bytes = gather.rows * gather.columns * item, y_bytes = gather.rows * gather.outputs * item;
  const char* from = static_cast<const char*>(x);
  char* to = static_cast<char*>(y);
  const Groups groups(gather);
  for (size_t p = 0; p < gather.pairs; ++p) {
    if (!groups.is_valid(p)) {
      fill_nan(type, to + p * y_bytes, gather.rows * gather.outputs);
    }
  }
  groups.each_size([&](const uint32_t* matrices, size_t count, size_t pairs) {
    auto pair = [&](size_t i) { return groups.pairs_of(matrices[i / pairs])[i % pairs]; };
    const Scratch xs((count * pairs * x_bytes + 3) / 4), ys((count * pairs * y_bytes + 3) / 4);
    char* x_packed = reinterpret_cast<char*>(xs.data());
    char* y_packed = reinterpret_cast<char*>(ys.data());
    parallel_for(count * pairs, copied_bytes / (x_bytes + 1) + 1, [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        std::memcpy(x_packed + i * x_bytes, from + groups.input_of(pair(i)) * x_bytes, x_bytes);
      }
    });
    product(matrices, count, x_packed, y_packed, pairs * gather.rows);
    parallel_for(count * pairs, copied_bytes / (y_bytes + 1) + 1, [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        std::memcpy(to + pair(i) * y_bytes, y_packed + i * y_bytes, y_bytes);
      }
    });
  });
}

template <typename T>
std::vector<T> chosen_of(const T* stack, const uint32_t* matrices, size_t count) {
  std::vector<T> chosen;
  chosen.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    chosen.push_back(stack[matrices[i]]);
  }
  return chosen;
}

// to [columns, rows] = from [rows, columns], by tiles that stay in the first cache.
template <typename T>
void transpose(const T* from, T* to, size_t rows, size_t columns) {
  constexpr size_t tile = 32;
  for (size_t row = 0; row < rows; row += tile) {
    for (size_t column = 0; column < columns; column += tile) {
      for (size_t j = column; j < std::min(column + tile, columns); ++j) {
        for (size_t i = row; i < std::min(row + tile, rows); ++i) {
          to[j * rows + i] = from[i * columns + j];
        }
      }
    }
  }
}

// dw [outputs, columns] of one matrix: dy^T x over the rows of its pairs, which are copied to lie one after another.
template <typename T>
void sum_of_pairs(Type type, const Gather& gather, const Groups& groups, uint32_t matrix, const T* x, const T* dy,
                  T* dw) {
  const size_t columns = gather.columns, outputs = gather.outputs, pairs = groups.size(matrix);
  const size_t terms = pairs * gather.rows;
  auto memory = [](size_t count) { return Scratch((count * sizeof(T) + sizeof(float) - 1) / sizeof(float)); };
  auto data = [](const Scratch& scratch) { return reinterpret_cast<T*>(scratch.data()); };
  auto copied = [&](T* to, const T* from, size_t size, auto row_of) {
    for (size_t i = 0; i < pairs; ++i) {
      std::memcpy(to + i * size, from + row_of(groups.pairs_of(matrix)[i]) * size, size * sizeof(T));
    }
  };
  const Scratch x_rows = memory(terms * columns), dy_rows = memory(terms * outputs);
  copied(data(x_rows), x, gather.rows * columns, [&](size_t p) { return groups.input_of(p); });
  copied(data(dy_rows), dy, gather.rows * outputs, [](size_t p) { return p; });
  // The longer side lies along the vectors.
  const bool swaps = outputs > columns;
  const size_t along = swaps ? outputs : columns, across = swaps ? columns : outputs;
  const Scratch turned = memory(terms * across), product = memory(swaps ? columns * outputs : 0);
  transpose(data(swaps ? x_rows : dy_rows), data(turned), terms, across);
  const void* weights = (swaps ? dy_rows : x_rows).data();
  gemv(type, &weights, along, false, turned.data(), nullptr, swaps ? data(product) : dw, 1, across, terms, along,
       false);
  if (swaps) {
    transpose(data(product), dw, columns, outputs);
  }
}

}  // namespace

void gather_dense_vjp(Type type, const Gather& gather, const void* x, const void* dy, void* dw) {
  const size_t item = type == Type::float32 ? 4 : 2, size = gather.columns * gather.outputs;
  const Groups groups(gather);
  for (uint32_t matrix = 0; matrix < gather.stack; ++matrix) {
    if (groups.size(matrix) == 0) {
      std::memset(static_cast<char*>(dw) + matrix * size * item, 0, size * item);
    }
  }
  const std::vector<uint32_t>& chosen = groups.chosen();
  parallel_for(chosen.size(), 1, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const uint32_t matrix = chosen[chosen.size() - 1 - i];  // the largest first
      auto sum = [&](auto t) {
        using T = decltype(t);
        sum_of_pairs(type, gather, groups, matrix, static_cast<const T*>(x), static_cast<const T*>(dy),
                     static_cast<T*>(dw) + matrix * size);
      };
      type == Type::float32 ? sum(float()) : sum(uint16_t());
    }
  });
}

void gather_quantized(Type type, const QuantizedWeights* stack, const Gather& gather, const void* x, void* y,
                      ProductMode mode) {
  gather_products(type, gather, x, y, [&](const uint32_t* matrices, size_t count, void* x, void* y, size_t rows) {
    const auto chosen = chosen_of(stack, matrices, count);
    quantized_matmul(type, chosen.data(), x, nullptr, y, count, rows, gather.columns, gather.outputs, mode);
  });
}

void gather_dense(Type type, const void* const* stack, size_t weight_stride, bool transpose, const Gather& gather,
                  const void* x, void* y, bool exact) {
  gather_products(type, gather, x, y, [&](const uint32_t* matrices, size_t count, void* x, void* y, size_t rows) {
    const auto chosen = chosen_of(stack, matrices, count);
    gemv(type, chosen.data(), weight_stride, transpose, x, nullptr, y, count, rows, gather.columns, gather.outputs,
         exact);
  });
}

void gather_swiglu(Type type, Activation activation, const QuantizedWeights* gate, const QuantizedWeights* up,
                   const Gather& gather, const void* x, void* y, ProductMode mode) {
  gather_products(type, gather, x, y, [&](const uint32_t* matrices, size_t count, void* x, void* y, size_t rows) {
    const auto gates = chosen_of(gate, matrices, count), ups = chosen_of(up, matrices, count);
    quantized_swiglu(type, activation, gates.data(), ups.data(), x, y, count, rows, gather.columns, gather.outputs,
                     mode);
  });
}

}  // namespace mittens::cpu
