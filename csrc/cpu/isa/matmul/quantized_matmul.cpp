#include "cpu/quantized_matmul.h"

#include "cpu/isa/matmul/column_products.h"
#include "cpu/isa/matmul/unpacked.h"

namespace mittens::cpu::MITTENS_ISA {

namespace {

template <typename T, int bits>
Unpack unpack_of_group(int group_size) {
  return group_size == 32   ? &unpack_affine<T, bits, 32>
         : group_size == 64 ? &unpack_affine<T, bits, 64>
                            : &unpack_affine<T, bits, 128>;
}

template <typename T>
Unpack unpack_of(const QuantizedWeights& w) {
  return w.bits == 2   ? unpack_of_group<T, 2>(w.group_size)
         : w.bits == 3 ? unpack_of_group<T, 3>(w.group_size)
         : w.bits == 5 ? unpack_of_group<T, 5>(w.group_size)
                       : unpack_of_group<T, 6>(w.group_size);
}

// The matrix as a source of one of the types below.
template <typename Source, typename T>
Source source_from(const QuantizedWeights& w, Type type) {
  if constexpr (!__is_same(Source, Unpacked)) {
    return Source(w, type);
  } else {
    const size_t item = sizeof(T);
    Unpacked source{};
    source.unpack = unpack_of<T>(w);
    source.rows = reinterpret_cast<const uint8_t*>(w.words);
    source.scales = static_cast<const char*>(w.scales);
    source.biases = static_cast<const char*>(w.biases);
    source.row_stride = w.words_stride * sizeof(uint32_t);
    source.scales_stride = w.scales_stride * item;
    source.biases_stride = w.biases_stride * item;
    source.row_bytes = w.bits / 8.0 + static_cast<double>(2 * item) / w.group_size;
    return source;
  }
}

template <typename S>
struct SourceType {
  using type = S;
};

// Calls f with a value of the element type and the type of the source.
template <typename F>
void with_format(Type type, const QuantizedWeights& w, const F& f) {
  with_type(type, [&](auto t) {
    if (w.mode == QuantizedMode::affine && w.bits == 4) {
      f(t, SourceType<Affine<4>>());
    } else if (w.mode == QuantizedMode::affine && w.bits == 8) {
      f(t, SourceType<Affine<8>>());
    } else if (w.mode == QuantizedMode::affine) {
      f(t, SourceType<Unpacked>());
    } else if (w.bits == 4) {
      f(t, SourceType<SmallFloats<4>>());
    } else {
      f(t, SourceType<SmallFloats<8>>());
    }
  });
}

}  // namespace

void quantized_matmul(Type type, const QuantizedWeights* w, const void* x, const void* bias, void* y, size_t matrices,
                      size_t rows, size_t columns, size_t outputs, ProductMode mode) {
  with_format(type, *w, [&](auto t, auto source) {
    using T = decltype(t);
    using Source = typename decltype(source)::type;
    auto finish = [&](size_t row, size_t n, size_t size, const float* sums, const float* = nullptr) {
      round_row((T*)y + row * outputs + n, sums, bias ? (const T*)bias + n : nullptr, size);
    };
    auto source_of = [&](size_t i, int = 0) { return source_from<Source, T>(w[i], type); };
    if (w->transpose) {
      row_products<Source, 1>(source_of, (const T*)x, matrices, rows, columns, outputs, finish, mode.exact);
    } else {
      column_products<Source>(source_of, (const T*)x, matrices, rows, columns, outputs, finish);
    }
  });
}

void quantized_swiglu(Type type, Activation activation, const QuantizedWeights* gate, const QuantizedWeights* up,
                      const void* x, void* y, size_t matrices, size_t rows, size_t columns, size_t outputs,
                      ProductMode mode) {
  with_format(type, *gate, [&](auto t, auto source) {
    using T = decltype(t);
    using Source = typename decltype(source)::type;
    auto finish = [&](size_t row, size_t n, size_t size, const float* gates, const float* ups) {
      gate_row((T*)y + row * outputs + n, gates, ups, activation, size);
    };
    auto source_of = [&](size_t i, int j) { return source_from<Source, T>((j == 0 ? gate : up)[i], type); };
    row_products<Source, 2>(source_of, (const T*)x, matrices, rows, columns, outputs, finish, mode.exact);
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
