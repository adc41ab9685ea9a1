// Matrices of columns: floatCxR and halfCxR.
#pragma once

namespace metal {

template <typename T, int C, int R>
struct matrix {
  static_assert(C >= 2 && C <= 4 && R >= 2 && R <= 4, "a matrix has 2 to 4 columns and rows");
  static_assert(__is_floating_point(remove_cv_t<T>), "a matrix is of float or half: write an array of vectors");
  using Column = vec<T, R>;
  Column columns[C];

  matrix() = default;
  MITTENS_INLINE explicit constexpr matrix(T diagonal) : columns{} {
    for (int i = 0; i < (C < R ? C : R); ++i) {
      columns[i][i] = diagonal;
    }
  }
  template <typename... A, typename = enable_if_t<(sizeof...(A) > 1)>>
  MITTENS_INLINE constexpr matrix(A... parts) : columns{} {
    if constexpr (sizeof...(A) == C && (true && ... && mittens::Vector<A>::is_vector)) {
      int at = 0;
      ((columns[at++] = Column(parts)), ...);
    } else {
      static_assert(sizeof...(A) == C * R && (true && ... && !mittens::Vector<A>::is_vector),
                    "a matrix is made from its columns, from all its elements or from its diagonal");
      const T elements[] = {T(parts)...};
      for (int i = 0; i < C * R; ++i) {
        columns[i / R][i % R] = elements[i];
      }
    }
  }
  template <typename U>
  MITTENS_INLINE explicit matrix(const matrix<U, C, R>& other) {
    for (int i = 0; i < C; ++i) {
      columns[i] = mittens::construct<Column>(other.columns[i]);
    }
  }
  MITTENS_INLINE constexpr Column& operator[](int i) {
    return columns[i];
  }
  MITTENS_INLINE constexpr const Column& operator[](int i) const {
    return columns[i];
  }
};

#define MITTENS_MATRICES(type)          \
  using type##2x2 = matrix<type, 2, 2>; \
  using type##2x3 = matrix<type, 2, 3>; \
  using type##2x4 = matrix<type, 2, 4>; \
  using type##3x2 = matrix<type, 3, 2>; \
  using type##3x3 = matrix<type, 3, 3>; \
  using type##3x4 = matrix<type, 3, 4>; \
  using type##4x2 = matrix<type, 4, 2>; \
  using type##4x3 = matrix<type, 4, 3>; \
  using type##4x4 = matrix<type, 4, 4>;
MITTENS_MATRICES(float)
MITTENS_MATRICES(half)
#undef MITTENS_MATRICES

#define MITTENS_BY_COLUMNS(symbol)                                                                      \
  template <typename T, int C, int R>                                                                   \
  MITTENS_INLINE matrix<T, C, R> operator symbol(const matrix<T, C, R>& a, const matrix<T, C, R>& b) {  \
    matrix<T, C, R> result;                                                                             \
    for (int i = 0; i < C; ++i) {                                                                       \
      result[i] = a[i] symbol b[i];                                                                     \
    }                                                                                                   \
    return result;                                                                                      \
  }                                                                                                     \
  template <typename T, int C, int R>                                                                   \
  MITTENS_INLINE matrix<T, C, R>& operator symbol## = (matrix<T, C, R> & a, const matrix<T, C, R>& b) { \
    return a = a symbol b;                                                                              \
  }
MITTENS_BY_COLUMNS(+)
MITTENS_BY_COLUMNS(-)
#undef MITTENS_BY_COLUMNS
template <typename T, int C, int R>
MITTENS_INLINE matrix<T, C, R> operator-(const matrix<T, C, R>& a) {
  return matrix<T, C, R>() - a;
}
template <typename T, int C, int R>
MITTENS_INLINE matrix<T, C, R> operator*(const matrix<T, C, R>& a, remove_cv_t<T> b) {
  matrix<T, C, R> result;
  for (int i = 0; i < C; ++i) {
    result[i] = a[i] * b;
  }
  return result;
}
template <typename T, int C, int R>
MITTENS_INLINE matrix<T, C, R> operator*(remove_cv_t<T> a, const matrix<T, C, R>& b) {
  return b * a;
}
#ifdef MITTENS_DIALECT
// Metal scales a matrix by a number of its own type alone.
template <typename T, int C, int R, typename S, typename = enable_if_t<__is_arithmetic(S) && !__is_same(S, remove_cv_t<T>)>>
matrix<T, C, R> operator*(const matrix<T, C, R>&, S) = delete;
template <typename T, int C, int R, typename S, typename = enable_if_t<__is_arithmetic(S) && !__is_same(S, remove_cv_t<T>)>>
matrix<T, C, R> operator*(S, const matrix<T, C, R>&) = delete;
#endif
template <typename T, int C, int R>
MITTENS_INLINE vec<T, R> operator*(const matrix<T, C, R>& a, vec<T, C> b) {
  vec<T, R> sum = a[0] * b[0];
  for (int i = 1; i < C; ++i) {
    sum += a[i] * b[i];
  }
  return sum;
}
template <typename T, int C, int R>
MITTENS_INLINE vec<T, C> operator*(vec<T, R> a, const matrix<T, C, R>& b) {
  vec<T, C> result;
  for (int i = 0; i < C; ++i) {
    result[i] = dot(a, b[i]);
  }
  return result;
}
template <typename T, int K, int R, int C>
MITTENS_INLINE matrix<T, C, R> operator*(const matrix<T, K, R>& a, const matrix<T, C, K>& b) {
  matrix<T, C, R> result;
  for (int i = 0; i < C; ++i) {
    result[i] = a * b[i];
  }
  return result;
}
template <typename T, int C, int R, typename B>
MITTENS_INLINE matrix<T, C, R>& operator*=(matrix<T, C, R>& a, const B& b) {
  return a = a * b;
}
template <typename T, int C, int R>
MITTENS_INLINE bool operator==(const matrix<T, C, R>& a, const matrix<T, C, R>& b) {
  bool same = true;
  for (int i = 0; i < C; ++i) {
    same = same && all(a[i] == b[i]);
  }
  return same;
}
template <typename T, int C, int R>
MITTENS_INLINE bool operator!=(const matrix<T, C, R>& a, const matrix<T, C, R>& b) {
  return !(a == b);
}

template <typename T, int C, int R>
MITTENS_INLINE matrix<T, R, C> transpose(const matrix<T, C, R>& a) {
  matrix<T, R, C> result;
  for (int i = 0; i < C; ++i) {
    for (int j = 0; j < R; ++j) {
      result[j][i] = a[i][j];
    }
  }
  return result;
}
template <typename T>
MITTENS_INLINE T determinant(const matrix<T, 2, 2>& a) {
  return a[0][0] * a[1][1] - a[1][0] * a[0][1];
}
template <typename T>
MITTENS_INLINE T determinant(const matrix<T, 3, 3>& a) {
  return dot(a[0], cross(a[1], a[2]));
}
template <typename T>
MITTENS_INLINE T determinant(const matrix<T, 4, 4>& a) {
  T sum = 0;
  for (int i = 0; i < 4; ++i) {
    matrix<T, 3, 3> rest;
    for (int j = 1; j < 4; ++j) {
      for (int k = 0, row = 0; k < 4; ++k) {
        if (k != i) {
          rest[j - 1][row++] = a[j][k];
        }
      }
    }
    sum += (i % 2 ? -a[0][i] : a[0][i]) * determinant(rest);
  }
  return sum;
}

}  // namespace metal
