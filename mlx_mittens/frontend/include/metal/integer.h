// Integer functions.
#pragma once

namespace metal {

template <typename T>
MITTENS_INLINE T popcount(T x) {
  return mittens::map<T>([](auto x) { return decltype(x)(__builtin_popcountg(make_unsigned_t<decltype(x)>(x))); }, x);
}
template <typename T>
MITTENS_INLINE T clz(T x) {
  return mittens::map<T>(
      [](auto x) { return decltype(x)(__builtin_clzg(make_unsigned_t<decltype(x)>(x), int(sizeof(x) * 8))); }, x);
}
template <typename T>
MITTENS_INLINE T ctz(T x) {
  return mittens::map<T>(
      [](auto x) { return decltype(x)(__builtin_ctzg(make_unsigned_t<decltype(x)>(x), int(sizeof(x) * 8))); }, x);
}
template <typename T>
MITTENS_INLINE T reverse_bits(T x) {
  return mittens::map<T>(
      [](auto x) {
        using U = make_unsigned_t<decltype(x)>;
        U from = U(x), to = 0;
        for (unsigned i = 0; i < sizeof(x) * 8; ++i) {
          to = U(to << 1 | (from & 1));
          from = U(from >> 1);
        }
        return decltype(x)(to);
      },
      x);
}
template <typename T>
MITTENS_INLINE T rotate(T x, T by) {
  return mittens::map<T>(
      [](auto x, auto by) {
        using U = make_unsigned_t<decltype(x)>;
        constexpr unsigned bits = sizeof(x) * 8;
        const unsigned n = unsigned(by) % bits;
        return decltype(x)(n ? U(U(x) << n | U(x) >> (bits - n)) : U(x));
      },
      x, by);
}
template <typename T>
MITTENS_INLINE T mulhi(T x, T y) {
  return mittens::map<T>(
      [](auto x, auto y) {
        if constexpr (sizeof(x) == 8) {
#ifdef __SPIRV__
          return ::mul_hi(x, y);
#else
          using Wide = conditional_t<is_signed_v<decltype(x)>, __int128, unsigned __int128>;
          return decltype(x)(Wide(x) * Wide(y) >> 64);
#endif
        } else {
          return decltype(x)(long(x) * long(y) >> (sizeof(x) * 8));
        }
      },
      x, y);
}
// Where the result does not fit, the nearest number that does.
template <typename T>
MITTENS_INLINE T addsat(T x, T y) {
  return mittens::map<T>(
      [](auto x, auto y) {
        using E = decltype(x);
        E sum;
        const bool over = __builtin_add_overflow(x, y, &sum);
        return over ? (y < 0 ? numeric_limits<E>::min() : numeric_limits<E>::max()) : sum;
      },
      x, y);
}
template <typename T>
MITTENS_INLINE T subsat(T x, T y) {
  return mittens::map<T>(
      [](auto x, auto y) {
        using E = decltype(x);
        E difference;
        const bool over = __builtin_sub_overflow(x, y, &difference);
        const bool below = is_signed_v<E> ? y > 0 : true;
        return over ? (below ? numeric_limits<E>::min() : numeric_limits<E>::max()) : difference;
      },
      x, y);
}
// Half of a sum that does not overflow, rounded down and up.
template <typename T>
MITTENS_INLINE T hadd(T x, T y) {
  return mittens::map<T>([](auto x, auto y) { return decltype(x)((x & y) + ((x ^ y) >> 1)); }, x, y);
}
template <typename T>
MITTENS_INLINE T rhadd(T x, T y) {
  return mittens::map<T>([](auto x, auto y) { return decltype(x)((x | y) - ((x ^ y) >> 1)); }, x, y);
}
template <typename T>
MITTENS_INLINE T madhi(T x, T y, T z) {
  return mulhi(x, y) + z;
}
template <typename T>
MITTENS_INLINE T madsat(T x, T y, T z) {
  return mittens::map<T>(
      [](auto x, auto y, auto z) {
        using E = decltype(x);
        const auto bounded = [&](auto sum) {
          const decltype(sum) least = numeric_limits<E>::min(), most = numeric_limits<E>::max();
          return E(sum < least ? least : sum > most ? most : sum);
        };
        if constexpr (sizeof(E) == 8) {
#ifdef __SPIRV__
          return ::mad_sat(x, y, z);
#else
          using Wide = conditional_t<is_signed_v<E>, __int128, unsigned __int128>;
          return bounded(Wide(x) * Wide(y) + Wide(z));
#endif
        } else {
          using Wide = conditional_t<is_signed_v<E>, long, ulong>;
          return bounded(Wide(x) * Wide(y) + Wide(z));
        }
      },
      x, y, z);
}
template <typename T>
MITTENS_INLINE T mad24(T x, T y, T z) {
  return x * y + z;
}
template <typename T>
MITTENS_INLINE T mul24(T x, T y) {
  return x * y;
}
// The unsigned integers that belong to an integer or a vector of them.
template <typename T>
MITTENS_INLINE constexpr auto unsigned_of() {
  using U = make_unsigned_t<mittens::Element<T>>;
  if constexpr (mittens::Vector<T>::is_vector) {
    return vec<U, mittens::Vector<T>::size>{};
  } else {
    return U{};
  }
}
template <typename T, typename U = decltype(unsigned_of<T>())>
MITTENS_INLINE U absdiff(T x, T y) {
  return mittens::map<U>(
      [](auto x, auto y) {
        using E = make_unsigned_t<decltype(x)>;
        return x < y ? E(E(y) - E(x)) : E(E(x) - E(y));
      },
      x, y);
}
template <typename T>
MITTENS_INLINE T extract_bits(T x, uint offset, uint bits) {
  if (bits == 0) {
    return T(0);
  }
  using E = mittens::Element<T>;
  const uint rest = sizeof(E) * 8 - bits;
  return T(T(x << E(rest - offset)) >> E(rest));
}
template <typename T>
MITTENS_INLINE T insert_bits(T base, T insert, uint offset, uint bits) {
  using E = mittens::Element<T>;
  const T mask = T(E((bits == sizeof(E) * 8 ? E(~E(0)) : E((E(1) << bits) - 1)) << offset));
  return T((base & ~mask) | (T(insert << E(offset)) & mask));
}

}  // namespace metal
