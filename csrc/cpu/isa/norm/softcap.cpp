#include "cpu/softcap.h"

#include "cpu/isa/rows.h"

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

}  // namespace mittens::cpu::MITTENS_ISA
