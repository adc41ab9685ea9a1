// Calls of products with integer multiplications, by a class that multiplies a block of outputs:
//   Products(source, columns)
//   X                        a row of x as integers: size(source, columns), fill(source, x, columns, y)
//   memory(source, columns)  floats that products() needs
//   block(row_bytes, count, outputs)   outputs of a block, of `count` matrices
//   products(x, rows, n, size, sums, stride, memory)   the sums of outputs [n, n + size)
//   most_refused             integers take no row of a batch where they cannot stand for more than one of this number
#pragma once

#include "cpu/matmul/integer_matmul.h"
#include "cpu/isa/matmul/products.h"
#include "cpu/matmul/packed_rows.h"

namespace mittens::cpu::MITTENS_ISA {

MITTENS_INLINE Integers integers_of(const QuantizedWeights& w) {
  switch (w.mode) {
    case QuantizedMode::affine:
      return w.bits == 4 || w.bits == 8 ? Integers::packed : Integers::unpacked;
    case QuantizedMode::mxfp4:
    case QuantizedMode::nvfp4:
      return Integers::small_floats;
    case QuantizedMode::blocks:
      return w.kind == BlockKind::q4_0 || w.kind == BlockKind::q8_0 ? Integers::unpacked_beside_floats
                                                                    : Integers::unpacked;
    case QuantizedMode::mxfp8:
      break;
  }
  __builtin_unreachable();
}

// Integers as bytes: affine ones of 8 bits as they lie, others unpacked when a row is begun.
struct ByteRows : Affine<8> {
  PackedRows from;

  ByteRows(const QuantizedWeights& w, Type type)
      : ByteRows(w, type, integers_of(w) == Integers::packed ? PackedRows{} : packed_rows(w, type)) {}

  size_t memory(size_t columns) const {
    return Affine<8>::memory(columns) + (from.unpack ? ceil_divide(columns, 4) : 0);
  }
  size_t bytes(size_t columns) const {
    return from.unpack ? static_cast<size_t>(static_cast<double>(columns) * from.row_bytes) : Affine<8>::bytes(columns);
  }
  Row row(size_t n, size_t begin, size_t size, float* memory) const {
    if (!from.unpack) {
      return Affine<8>::row(n, begin, size, memory);
    }
    const size_t known = size >> groups.group_bits, all = groups.floats(size);
    float* offsets = memory + all;
    float* bytes = offsets + all;
    from.unpack(from, n, begin, size, reinterpret_cast<uint8_t*>(bytes), memory, offsets);
    for (size_t i = known; i < all; ++i) {
      memory[i] = offsets[i] = 0;
    }
    return {reinterpret_cast<const uint32_t*>(bytes), memory, offsets};
  }

 private:
  ByteRows(QuantizedWeights w, Type type, const PackedRows& from)
      : Affine<8>((w.group_size = from.unpack ? 1 << from.group_bits : w.group_size, w), type), from(from) {}
};

struct IntegerCall : ProductCall {
  const QuantizedWeights* w;
  const QuantizedWeights* up;  // with an activation
  bool* taken;  // [matrices, rows]
};

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
      call.with_x<Source>(row_of(i), [&](const auto* x) {
        call.taken[row_of(i)] = X::fill(example, x, columns, arranged.data() + i * x_stride);
      });
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
          call.finish(row, n, width_of_part, sums + m * block, sums + (size + m) * block);
        }
      }
    }
  });
}

template <typename Source, typename Products>
void multiply_in_batches(const IntegerCall& call) {
  const size_t together = larger(batch_rows / call.rows, 1);
  for (size_t matrix = 0; matrix < call.matrices; matrix += together) {
    each_part(call.rows, batch_rows, [&](size_t first, size_t size) {
      multiply<Source, Products>(call, matrix, smaller(together, call.matrices - matrix), first, size);
    });
  }
}

}  // namespace mittens::cpu::MITTENS_ISA
