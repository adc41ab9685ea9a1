#include "cpu/norm/softcap.h"

#include "cpu/isa/row_op.h"

namespace mittens::cpu::MITTENS_ISA {

namespace {

// Within 2 ulp; NaN stays NaN.
MITTENS_INLINE Float tanh(Float x) {
  const Float magnitude = (Float)((UInt)x & 0x7fffffff);
  const UInt sign = (UInt)x & 0x80000000;
  // Near 0 a series, since the other form cancels there.
  const Float z = x * x;
  Float p = fma(z, 0x1.3a0660p-9f, -0x1.13b560p-7f);
  p = fma(p, z, Float{} + 0x1.64e3cap-6f);
  p = fma(p, z, Float{} - 0x1.ba0996p-5f);
  p = fma(p, z, Float{} + 0x1.1110dcp-3f);
  p = fma(p, z, Float{} - 0x1.555554p-2f);
  const Float near = fma(x * z, p, x);
  const Float far = 1.0f - 2.0f / (exp(magnitude + magnitude) + 1.0f);
  return magnitude < 0.55f ? near : (Float)((UInt)far | sign);
}

// 1 - tanh(x)^2, without cancellation where tanh is near 1.
MITTENS_INLINE Float slope_of_tanh(Float x) {
  const Float magnitude = (Float)((UInt)x & 0x7fffffff);
  const Float e = exp(-2.0f * magnitude);
  return 4.0f * e / ((1.0f + e) * (1.0f + e));
}

}  // namespace

void softcap(Type type, const void* x, void* y, size_t size, float cap) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    const bool through = passes_caches(size * sizeof(T), y, x);
    const size_t piece = size * sizeof(T) <= serial_bytes / 2 ? size : piece_bytes / (2 * sizeof(T));
    parallel_for(size, piece, [&](size_t begin, size_t end) {
      const T* const from = (const T*)x + begin;
      T* const to = (T*)y + begin;
      const bool past = through && aligned(to);
      each_unit(end - begin, [=](size_t i, auto part, int) MITTENS_INLINED {
        const Floats v = load(from + i, part);
        store(to + i, Floats{tanh(v.a / cap) * cap, tanh(v.b / cap) * cap}, part, past);
      });
      publish();
    });
  });
}

void softcap_vjp(Type type, const void* x, const void* dy, void* dx, size_t size, float cap) {
  with_type(type, [&](auto t) {
    using T = decltype(t);
    const bool through = passes_caches(size * sizeof(T), dx, x, dy);
    const size_t piece = size * sizeof(T) <= serial_bytes / 3 ? size : piece_bytes / (3 * sizeof(T));
    parallel_for(size, piece, [&](size_t begin, size_t end) {
      const T* const from = (const T*)x + begin;
      const T* const by = (const T*)dy + begin;
      T* const to = (T*)dx + begin;
      const bool past = through && aligned(to);
      each_unit(end - begin, [=](size_t i, auto part, int) MITTENS_INLINED {
        const Floats v = load(from + i, part);
        const Floats d = load(by + i, part);
        store(to + i, Floats{d.a * slope_of_tanh(v.a / cap), d.b * slope_of_tanh(v.b / cap)}, part, past);
      });
      publish();
    });
  });
}

}  // namespace mittens::cpu::MITTENS_ISA
