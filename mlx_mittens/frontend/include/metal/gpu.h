// Operations between the lanes of a simdgroup that a GPU target builds from its own shuffles, which come first.
#pragma once

namespace mittens {

// All lanes in the order of a butterfly.
template <typename F, typename T>
MITTENS_INLINE T reduce_by_exchanges(Scope scope, T value) {
  for (unsigned step = scope == quad_scope ? 2 : 16; step > 0; step /= 2) {
    value = F::apply(value, shuffle_xor(value, step));
  }
  return value;
}

template <typename F, typename T>
MITTENS_INLINE T prefix_by_shuffles(Scope scope, T value, T first, bool inclusive) {
  const unsigned width = scope == quad_scope ? 4 : 32;
  const unsigned at = lane() % width;
  T sum = value;
  for (unsigned step = 1; step < width; step *= 2) {
    const T below = shuffle(simdgroup_scope, "", Site{}, sum, (lane() - step) % 32);
    sum = at >= step ? F::apply(below, sum) : sum;
  }
  if (inclusive) {
    return sum;
  }
  const T before = shuffle(simdgroup_scope, "", Site{}, sum, (lane() - 1) % 32);
  return at == 0 ? first : before;
}

template <typename T>
MITTENS_INLINE T broadcast_first(Scope scope, const char* name, Site site, T value) {
  return shuffle(scope, name, site, value, 0);
}

// Extracts the scope's bits from the lanes' bits, and moves them to bit 0.
MITTENS_INLINE unsigned bits_of_scope(Scope scope, unsigned mask) {
  return scope == quad_scope ? mask >> (lane() & ~3u) & 15 : mask;
}

}  // namespace mittens
