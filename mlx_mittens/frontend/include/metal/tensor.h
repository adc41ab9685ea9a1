// Tensors of Metal 4 over memory that a kernel has, and cooperative tensors, which lanes hold in registers. For the
// simulator: no compiler for GPUs here knows them.
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

}  // namespace metal

namespace mittens {

template <typename Index, unsigned rank, size_t... sizes>
struct DynamicExtents : DynamicExtents<Index, rank - 1, sizes..., metal::dynamic_extent> {};
template <typename Index, size_t... sizes>
struct DynamicExtents<Index, 0, sizes...> {
  using type = metal::extents<Index, sizes...>;
};

template <typename T>
constexpr bool is_tensor_element = __is_same(T, half) || __is_same(T, bfloat) || __is_same(T, float) ||
    __is_same(T, int8_t) || __is_same(T, uint8_t) || __is_same(T, int) || __is_same(T, uint);

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
                "the simulator binds buffers, no tensors: make a tensor_inline over a pointer");

 public:
  using element_type = T;
  using value_type = remove_cv_t<remove_addrspace_t<T>>;
  using extents_type = Extents;
  using index_type = typename Extents::index_type;
  using data_handle_type = T*;
  using strides_type = array<index_type, Extents::rank()>;
  static_assert(mittens::is_tensor_element<value_type>,
                "a tensor is of half, bfloat, float or integers of 8 or 32 bits here; tensors of 4 bits are not covered");

  MITTENS_INLINE tensor(T* data, Extents sizes) : data_(data), sizes_(sizes) {
    strides_[0] = 1;
    for (size_t i = 1; i < Extents::rank(); ++i) {
      strides_[i] = strides_[i - 1] * sizes.extent(i - 1);
    }
  }
  MITTENS_INLINE tensor(T* data, Extents sizes, strides_type strides) : data_(data), sizes_(sizes), strides_(strides) {}

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
    long offset = 0;
    for (size_t i = 0; i < Extents::rank(); ++i) {
      offset += long(at[i]) * strides_[i];
    }
    return data_[offset];
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
  MITTENS_INLINE auto static_slice(I... begin) const {
    return slice<sizes...>(begin...);
  }

 private:
  template <typename Part>
  MITTENS_INLINE tensor<T, Part, tensor_inline> part(const index_type* at) const {
    T* begin = data_;
    index_type left[Extents::rank()];
    for (size_t i = 0; i < Extents::rank(); ++i) {
      begin += long(at[i]) * strides_[i];
      left[i] = Part::static_extent(i) == dynamic_extent ? sizes_.extent(i) - at[i]
                                                         : index_type(Part::static_extent(i));
    }
    static_assert(Extents::rank() == 2, "slices of two dimensions are covered");
    return {begin, Part(left[0], left[1]), strides_};
  }

  T* data_;
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

namespace mittens {

MITTENS_RUNTIME inline bool has_shuffled_layout() {
  return runtime->tensor_layout == abi::shuffled_layout;
}

enum class TensorRole : unsigned { left, right, destination };

// Which lane holds which elements of a matrix, as fragments of 16x16: an M5's, or one that has nothing of it. A scope of
// no SIMD-group is a thread, which holds all.
template <TensorRole tensor_role, int row_count, int column_count, int simdgroup_count>
struct FragmentLayout {
  static constexpr TensorRole role = tensor_role;
  static constexpr int rows = row_count;
  static constexpr int columns = column_count;
  static constexpr int simdgroups = simdgroup_count;
  static constexpr int fragment_columns = (columns + 15) / 16;
  static constexpr int fragments = (rows + 15) / 16 * fragment_columns;
  static constexpr int capacity =
      simdgroups == 0 ? rows * columns : (fragments + simdgroups - 1) / (simdgroups ? simdgroups : 1) * 8;

  struct Place {
    int row;
    int column;
    bool is_valid;
  };
  static constexpr Place place(unsigned lane, unsigned simdgroup, int i, bool shuffled) {
    if constexpr (simdgroups == 0) {
      return {i / columns, i % columns, true};
    } else {
      int local = i / 8;
      unsigned element = i % 8;
      if (shuffled) {
        const unsigned turn = unsigned(role) + 1;
        lane = (11 * lane + 7 * turn) % 32;
        element = (5 * element + turn) % 8;
        local = capacity / 8 - 1 - local;
      }
      const int fragment = local * simdgroups + int(simdgroup % simdgroups);
      const int row = fragment / fragment_columns * 16 + int((lane >> 2 & 4) | (lane >> 1 & 3)) + 8 * int(element / 4);
      const int column = fragment % fragment_columns * 16 + int((lane >> 2 & 2) | (lane & 1)) * 4 + int(element % 4);
      return {row, column, fragment < fragments && row < rows && column < columns};
    }
  }
  MITTENS_RUNTIME static Place here_is(int i) {
    const abi::Thread& thread = *runtime->thread;
    return place(thread.lane, thread.simdgroup, i, has_shuffled_layout());
  }
};

}  // namespace mittens

namespace metal {

// A matrix over the lanes of a scope, as an operation asks for it. `extents` has its columns first.
template <typename T, typename Extents, typename Layout>
class cooperative_tensor {
 public:
  using element_type = T;
  using extents_type = Extents;
  using layout = Layout;
  static constexpr int capacity = Layout::capacity;

  cooperative_tensor() = default;
  cooperative_tensor(const cooperative_tensor&) = default;
  cooperative_tensor& operator=(const cooperative_tensor&) = default;
  // A kernel may ask for the places after it has read the elements.
  MITTENS_INLINE ~cooperative_tensor() {
    if (run_.file && is_by_index_ && Layout::simdgroups > 0 && !was_asked() && mittens::has_shuffled_layout()) {
      mittens::fault("the result of matmul2d::run was read by index, and its places were never asked "
                     "(get_multidimensional_index): which element a lane holds differs between GPUs",
                     run_);
    }
  }

  // Elements that are there, one after the other.
  template <typename Tensor>
  class Iterator {
   public:
    Iterator(Tensor& tensor, ushort i) : tensor_(&tensor), i_(i) {}
    MITTENS_INLINE auto& operator*() const {
      return (*tensor_)[i_];
    }
    Iterator& operator++() {
      ++i_;
      return *this;
    }
    Iterator operator++(int) {
      return {*tensor_, i_++};
    }
    bool operator==(const Iterator& other) const {
      return i_ == other.i_;
    }
    auto get_multidimensional_index() const {
      return tensor_->get_multidimensional_index(i_);
    }
    ushort index() const {
      return i_;
    }

   private:
    Tensor* tensor_;
    ushort i_;
  };
  using iterator = Iterator<cooperative_tensor>;
  using const_iterator = Iterator<const cooperative_tensor>;

  static constexpr ushort get_capacity() {
    return capacity;
  }
  MITTENS_INLINE bool is_valid_element(ushort i) const {
    if constexpr (Layout::role == mittens::TensorRole::destination) {
      ask();  // a sum of all elements asks for no more
    }
    return i < capacity && Layout::here_is(i).is_valid;
  }
  MITTENS_INLINE bool get_mask(ushort i) const {
    return is_valid_element(i);
  }
  MITTENS_INLINE array<int, 2> get_multidimensional_index(ushort i) const {
    check(i);
    ask();
    const auto place = Layout::here_is(i);
    return {place.column, place.row};
  }
  MITTENS_INLINE T& operator[](ushort i) {
    check(i);
    filled_[i / 64] |= 1ul << i % 64;
    is_by_index_ = true;
    return elements_[i];
  }
  MITTENS_INLINE const T& operator[](ushort i) const {
    check(i);
    is_by_index_ = true;
    return elements_[i];
  }
  iterator begin() {
    return {*this, 0};
  }
  iterator end() {
    return {*this, ushort(capacity)};
  }
  const_iterator begin() const {
    return {*this, 0};
  }
  const_iterator end() const {
    return {*this, ushort(capacity)};
  }
  template <typename Other>
  iterator map_iterator(Other other) {
    ask();
    return {*this, other.index()};
  }

  template <typename U, typename E>
  MITTENS_INLINE void load(const tensor<U, E, tensor_inline>& source) {
    static_assert(__is_same(typename tensor<U, E, tensor_inline>::value_type, T),
                  "a cooperative tensor is loaded from a tensor of its own type");
    for (int i = 0; i < capacity; ++i) {
      const auto place = Layout::here_is(i);
      const bool is_there = place.is_valid && place.column < source.get_extent(0) && place.row < source.get_extent(1);
      elements_[i] = is_there ? T(source[{place.column, place.row}]) : T(0);
    }
    fill();
  }
  template <typename U, typename E>
  MITTENS_INLINE void store(const tensor<U, E, tensor_inline>& target) const {
    static_assert(__is_same(typename tensor<U, E, tensor_inline>::value_type, T),
                  "a cooperative tensor is stored to a tensor of its own type");
    ask();
    for (int i = 0; i < capacity; ++i) {
      const auto place = Layout::here_is(i);
      if (place.is_valid && place.column < target.get_extent(0) && place.row < target.get_extent(1)) {
        target[{place.column, place.row}] = elements_[i];
      }
    }
  }

  // For operations: the elements, whether all are filled, and whether a kernel that filled them knows which they are.
  MITTENS_INLINE T* mittens_elements() {
    return elements_;
  }
  MITTENS_INLINE bool mittens_is_filled() const {
    for (int i = 0; i < capacity; ++i) {
      if (!(filled_[i / 64] >> i % 64 & 1) && Layout::here_is(i).is_valid) {
        return false;
      }
    }
    return true;
  }
  MITTENS_INLINE bool mittens_is_guessed() const {
    return is_by_index_ && !was_asked();
  }
  MITTENS_INLINE void fill() {
    for (auto& word : filled_) {
      word = ~0ul;
    }
    is_by_index_ = false;
  }
  MITTENS_INLINE void mittens_is_result_of(mittens::Site run) {
    fill();
    run_ = run;
  }
  // A conversion keeps the places, and asks on behalf of the kernel.
  MITTENS_INLINE const T* mittens_converted() const {
    ask();
    return elements_;
  }

 private:
  MITTENS_INLINE static void check(ushort i) {
    if (i >= capacity) {
      mittens::fault("an element is used that this cooperative tensor does not have: get_capacity() says how many a "
                     "thread holds",
                     {});
    }
  }

  // Of any tensor of this type: a kernel may ask one and fill another.
  static inline bool asked = false;
  MITTENS_RUNTIME static void ask() {
    asked = true;
  }
  MITTENS_RUNTIME static bool was_asked() {
    return asked;
  }
  T elements_[capacity];
  ulong filled_[(capacity + 63) / 64] = {};
  mutable bool is_by_index_ = false;
  mittens::Site run_ = {};  // that gave the elements
};

}  // namespace metal
