// Tensors of Metal 4 over memory that a kernel has. For the simulator: no compiler for GPUs here knows them.
#pragma once

namespace metal {

constexpr size_t dynamic_extent = ~size_t(0);

template <size_t count>
class execution_threads {
  static_assert(count == 1, "execution_threads<1> is the only one");
};
template <size_t count>
class execution_simdgroups {
  static_assert(count != 0, "execution_simdgroups<N> has one SIMD-group at least");

 public:
  static constexpr size_t static_size = count;
  constexpr uint size() const {
    return count;
  }
};
using execution_thread = execution_threads<1>;
using execution_simdgroup = execution_simdgroups<1>;

// Sizes of a tensor, the innermost first; a size of dynamic_extent is known when the tensor is made.
template <typename Index, size_t... sizes>
class extents {
  static_assert(__is_integral(Index), "extents count by an integer type");

 public:
  using index_type = Index;
  static constexpr size_t rank() {
    return sizeof...(sizes);
  }
  static constexpr size_t rank_dynamic() {
    return (0 + ... + (sizes == dynamic_extent));
  }
  static constexpr size_t static_extent(size_t i) {
    constexpr size_t all[] = {sizes...};
    return all[i];
  }

  constexpr extents() {
    set<0>();
  }
  template <typename... I>
    requires(sizeof...(I) > 0 && (sizeof...(I) == sizeof...(sizes) || sizeof...(I) == rank_dynamic()))
  constexpr extents(I... given) {
    set<sizeof...(I)>(Index(given)...);
  }
  constexpr Index extent(size_t i) const {
    return values_[i];
  }

 private:
  template <size_t count, typename... I>
  constexpr void set(I... given) {
    const Index values[count + 1] = {given...};
    for (size_t i = 0, next = 0; i < rank(); ++i) {
      const bool is_given = count == rank() || static_extent(i) == dynamic_extent;
      values_[i] = is_given && next < count ? values[next++] : is_given ? Index(0) : Index(static_extent(i));
    }
  }
  Index values_[sizeof...(sizes)] = {};
};

// Elements of four bits, two in a byte: the first one in its lower half.
struct int4b_format;
struct uint4b_format;

}  // namespace metal

namespace mittens {

template <typename Index, unsigned rank, size_t... sizes>
struct DynamicExtents : DynamicExtents<Index, rank - 1, sizes..., metal::dynamic_extent> {};
template <typename Index, size_t... sizes>
struct DynamicExtents<Index, 0, sizes...> {
  using type = metal::extents<Index, sizes...>;
};

// The unit of memory that holds an element, and the value that a load gives.
template <typename T>
struct Stored {
  using unit = T;
  using value = metal::remove_cv_t<metal::remove_addrspace_t<T>>;
};
#define MITTENS_STORED(space)                 \
  template <>                                 \
  struct Stored<space metal::int4b_format> {  \
    using unit = space uint8_t;               \
    using value = int8_t;                     \
  };                                          \
  template <>                                 \
  struct Stored<space metal::uint4b_format> { \
    using unit = space uint8_t;               \
    using value = uint8_t;                    \
  };
MITTENS_STORED(MITTENS_DEVICE)
MITTENS_STORED(MITTENS_DEVICE const)
MITTENS_STORED(MITTENS_THREADGROUP)
MITTENS_STORED(MITTENS_THREADGROUP const)
MITTENS_STORED()
MITTENS_STORED(const)
#undef MITTENS_STORED

template <typename T>
constexpr bool is_of_four_bits = __is_same(T, metal::int4b_format) || __is_same(T, metal::uint4b_format);

template <typename T>
constexpr bool is_tensor_element = is_of_four_bits<T> || __is_same(T, half) || __is_same(T, bfloat) ||
    __is_same(T, float) || __is_same(T, int8_t) || __is_same(T, uint8_t) || __is_same(T, int) || __is_same(T, uint);

MITTENS_RUNTIME inline void fault(const char* what, Site site) {
  runtime->fault(what, site, MITTENS_CALLER);
}

}  // namespace mittens

namespace metal {

template <typename Index, size_t rank>
using dextents = typename mittens::DynamicExtents<Index, rank>::type;

struct tensor_inline {};  // over a pointer
struct tensor_handle {};  // an argument that the host binds
struct tensor_offset {};

// Elements in memory: sizes and strides by dimension, the innermost first.
template <typename T, typename Extents, typename Descriptor = tensor_handle>
class tensor {
  static_assert(__is_same(Descriptor, tensor_inline),
                "not covered: tensors as arguments, since the simulator binds buffers: make a tensor_inline over a pointer");

 public:
  using element_type = T;
  using value_type = remove_cv_t<remove_addrspace_t<T>>;
  using extents_type = Extents;
  using index_type = typename Extents::index_type;
  using data_handle_type = typename mittens::Stored<T>::unit*;
  using strides_type = array<index_type, Extents::rank()>;
  using mittens_value_type = typename mittens::Stored<T>::value;
  static_assert(mittens::is_tensor_element<value_type>,
                "a tensor is of half, bfloat, float, integers of 8 or 32 bits, int4b_format or uint4b_format here");

  MITTENS_INLINE tensor(data_handle_type data, Extents sizes) : data_(data), sizes_(sizes) {
    strides_[0] = 1;
    for (size_t i = 1; i < Extents::rank(); ++i) {
      strides_[i] = strides_[i - 1] * sizes.extent(i - 1);
    }
    check_rows();
  }
  MITTENS_INLINE tensor(data_handle_type data, Extents sizes, strides_type strides)
      : data_(data), sizes_(sizes), strides_(strides) {
    check_rows();
  }

  static constexpr size_t get_rank() {
    return Extents::rank();
  }
  MITTENS_INLINE const Extents& extents() const {
    return sizes_;
  }
  MITTENS_INLINE index_type get_extent(size_t i) const {
    return sizes_.extent(i);
  }
  MITTENS_INLINE index_type get_stride(size_t i) const {
    return strides_[i];
  }
  MITTENS_INLINE data_handle_type data_handle() const {
    return data_;
  }
  MITTENS_INLINE T& operator[](array<index_type, Extents::rank()> at) const {
    static_assert(!is_of_four_bits, "an element of 4 bits is not in memory by itself: give the tensor to matmul2d::run");
    return data_[mittens_offset(at)];
  }
  // A view from a place up to the ends of this tensor.
  template <typename... I>
    requires(sizeof...(I) == Extents::rank())
  MITTENS_INLINE auto slice(I... begin) const {
    const index_type at[] = {index_type(begin)...};
    return part<dextents<index_type, Extents::rank()>>(at);
  }
  // With sizes that the caller answers for: a load does not look at the ends of this tensor.
  template <size_t... sizes, typename... I>
    requires(sizeof...(sizes) == Extents::rank() && sizeof...(I) == Extents::rank())
  MITTENS_INLINE auto slice(I... begin) const {
    const index_type at[] = {index_type(begin)...};
    return part<metal::extents<index_type, sizes...>>(at);
  }
  template <size_t... sizes, typename... I>
  auto static_slice(I...) const {
    static_assert(sizeof...(I) == 0, "Metal's headers have no static_slice, which comments in them use: slice<...>");
  }

  // For operations: where an element lies, the memory behind a number of elements, and a reader of elements.
  MITTENS_INLINE long mittens_offset(array<index_type, Extents::rank()> at) const {
    long offset = 0;
    for (size_t i = 0; i < Extents::rank(); ++i) {
      offset += long(at[i]) * strides_[i];
    }
    return offset;
  }
  MITTENS_INLINE data_handle_type mittens_behind(long elements) const {
    if constexpr (is_of_four_bits) {
      if (elements % 2 != 0) {
        mittens::fault("a part of a tensor of 4 bits begins in the middle of a byte", {});
      }
      return data_ + elements / 2;
    } else {
      return data_ + elements;
    }
  }
  // Reads a byte once for two elements of 4 bits, one after the other.
  class MittensReader {
   public:
    MITTENS_INLINE explicit MittensReader(const tensor& of) : of_(of) {}
    MITTENS_INLINE mittens_value_type operator()(array<index_type, Extents::rank()> at) {
      if constexpr (is_of_four_bits) {
        const long offset = of_.mittens_offset(at);
        if (offset / 2 != at_) {
          at_ = offset / 2;
          byte_ = of_.data_[at_];
        }
        const int bits = offset % 2 != 0 ? byte_ >> 4 : byte_ & 15;
        return mittens_value_type(__is_same(mittens_value_type, int8_t) && bits > 7 ? bits - 16 : bits);
      } else {
        return mittens_value_type(of_[at]);
      }
    }

   private:
    const tensor& of_;
    long at_ = -1;
    uint8_t byte_ = 0;
  };

 private:
  static constexpr bool is_of_four_bits = mittens::is_of_four_bits<value_type>;

  MITTENS_INLINE void check_rows() const {
    if constexpr (is_of_four_bits) {
      for (size_t i = 1; i < Extents::rank(); ++i) {
        if (strides_[i] % 2 != 0 && sizes_.extent(i) > 1) {
          mittens::fault("rows of a tensor of 4 bits begin in the middle of a byte: their stride is odd", {});
        }
      }
    }
  }
  template <typename Part>
  MITTENS_INLINE tensor<T, Part, tensor_inline> part(const index_type* at) const {
    long begin = 0;
    index_type left[Extents::rank()];
    for (size_t i = 0; i < Extents::rank(); ++i) {
      begin += long(at[i]) * strides_[i];
      left[i] = Part::static_extent(i) == dynamic_extent ? sizes_.extent(i) - at[i]
                                                         : index_type(Part::static_extent(i));
    }
    static_assert(Extents::rank() <= 2, "slices of one and two dimensions are covered");
    if constexpr (Extents::rank() == 1) {
      return {mittens_behind(begin), Part(left[0]), strides_};
    } else {
      return {mittens_behind(begin), Part(left[0], left[1]), strides_};
    }
  }

  data_handle_type data_;
  Extents sizes_;
  strides_type strides_;
};

#define MITTENS_TENSOR_OF(space)                                                                            \
  template <typename T, typename Extents>                                                                   \
  tensor(space T*, Extents) -> tensor<space T, Extents, tensor_inline>;                                     \
  template <typename T, typename Extents>                                                                   \
  tensor(space T*, Extents, array<typename Extents::index_type, Extents::rank()>) -> tensor<space T, Extents, tensor_inline>;
MITTENS_TENSOR_OF(MITTENS_DEVICE)
MITTENS_TENSOR_OF(MITTENS_THREADGROUP)
MITTENS_TENSOR_OF()
#undef MITTENS_TENSOR_OF

}  // namespace metal
