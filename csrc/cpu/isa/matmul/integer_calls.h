// Calls of products with integer multiplications, by what multiplies a block of outputs:
//   Products(source, columns)
//   X                        a row of x as integers: size(source, columns), fill(source, x, columns, y)
//   memory(source, columns)  floats that products() needs
//   block(row_bytes, count, outputs)   outputs of a block, of `count` matrices
//   products(x, rows, n, size, sums, stride, memory)   the sums of outputs [n, n + size)
//   most_refused             integers take no row of a batch where they cannot stand for more than one of this number
#pragma once

#include "cpu/integer_matmul.h"
#include "cpu/isa/matmul/products.h"

namespace mittens::cpu::MITTENS_ISA {

struct IntegerCall {
  Type type;
  const Activation* activation;
  const QuantizedWeights* w;
  const QuantizedWeights* up;
  const void* x;
  const void* bias;
  void* y;
  size_t rows;  // of each matrix
  size_t columns;
  size_t outputs;
  bool* taken;
};

// Element i of an array of a call's type.
template <typename Pointer>
MITTENS_INLINE Pointer element_of(Pointer p, Type type, size_t i) {
  return (Pointer)((uintptr_t)p + i * (type == Type::float32 ? 4 : 2));
}

// Whether integers stand for a row of x, which are written to y.
template <typename Source, typename X>
bool fill_row(const Source& source, Type type, const void* x, size_t columns, float* y) {
  bool stands = false;
  with_type(type, [&](auto t) { stands = X::fill(source, static_cast<const decltype(t)*>(x), columns, y); });
  return stands;
}

// `size` outputs of a row from output n on.
inline void finish_row(const IntegerCall& call, size_t row, size_t n, size_t size, const float* sums,
                       const float* ups) {
  with_type(call.type, [&](auto t) {
    using T = decltype(t);
    T* to = static_cast<T*>(call.y) + row * call.outputs + n;
    if (call.activation) {
      gate_row(to, sums, ups, *call.activation, size);
    } else {
      round_row(to, sums, call.bias ? static_cast<const T*>(call.bias) + n : nullptr, size);
    }
  });
}

// Of `count` matrices from one on, and the rows [first, first + size) of each.
template <typename Source, typename Products>
void multiply(const IntegerCall& call, size_t matrix, size_t count, size_t first, size_t size) {
  using X = typename Products::X;
  const size_t columns = call.columns, outputs = call.outputs;
  const Source example(call.w[matrix], call.type);
  const size_t x_stride = X::size(example, columns);
  const Scratch arranged(count * size * x_stride);
  auto row_of = [&](size_t i) MITTENS_INLINED { return (matrix + i / size) * call.rows + first + i % size; };
  parallel_for(count * size, ceil_divide(16384, columns), [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      call.taken[row_of(i)] =
          fill_row<Source, X>(example, call.type, element_of(call.x, call.type, row_of(i) * columns), columns,
                              arranged.data() + i * x_stride);
    }
  });
  size_t refused = 0;
  for (size_t i = 0; i < count * size; ++i) {
    refused += !call.taken[row_of(i)];
  }
  if (refused * Products::most_refused > count * size) {
    for (size_t i = 0; i < count * size; ++i) {
      call.taken[row_of(i)] = false;
    }
    return;
  }
  const size_t sources = call.activation ? 2 : 1;
  const size_t row_bytes = sources * example.bytes(columns);
  const size_t block = Products::block(row_bytes, count, outputs);
  const size_t blocks = ceil_divide(outputs, block);
  const bool serial = count * outputs * row_bytes * size <= serial_bytes;
  parallel_for(count * blocks, serial ? count * blocks : 1, [&](size_t begin, size_t end) {
    const size_t needed = Products::memory(example, columns);
    const Scratch memory(sources * size * block + needed);
    float* sums = memory.data() + needed;
    for (size_t i = begin; i < end; ++i) {
      const size_t part = i / blocks, n = i % blocks * block, width_of_part = smaller(block, outputs - n);
      for (size_t j = 0; j < sources; ++j) {
        const Source source((j == 0 ? call.w : call.up)[matrix + part], call.type);
        Products(source, columns)
            .products(arranged.data() + part * size * x_stride, size, n, width_of_part, sums + j * size * block, block,
                      memory.data());
      }
      for (size_t m = 0; m < size; ++m) {
        const size_t row = row_of(part * size + m);
        if (call.taken[row]) {
          finish_row(call, row, n, width_of_part, sums + m * block, sums + (size + m) * block);
        }
      }
    }
  });
}

template <typename Source, typename Products>
void multiply_in_batches(const IntegerCall& call, size_t matrices) {
  const size_t together = larger(batch_rows / call.rows, 1);
  for (size_t matrix = 0; matrix < matrices; matrix += together) {
    each_part(call.rows, batch_rows, [&](size_t first, size_t size) {
      multiply<Source, Products>(call, matrix, smaller(together, matrices - matrix), first, size);
    });
  }
}

}  // namespace mittens::cpu::MITTENS_ISA
