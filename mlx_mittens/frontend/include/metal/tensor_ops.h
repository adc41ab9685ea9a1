// matmul2d of MetalPerformancePrimitives, for the simulator: products of tensors in memory and of cooperative tensors.
#pragma once

namespace mpp::tensor_ops {

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };

  int m, n, k;
  bool transpose_left, transpose_right;
  bool relaxed_precision;
  mode matmul_mode;

  constexpr matmul2d_descriptor(int m, int n, int k = int(metal::dynamic_extent), bool transpose_left = false,
                                bool transpose_right = false, bool relaxed_precision = false,
                                mode matmul_mode = mode::multiply)
      : m(m),
        n(n),
        k(k),
        transpose_left(transpose_left),
        transpose_right(transpose_right),
        relaxed_precision(relaxed_precision),
        matmul_mode(matmul_mode) {}
};

template <typename T>
constexpr T dynamic_length_v = metal::numeric_limits<T>::max();

}  // namespace mpp::tensor_ops

namespace mittens {

template <typename T>
constexpr bool is_tensor = false;
template <typename T, typename Extents, typename Descriptor>
constexpr bool is_tensor<metal::tensor<T, Extents, Descriptor>> = true;
template <typename T>
constexpr bool is_cooperative = false;
template <typename T, typename Extents, typename Layout>
constexpr bool is_cooperative<metal::cooperative_tensor<T, Extents, Layout>> = true;

template <typename T>
struct TensorValue {
  using type = typename T::element_type;
};
template <typename T, typename Extents, typename Descriptor>
struct TensorValue<metal::tensor<T, Extents, Descriptor>> {
  using type = typename metal::tensor<T, Extents, Descriptor>::value_type;
};
template <typename T>
using tensor_value = typename TensorValue<metal::remove_cv_t<T>>::type;
// The type that a SIMD-group holds of an operand in memory.
template <typename T>
using held_value = typename Stored<tensor_value<T>>::value;

template <typename T>
constexpr bool is_constant_tensor = false;
template <typename T, typename Extents, typename Descriptor>
constexpr bool is_constant_tensor<metal::tensor<T, Extents, Descriptor>> = __is_const(T);

template <typename Scope>
constexpr int simdgroups_of = -1;
template <>
constexpr int simdgroups_of<metal::execution_threads<1>> = 0;
template <size_t count>
constexpr int simdgroups_of<metal::execution_simdgroups<count>> = int(count);

template <typename T>
constexpr bool is_byte = __is_same(T, int8_t) || __is_same(T, uint8_t);

// The types of operands and result that the header of MetalPerformancePrimitives lists.
template <typename Left, typename Right, typename Result>
constexpr bool is_product_of_types() {
  constexpr bool has_float = __is_same(Left, float) || __is_same(Right, float);
  if constexpr (is_of_four_bits<Left>) {
    return false;
  } else if constexpr (is_byte<Left> && (is_byte<Right> || is_of_four_bits<Right>)) {
    return __is_same(Left, typename Stored<Right>::value) && __is_same(Result, int);
  } else if constexpr (is_of_four_bits<Right>) {
    constexpr bool is_narrow = __is_same(Left, half) || __is_same(Left, bfloat);
    return is_narrow && (__is_same(Result, float) || __is_same(Result, Left));
  } else if constexpr (__is_same(Left, int) || __is_same(Left, uint) || __is_same(Right, int) ||
                       __is_same(Right, uint)) {
    return false;
  } else if constexpr (__is_same(Result, half) || __is_same(Result, bfloat)) {
    return !has_float && (__is_same(Left, Result) || __is_same(Right, Result));
  } else {
    return __is_same(Result, float);
  }
}

// A float with the ten bits of fraction that relaxed precision keeps; ties go to even.
MITTENS_INLINE float relaxed(float x) {
  const unsigned bits = __builtin_bit_cast(unsigned, x);
  return (bits & 0x7f800000) == 0x7f800000 ? x
                                           : __builtin_bit_cast(float, (bits + 0xfff + (bits >> 13 & 1)) & ~0x1fffu);
}

// A product spread over the lanes of a SIMD-group. Its sums are in float, or in int for integers.
template <typename Left, typename Right, typename Sums, int m, int n, int k, bool transpose_left, bool transpose_right,
          bool is_relaxed>
struct TensorProduct {
  using Sum = typename Sums::element_type;

  typename Left::element_type* left;
  typename Right::element_type* right;
  Sum* sums;
  bool is_left_guessed;
  bool is_right_guessed;
  bool is_shuffled;
  unsigned lane;
  unsigned simdgroup;

  template <typename T>
  __attribute__((no_sanitize("coverage"))) static Sum operand(T value) {
    if constexpr (is_relaxed && __is_same(T, float)) {
      return relaxed(value);
    } else {
      return Sum(value);
    }
  }
  // Operands as whole matrices, and which of them is guessed: 1 for the left one, 2 for the right one.
  __attribute__((no_sanitize("coverage"))) static unsigned multiply(TensorProduct* const* lanes, unsigned count) {
    static Sum a[m * k], b[k * n];
    bool is_uniform[2] = {true, true};
    unsigned guessed = 0;
    for (unsigned at = 0; at < count; ++at) {
      const TensorProduct& of = *lanes[at];
      guessed |= unsigned(of.is_left_guessed) | unsigned(of.is_right_guessed) << 1;
      for (int i = 0; i < Left::capacity; ++i) {
        const auto place = Left::layout::place(of.lane, 0, i, of.is_shuffled);
        if (place.is_valid) {
          a[transpose_left ? place.column * k + place.row : place.row * k + place.column] = operand(of.left[i]);
          is_uniform[0] &= of.left[i] == lanes[0]->left[0];
        }
      }
      for (int i = 0; i < Right::capacity; ++i) {
        const auto place = Right::layout::place(of.lane, 0, i, of.is_shuffled);
        if (place.is_valid) {
          b[transpose_right ? place.column * n + place.row : place.row * n + place.column] = operand(of.right[i]);
          is_uniform[1] &= of.right[i] == lanes[0]->right[0];
        }
      }
    }
    for (unsigned at = 0; at < count; ++at) {
      const TensorProduct& of = *lanes[at];
      for (int i = 0; i < Sums::capacity; ++i) {
        const auto place = Sums::layout::place(of.lane, of.simdgroup, i, of.is_shuffled);
        if (place.is_valid) {
          Sum sum = of.sums[i];
          for (int j = 0; j < k; ++j) {
            sum += a[place.row * k + j] * b[j * n + place.column];
          }
          of.sums[i] = sum;
        }
      }
    }
    return lanes[0]->is_shuffled ? guessed & (unsigned(!is_uniform[0]) | unsigned(!is_uniform[1]) << 1) : 0;
  }
  __attribute__((no_sanitize("coverage"))) static void combine(abi::Lanes& lanes) {
    TensorProduct* all[abi::simd_width];
    for (unsigned i = 0; i < abi::simd_width; ++i) {
      all[i] = static_cast<TensorProduct*>(value_of<abi::TensorMeeting>(lanes.value[i]).product);
    }
    const unsigned guessed = multiply(all, abi::simd_width);
    __builtin_memcpy(lanes.result.bytes, &guessed, sizeof(guessed));
  }
  MITTENS_RUNTIME static void run(TensorProduct product, bool is_of_thread, Site site) {
    product.lane = is_of_thread ? 0 : runtime->thread->lane;
    product.simdgroup = runtime->thread->simdgroup;
    product.is_shuffled = has_shuffled_layout();
    unsigned guessed;
    if (is_of_thread) {
      TensorProduct* const pointer = &product;
      guessed = multiply(&pointer, 1);
    } else {
      constexpr unsigned multiplies = m * n * k / (Sums::layout::simdgroups > 1 ? Sums::layout::simdgroups : 1);
      const abi::TensorMeeting meeting{&product, multiplies, is_byte<typename Left::element_type>};
      guessed = value_of<unsigned>(meet(simdgroup_scope, "matmul2d::run", site, MITTENS_CALLER, &meeting,
                                        sizeof(meeting), combine, abi::tensor_fragments)
                                       .result);
    }
    if (guessed) {
      runtime->fault(guessed & 1 ? "the left operand of matmul2d::run was filled by index, and its places were never "
                                   "asked (get_multidimensional_index): which element a lane holds differs between GPUs"
                                 : "the right operand of matmul2d::run was filled by index, and its places were never "
                                   "asked (get_multidimensional_index): which element a lane holds differs between GPUs",
                     site, MITTENS_CALLER);
    }
  }
};

}  // namespace mittens

namespace mpp::tensor_ops {

template <matmul2d_descriptor chosen, typename Scope, typename... Arguments>
class matmul2d {
  static constexpr int simdgroups = mittens::simdgroups_of<Scope>;
  static_assert(simdgroups >= 0, "the scope of matmul2d is execution_thread or execution_simdgroups<N>");
  static_assert(chosen.m > 0 && chosen.n > 0, "matmul2d has one row and one column at least");
  static_assert(chosen.k > 0 || chosen.k == int(metal::dynamic_extent),
                "k of matmul2d is positive, or dynamic_extent where tensors say it");

  static constexpr int constant_k = chosen.k > 0 ? chosen.k : 1;  // check_inputs refuses another one

  template <mittens::TensorRole role, typename T, typename Index, int rows, int columns, int scope>
  using Matrix =
      metal::cooperative_tensor<T, metal::extents<Index, columns, rows>, mittens::FragmentLayout<role, rows, columns, scope>>;
  template <typename T, int k, int scope, typename Index = int>
  using Left = Matrix<mittens::TensorRole::left, T, Index, chosen.transpose_left ? k : chosen.m,
                      chosen.transpose_left ? chosen.m : k, scope>;
  template <typename T, int k, int scope, typename Index = int>
  using Right = Matrix<mittens::TensorRole::right, T, Index, chosen.transpose_right ? chosen.n : k,
                       chosen.transpose_right ? k : chosen.n, scope>;

  using ResultLayout = mittens::FragmentLayout<mittens::TensorRole::destination, chosen.m, chosen.n, simdgroups>;
  template <bool of_rows, typename T, typename Index>
  using Reduction = metal::cooperative_tensor<T, metal::extents<Index, of_rows ? chosen.m : chosen.n>,
                                              mittens::ReductionLayout<of_rows, ResultLayout>>;

  template <typename L, typename R, typename T>
  static constexpr void check_types() {
    static_assert(mittens::is_product_of_types<L, R, T>(),
                  "matmul2d has no product of these types: half, bfloat and float with a result of float or of the "
                  "narrow type of an operand, bytes of one sign with a result of int, and 4 bits on the right of half, "
                  "bfloat or bytes of their sign");
  }
  template <typename L, typename R, typename T>
  static constexpr void check_inputs() {
    check_types<L, R, T>();
    static_assert(simdgroups <= 1, "cooperative tensors are operands of one SIMD-group or thread, not of several");
    static_assert(chosen.k > 0, "cooperative tensors as operands need a k that is a constant");
    static_assert(chosen.m % 16 == 0 && chosen.n % 16 == 0 && chosen.k % 16 == 0 || simdgroups == 0,
                  "cooperative tensors as operands have sizes that are multiples of 16");
    static_assert(chosen.m == 32 || chosen.n == 32 || chosen.k == 32 || simdgroups == 0,
                  "one of m, n and k is 32 where both operands are cooperative tensors");
  }
  template <typename L, typename R, typename T>
  static constexpr void check_reductions() {
    check_types<mittens::tensor_value<L>, mittens::tensor_value<R>, T>();
    static_assert(simdgroups == 1, "reductions are of one SIMD-group: the scope is execution_simdgroup");
  }
  // Refuses what the header does of a result that becomes an operand.
  template <typename T, typename Source>
  static constexpr void check_source() {
    using Layout = typename Source::layout;
    static_assert(Layout::role == mittens::TensorRole::destination && Layout::simdgroups == 1 && simdgroups == 1,
                  "an operand comes from the destination of a matmul2d, and both have the scope execution_simdgroup");
    static_assert(__is_same(typename Source::element_type, T),
                  "a result becomes an operand of its own element type");
    static_assert(!chosen.transpose_left && !chosen.transpose_right,
                  "a result becomes an operand of a product that transposes nothing");
  }

 public:
  static constexpr matmul2d_descriptor descriptor = chosen;
  using scope = Scope;

  template <typename L, typename R, typename T, typename Index = int>
  using cooperative_tensor_left_input_t = Left<L, constant_k, simdgroups, Index>;
  template <typename L, typename R, typename T, typename Index = int>
  using cooperative_tensor_right_input_t = Right<R, constant_k, simdgroups, Index>;
  template <typename L, typename R, typename T, typename Index = int>
  using cooperative_tensor_destination_t =
      Matrix<mittens::TensorRole::destination, T, Index, chosen.m, chosen.n, simdgroups>;

  template <typename L, typename R, typename T, typename Index = int>
  using cooperative_tensor_row_reduction_destination_t = Reduction<true, T, Index>;
  template <typename L, typename R, typename T, typename Index = int>
  using cooperative_tensor_column_reduction_destination_t = Reduction<false, T, Index>;

  template <typename L, typename R, typename T, typename Index = int>
  MITTENS_INLINE cooperative_tensor_left_input_t<L, R, T, Index> get_left_input_cooperative_tensor() const {
    check_inputs<L, R, T>();
    return {};
  }
  template <typename L, typename R, typename T, typename Index = int>
  MITTENS_INLINE cooperative_tensor_right_input_t<L, R, T, Index> get_right_input_cooperative_tensor() const {
    check_inputs<L, R, T>();
    return {};
  }
  template <typename L, typename R, typename T, typename Index = int>
  MITTENS_INLINE cooperative_tensor_destination_t<L, R, T, Index> get_destination_cooperative_tensor() const {
    check_types<mittens::tensor_value<L>, mittens::tensor_value<R>, T>();
    return {};
  }

  // For the value of each row, or of each column, of a result.
  template <typename L, typename R, typename T, typename Index = int>
  MITTENS_INLINE Reduction<true, T, Index> get_row_reduction_destination_cooperative_tensor() const {
    check_reductions<L, R, T>();
    return {};
  }
  template <typename L, typename R, typename T, typename Index = int>
  MITTENS_INLINE Reduction<false, T, Index> get_column_reduction_destination_cooperative_tensor() const {
    check_reductions<L, R, T>();
    return {};
  }

  // An operand from the result of another product, where both have one layout.
  template <typename L, typename R, typename T, typename U, typename E, typename Layout>
  bool is_compatible_as_left_input(const metal::cooperative_tensor<U, E, Layout>&) const {
    return has_layout_of<typename cooperative_tensor_left_input_t<L, R, T>::layout, Layout>();
  }
  template <typename L, typename R, typename T, typename U, typename E, typename Layout>
  bool is_compatible_as_right_input(const metal::cooperative_tensor<U, E, Layout>&) const {
    return has_layout_of<typename cooperative_tensor_right_input_t<L, R, T>::layout, Layout>();
  }
  template <typename L, typename R, typename T, typename Index = int, typename U, typename E, typename Layout>
  MITTENS_INLINE auto get_left_input_cooperative_tensor(const metal::cooperative_tensor<U, E, Layout>& source,
                                                        mittens::Site site = mittens::here()) const {
    check_inputs<L, R, T>();
    check_source<L, metal::cooperative_tensor<U, E, Layout>>();
    static_assert(Layout::rows == chosen.m && Layout::columns == chosen.k,
                  "a result that becomes a left operand has m rows and k columns");
    return converted<cooperative_tensor_left_input_t<L, R, T, Index>>(source, site);
  }
  template <typename L, typename R, typename T, typename Index = int, typename U, typename E, typename Layout>
  MITTENS_INLINE auto get_right_input_cooperative_tensor(const metal::cooperative_tensor<U, E, Layout>& source,
                                                         mittens::Site site = mittens::here()) const {
    check_inputs<L, R, T>();
    check_source<R, metal::cooperative_tensor<U, E, Layout>>();
    static_assert(Layout::rows == chosen.k && Layout::columns == chosen.n,
                  "a result that becomes a right operand has k rows and n columns");
    return converted<cooperative_tensor_right_input_t<L, R, T, Index>>(source, site);
  }

  template <typename L, typename R, typename D>
  MITTENS_INLINE void run(L& left, R& right, D& destination, mittens::Site site = mittens::here()) const {
    using mittens::is_cooperative, mittens::is_tensor;
    using Value = mittens::tensor_value<D>;
    static_assert((is_cooperative<metal::remove_cv_t<L>> || is_tensor<metal::remove_cv_t<L>>) &&
                      (is_cooperative<metal::remove_cv_t<R>> || is_tensor<metal::remove_cv_t<R>>) &&
                      (is_cooperative<metal::remove_cv_t<D>> || is_tensor<metal::remove_cv_t<D>>),
                  "matmul2d::run takes tensors and cooperative tensors");
    check_types<mittens::tensor_value<L>, mittens::tensor_value<R>, Value>();
    static_assert(!mittens::is_constant_tensor<metal::remove_cv_t<L>> &&
                      !mittens::is_constant_tensor<metal::remove_cv_t<R>>,
                  "matmul2d::run takes no tensors of const elements: cast the pointer, as by const_cast<device half*>");
    if constexpr (simdgroups > 1) {
      if (mittens::attribute::simdgroups_per_threadgroup() != simdgroups) {
        mittens::fault("matmul2d::run is for another number of SIMD-groups than the threadgroup has", site);
      }
      mittens::barrier(mittens::threadgroup_scope, "matmul2d::run", site, mittens::no_memory);
    }
    using Sum = metal::conditional_t<__is_same(Value, int), int, float>;
    Matrix<mittens::TensorRole::destination, Sum, int, chosen.m, chosen.n, simdgroups> sums;
    constexpr bool accumulates = chosen.matmul_mode == matmul2d_descriptor::mode::multiply_accumulate;
    if constexpr (is_cooperative<D>) {
      static_assert(D::layout::rows == chosen.m && D::layout::columns == chosen.n && D::layout::simdgroups == simdgroups,
                    "the destination of matmul2d::run is of another operation");
      if (accumulates && !destination.mittens_is_filled()) {
        mittens::fault("matmul2d::run adds to a destination with elements that nothing filled", site);
      }
      for (int i = 0; i < sums.capacity; ++i) {
        sums.mittens_elements()[i] = accumulates ? Sum(destination.mittens_elements()[i]) : Sum(0);
      }
      multiply(left, right, sums, site);
      for (int i = 0; i < sums.capacity; ++i) {
        destination.mittens_elements()[i] = Value(sums.mittens_elements()[i]);
      }
      destination.mittens_is_result_of(site);
    } else {
      const auto at = [&](int i) { return decltype(sums)::layout::here_is(i); };
      const auto is_there = [&](auto place) { return mittens::is_in(destination, place); };
      for (int i = 0; i < sums.capacity; ++i) {
        sums.mittens_elements()[i] =
            accumulates && is_there(at(i)) ? Sum(destination[{at(i).column, at(i).row}]) : Sum(0);
      }
      multiply(left, right, sums, site);
      for (int i = 0; i < sums.capacity; ++i) {
        if (is_there(at(i))) {
          destination[{at(i).column, at(i).row}] = Value(sums.mittens_elements()[i]);
        }
      }
    }
  }

 private:
  static constexpr int block = 32;  // of k, where both operands are in memory

  template <typename Wanted, typename Layout>
  static bool has_layout_of() {
    constexpr bool has_shape = Wanted::rows == Layout::rows && Wanted::columns == Layout::columns &&
                               Wanted::simdgroups == Layout::simdgroups;
    return has_shape && !mittens::has_shuffled_layout();
  }
  template <typename Wanted, typename Source>
  static Wanted converted(const Source& source, mittens::Site site) {
    if (!has_layout_of<typename Wanted::layout, typename Source::layout>()) {
      mittens::fault("a cooperative tensor becomes an operand of another layout: ask is_compatible_as_left_input or "
                     "is_compatible_as_right_input before, and pass it through memory where they say no",
                     site);
    }
    source.mittens_ask();
    Wanted result;
    for (int i = 0; i < Wanted::capacity; ++i) {
      result.mittens_elements()[i] = source.mittens_elements()[i];
    }
    result.mittens_fill();
    return result;
  }

  template <int k, typename L, typename R, typename S>
  static void product(L& left, R& right, S& sums, mittens::Site site) {
    if (!left.mittens_is_filled() || !right.mittens_is_filled()) {
      mittens::fault("matmul2d::run reads an operand with elements that nothing filled", site);
    }
    using Product = mittens::TensorProduct<L, R, S, chosen.m, chosen.n, k, chosen.transpose_left, chosen.transpose_right,
                                           chosen.relaxed_precision>;
    Product::run({left.mittens_elements(), right.mittens_elements(), sums.mittens_elements(), left.mittens_is_guessed(),
                  right.mittens_is_guessed(), false, 0, 0},
                 simdgroups == 0, site);
  }
  // A part of k of an operand in memory: of its dimension that k is.
  template <bool is_inner, typename T, typename E>
  MITTENS_INLINE static auto part(const metal::tensor<T, E, metal::tensor_inline>& whole, int begin, int count) {
    using Part = metal::tensor<T, metal::dextents<int, 2>, metal::tensor_inline>;
    const int inner = whole.get_stride(0), outer = whole.get_stride(1);
    const int sizes[] = {int(whole.get_extent(0)), int(whole.get_extent(1))};
    const int left = sizes[is_inner ? 0 : 1] - begin;
    const int of_k = left < count ? left : count;
    return Part(whole.mittens_behind(long(begin) * (is_inner ? inner : outer)),
                metal::dextents<int, 2>(is_inner ? of_k : sizes[0], is_inner ? sizes[1] : of_k), {inner, outer});
  }

  template <typename L, typename R, typename S>
  MITTENS_INLINE static void multiply(L& left, R& right, S& sums, mittens::Site site) {
    constexpr int own = simdgroups == 0 ? 0 : 1;  // each SIMD-group has its operands whole
    constexpr bool is_left_held = mittens::is_cooperative<metal::remove_cv_t<L>>;
    constexpr bool is_right_held = mittens::is_cooperative<metal::remove_cv_t<R>>;
    if constexpr (is_left_held) {
      static_assert(__is_same(typename L::layout, typename Left<mittens::tensor_value<L>, constant_k, simdgroups>::layout),
                    "the left operand of matmul2d::run is of another operation");
    }
    if constexpr (is_right_held) {
      static_assert(__is_same(typename R::layout, typename Right<mittens::tensor_value<R>, constant_k, simdgroups>::layout),
                    "the right operand of matmul2d::run is of another operation");
    }
    if constexpr (is_left_held && is_right_held) {
      product<constant_k>(left, right, sums, site);
    } else if constexpr (is_left_held) {
      Right<mittens::held_value<R>, constant_k, own> b;
      b.load(right);
      product<constant_k>(left, b, sums, site);
    } else if constexpr (is_right_held) {
      Left<mittens::held_value<L>, constant_k, own> a;
      a.load(left);
      product<constant_k>(a, right, sums, site);
    } else {
      const int all = chosen.k > 0 ? chosen.k : int(left.get_extent(chosen.transpose_left ? 1 : 0));
      if (chosen.k <= 0 && int(right.get_extent(chosen.transpose_right ? 0 : 1)) != all) {
        mittens::fault("the operands of matmul2d::run differ in k, which is dynamic_extent: the columns of the left one "
                       "are not the rows of the right one, as its descriptor transposes them",
                       site);
      }
      for (int begin = 0; begin < all; begin += block) {
        const int count = all - begin < block ? all - begin : block;
        Left<mittens::held_value<L>, block, own> a;
        a.load(part<!chosen.transpose_left>(left, begin, count));
        Right<mittens::held_value<R>, block, own> b;
        b.load(part<chosen.transpose_right>(right, begin, count));
        product<block>(a, b, sums, site);
      }
    }
  }
};

}  // namespace mpp::tensor_ops
