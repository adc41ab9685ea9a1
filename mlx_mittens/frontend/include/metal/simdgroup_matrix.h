// simdgroup_matrix: 8x8 matrices spread over the 32 lanes of a simdgroup (metal/lanes.h has the layout).
#pragma once

namespace metal {

template <typename T, int rows, int columns>
struct simdgroup_matrix {
  static_assert(rows == 8 && columns == 8, "simdgroup_matrix is 8x8");
  static_assert(mittens::is_float<T>, "simdgroup_matrix is of float, half or bfloat");
  using storage_type = vec<T, 2>;

  simdgroup_matrix() = default;
  explicit simdgroup_matrix(T diagonal) {
    const uint lane = mittens::lane();
    for (uint i = 0; i < 2; ++i) {
      elements_[i] = mittens::row_of(lane) == mittens::column_of(lane) + i ? diagonal : T(0);
    }
  }
  constexpr storage_type& thread_elements() {
    return elements_;
  }
  constexpr const storage_type& thread_elements() const {
    return elements_;
  }

 private:
  storage_type elements_;
};

using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

template <typename T, int rows, int columns = rows>
MITTENS_INLINE simdgroup_matrix<T, rows, columns> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, rows, columns> result;
  result.thread_elements() = vec<T, 2>(value);
  return result;
}

}  // namespace metal

namespace mittens {

// Element i of this lane, counted from the first element of the matrix.
MITTENS_INLINE ulong element_offset(uint i, ulong elements_per_row, ulong2 origin, bool transpose) {
  const ulong row = row_of(lane());
  const ulong column = column_of(lane()) + i;
  return (origin.y + (transpose ? column : row)) * elements_per_row + origin.x + (transpose ? row : column);
}

}  // namespace mittens

namespace metal {

#ifndef MITTENS_WHOLE
#define MITTENS_WHOLE
#endif
#define MITTENS_MATRIX_MEMORY(space)                                                                              \
  template <typename T>                                                                                           \
  MITTENS_INLINE void simdgroup_load(simdgroup_matrix<T, 8, 8>& matrix, const space T* source,                    \
                                     ulong elements_per_row = 8, ulong2 origin = ulong2{0, 0},                    \
                                     bool transpose = false) {                                                    \
    const MITTENS_WHOLE space T* elements = source;                                                               \
    for (uint i = 0; i < 2; ++i) {                                                                                \
      matrix.thread_elements()[i] = elements[mittens::element_offset(i, elements_per_row, origin, transpose)];    \
    }                                                                                                             \
  }                                                                                                               \
  template <typename T>                                                                                           \
  MITTENS_INLINE void simdgroup_store(simdgroup_matrix<T, 8, 8> matrix, space T* destination,                     \
                                      ulong elements_per_row = 8, ulong2 origin = ulong2{0, 0},                   \
                                      bool transpose = false) {                                                   \
    for (uint i = 0; i < 2; ++i) {                                                                                \
      destination[mittens::element_offset(i, elements_per_row, origin, transpose)] = matrix.thread_elements()[i]; \
    }                                                                                                             \
  }
MITTENS_MATRIX_MEMORY(MITTENS_DEVICE)
MITTENS_MATRIX_MEMORY(MITTENS_THREADGROUP)
#undef MITTENS_MATRIX_MEMORY

template <typename D, typename A, typename B, typename C>
MITTENS_INLINE void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                                  simdgroup_matrix<B, 8, 8> b, simdgroup_matrix<C, 8, 8> c,
                                                  mittens::Site site = mittens::here()) {
  const uint lane = mittens::lane();
  const float2 sum = mittens::construct<float2>(c.thread_elements());
  float2 product;
#ifdef MITTENS_MATRIX_LANES
  if constexpr (__is_same(A, B)) {
    product = mittens::tensor_multiply(a.thread_elements(), b.thread_elements(), sum);
  } else
#endif
  {
    product = mittens::matrix_multiply<conditional_t<__is_same(A, B), A, float>>(
        site, mittens::construct<float2>(a.thread_elements()), mittens::construct<float2>(b.thread_elements()), sum,
        mittens::row_of(lane), mittens::column_of(lane));
  }
  d.thread_elements() = mittens::construct<vec<D, 2>>(product);
}
template <typename D, typename A, typename B>
MITTENS_INLINE void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                       simdgroup_matrix<B, 8, 8> b, mittens::Site site = mittens::here()) {
  simdgroup_multiply_accumulate(d, a, b, make_filled_simdgroup_matrix<float, 8, 8>(0.0f), site);
}

}  // namespace metal
