#include "cpu/integer_matmul.h"

#include "cpu/isa/matmul/integer_products.h"

namespace mittens::cpu::MITTENS_ISA {

namespace {

struct Call {
  const Activation* activation;
  const QuantizedWeights* w;
  const QuantizedWeights* up;
  size_t columns;
  size_t outputs;
};

// Of `count` matrices and as many blocks of `rows` rows of x and y.
template <typename Source, typename T>
void multiply(const Call& call, Type type, const QuantizedWeights* w, const QuantizedWeights* up, const T* x,
              const T* bias, T* y, size_t count, size_t rows, bool* taken) {
  using X = ArrangedIntegers<Source>;
  const size_t columns = call.columns, outputs = call.outputs, x_stride = X::size(columns);
  const Scratch arranged(count * rows * x_stride);
  parallel_for(count * rows, ceil_divide(16384, columns), [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      taken[i] = X::fill(x + i * columns, columns, arranged.data() + i * x_stride);
    }
  });
  const size_t sources = call.activation ? 2 : 1;
  const Source example(*w, type);
  const size_t row_bytes = sources * example.bytes(columns);
  const size_t block = outputs_of_piece(row_bytes, count, outputs);
  const size_t blocks = ceil_divide(outputs, block);
  const bool serial = count * outputs * row_bytes * rows <= serial_bytes;
  parallel_for(count * blocks, serial ? count * blocks : 1, [&](size_t begin, size_t end) {
    const size_t needed = IntegerProducts<Source>::memory(example, columns);
    const Scratch memory(sources * rows * block + needed);
    float* sums = memory.data() + needed;
    for (size_t i = begin; i < end; ++i) {
      const size_t matrix = i / blocks, n = i % blocks * block, size = smaller(block, outputs - n);
      for (size_t j = 0; j < sources; ++j) {
        const Source source((j == 0 ? w : up)[matrix], type);
        IntegerProducts<Source>(source, columns)
            .direct(arranged.data() + matrix * rows * x_stride, rows, n, size, sums + j * rows * block, block,
                    memory.data());
      }
      for (size_t m = 0; m < rows; ++m) {
        const size_t row = matrix * rows + m;
        const float* of_row = sums + m * block;
        T* to = y + row * outputs + n;
        if (!taken[row]) {
          continue;
        }
        if (call.activation) {
          gate_row(to, of_row, of_row + rows * block, *call.activation, size);
        } else {
          round_row(to, of_row, bias ? bias + n : nullptr, size);
        }
      }
    }
  });
}

template <typename T, int bits>
void in_batches(const Call& call, Type type, const void* x, const void* bias, void* y, size_t matrices, size_t rows,
                bool* taken) {
  const size_t together = larger(batch_rows / rows, 1);
  for (size_t first = 0; first < matrices; first += together) {
    const size_t row = first * rows;
    multiply<Affine<bits>>(call, type, call.w + first, call.up + (call.activation ? first : 0),
                           static_cast<const T*>(x) + row * call.columns, static_cast<const T*>(bias),
                           static_cast<T*>(y) + row * call.outputs, smaller(together, matrices - first), rows,
                           taken + row);
  }
}

}  // namespace

bool integer_matmul(Type type, const Activation* activation, const QuantizedWeights* w, const QuantizedWeights* up,
                    const void* x, const void* bias, void* y, size_t matrices, size_t rows, size_t columns,
                    size_t outputs, bool exact, bool* taken) {
  if (rows == 0 || most_integer_rows == 0 || rows > (exact ? most_exact_rows : most_integer_rows)) {
    return false;
  }
  const Call call{activation, w, up, columns, outputs};
  auto multiply_by = [&](auto bits) {
    if (type == Type::float16) {
      in_batches<float16, bits.value>(call, type, x, bias, y, matrices, rows, taken);
    } else {
      in_batches<bfloat16, bits.value>(call, type, x, bias, y, matrices, rows, taken);
    }
  };
  if (w->bits == 4) {
    multiply_by(Index<4>());
  } else {
    multiply_by(Index<8>());
  }
  return true;
}

}  // namespace mittens::cpu::MITTENS_ISA
