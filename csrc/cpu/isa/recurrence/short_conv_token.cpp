#include "cpu/isa/recurrence/convolution.h"
#include "cpu/recurrence/token_layers.h"

namespace mittens::cpu::MITTENS_ISA {

namespace {

constexpr size_t channels_of_task = 256;
constexpr size_t tasks_of_piece = 32;  // fewer are done sooner than another thread wakes up

template <typename T>
void channels_of(const ShortConvToken& shape, const T* projected, const TokenConvolution& all, size_t sequence,
                 size_t first, size_t n, T* y) {
  Convolution<T> convolution = convolution_of<T>(all, sequence, shape.channels, shape.taps);
  const Scratch memory(convolution.memory_of(n) + padded_width(n));
  float* sums = memory.data() + convolution.memory_of(n);
  const float* by_tap = weights_by_tap(convolution, first, n, memory.data());
  for (size_t token = sequence * shape.tokens; token < (sequence + 1) * shape.tokens; ++token) {
    const T* b = projected + token * 3 * shape.channels + first;
    const T* c = b + shape.channels;
    const T* x = c + shape.channels;
    alignas(64) T products[channels_of_task];
    each_vector(n, [&](size_t i, auto part) MITTENS_INLINED {
      store_in_order(products + i, load_in_order(b + i, part) * load_in_order(x + i, part), part);
    });
    convolve(convolution, first, products, n, true, by_tap, sums, [](Float sum) MITTENS_INLINED { return sum; });
    T* out = y + token * shape.channels + first;
    each_vector(n, [&](size_t i, auto part) MITTENS_INLINED {
      store_in_order(out + i, load_in_order(c + i, part) * read<Float>(sums + i, All()), part);
    });
    convolution.before = convolution.after;
  }
}

}  // namespace

void short_conv_token(Type type, const ShortConvToken& shape, const void* projected,
                      const TokenConvolution& convolution, void* y) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    const size_t tasks = ceil_divide(shape.channels, channels_of_task);
    parallel_for(shape.batch * tasks, ceil_divide(tasks_of_piece, shape.tokens), [&](size_t begin, size_t end) {
      for (size_t i = begin; i < end; ++i) {
        const size_t first = i % tasks * channels_of_task;
        channels_of(shape, (const T*)projected, convolution, i / tasks, first,
                    smaller(channels_of_task, shape.channels - first), (T*)y);
      }
    });
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
