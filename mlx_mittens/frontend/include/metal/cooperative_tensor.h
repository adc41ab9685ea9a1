// Cooperative tensors of Metal 4, which the lanes of a SIMD-group hold in registers. For the simulator: no compiler for
// GPUs here knows them.
#pragma once

namespace mittens {

MITTENS_RUNTIME inline bool has_shuffled_layout() {
  return runtime->tensor_layout == abi::shuffled_layout;
}

enum class TensorRole : unsigned { left, right, destination, reduction };

// Place of an element in a matrix. A value of a reduction has a column alone.
struct TensorPlace {
  int row;
  int column;
  bool is_valid;
};

// The first row and column that a lane holds of a fragment of 16x16: it holds two rows, eight apart, and four columns.
MITTENS_INLINE constexpr int fragment_row(unsigned lane) {
  return int((lane >> 2 & 4) | (lane >> 1 & 3));
}
MITTENS_INLINE constexpr int fragment_column(unsigned lane) {
  return int((lane >> 2 & 2) | (lane & 1)) * 4;
}
MITTENS_INLINE constexpr unsigned shuffled_lane(unsigned lane, TensorRole role) {
  return (11 * lane + 7 * (unsigned(role) + 1)) % 32;
}

// Spreads a matrix over lanes by fragments of 16x16, as an M5 does, or as no GPU does. A scope of no SIMD-group is a
// thread, which holds all.
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

  static constexpr TensorPlace place(unsigned lane, unsigned simdgroup, int i, bool shuffled) {
    if constexpr (simdgroups == 0) {
      return {i / columns, i % columns, true};
    } else {
      int local = i / 8;
      unsigned element = i % 8;
      if (shuffled) {
        lane = shuffled_lane(lane, role);
        element = (5 * element + unsigned(role) + 1) % 8;
        local = capacity / 8 - 1 - local;
      }
      const int fragment = local * simdgroups + int(simdgroup % simdgroups);
      const int row = fragment / fragment_columns * 16 + fragment_row(lane) + 8 * int(element / 4);
      const int column = fragment % fragment_columns * 16 + fragment_column(lane) + int(element % 4);
      return {row, column, fragment < fragments && row < rows && column < columns};
    }
  }
  MITTENS_RUNTIME static TensorPlace here_is(int i) {
    const abi::Thread& thread = *runtime->thread;
    return place(thread.lane, thread.simdgroup, i, has_shuffled_layout());
  }
};

// Spreads a value for each row, or each column, of a SIMD-group's result: every lane with elements of it holds the value,
// or in the other layout one lane that has none.
template <bool is_of_rows, typename Result>
struct ReductionLayout {
  using result = Result;
  static constexpr TensorRole role = TensorRole::reduction;
  static constexpr bool of_rows = is_of_rows;
  static constexpr int simdgroups = Result::simdgroups;
  static constexpr int values = is_of_rows ? Result::rows : Result::columns;
  static constexpr int in_fragment = is_of_rows ? 2 : 4;
  static constexpr int capacity = (values + 15) / 16 * in_fragment;

  static constexpr TensorPlace place(unsigned lane, unsigned, int i, bool shuffled) {
    const int first = is_of_rows ? fragment_row(lane) : fragment_column(lane);
    const int at = shuffled ? 32 * i + of_another(shuffled_lane(lane, TensorRole::destination))
                            : 16 * (i / in_fragment) + first + i % in_fragment * (is_of_rows ? 8 : 1);
    return {0, at, at < values};
  }
  // One of 32 rows or columns, each of another lane, that a lane's fragments do not have.
  static constexpr int of_another(unsigned lane) {
    const int row = fragment_row(lane), column = fragment_column(lane) / 4;
    return is_of_rows ? (row + 1) % 8 + 8 * column : (column + 1) % 4 * 4 + row % 4 + 16 * (row / 4);
  }
  MITTENS_RUNTIME static TensorPlace here_is(int i) {
    return place(runtime->thread->lane, 0, i, has_shuffled_layout());
  }
};

// Whether each element of one layout has one of another: the same one, or the value of its row or column.
template <typename From, typename To>
constexpr bool is_mapped = false;
template <TensorRole from, TensorRole to, int rows, int columns, int simdgroups>
constexpr bool
    is_mapped<FragmentLayout<from, rows, columns, simdgroups>, FragmentLayout<to, rows, columns, simdgroups>> = true;
template <TensorRole from, int rows, int columns, bool of_rows, typename Result>
constexpr bool is_mapped<FragmentLayout<from, rows, columns, 1>, ReductionLayout<of_rows, Result>> =
    ReductionLayout<of_rows, Result>::values == (of_rows ? rows : columns);
template <bool of_rows, typename From, typename To>
constexpr bool is_mapped<ReductionLayout<of_rows, From>, ReductionLayout<of_rows, To>> =
    ReductionLayout<of_rows, From>::values == ReductionLayout<of_rows, To>::values;

// Whether a tensor in memory has a place.
template <typename Tensor>
MITTENS_INLINE bool is_in(const Tensor& tensor, TensorPlace place) {
  const bool is_column = place.is_valid && place.column < tensor.get_extent(0);
  if constexpr (Tensor::get_rank() == 1) {
    return is_column;
  } else {
    return is_column && place.row < tensor.get_extent(1);
  }
}

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
  static_assert(!mittens::is_of_four_bits<T>, "not covered: cooperative tensors of 4 bits");

  cooperative_tensor() = default;
  cooperative_tensor(const cooperative_tensor&) = default;
  cooperative_tensor& operator=(const cooperative_tensor&) = default;
  // A kernel may ask for the places after it has read the elements.
  MITTENS_INLINE ~cooperative_tensor() {
    if (run_.file && is_by_index_ && Layout::simdgroups > 0 && !was_asked() && mittens::has_shuffled_layout()) {
      mittens::fault(Layout::role == mittens::TensorRole::reduction
                         ? "the result of a reduction was read by index, and its places were never asked "
                           "(get_multidimensional_index): which element a lane holds differs between GPUs"
                         : "the result of matmul2d::run was read by index, and its places were never asked "
                           "(get_multidimensional_index): which element a lane holds differs between GPUs",
                     run_);
    }
  }

  // Elements one after the other, those that are not there too.
  template <typename Tensor>
  class Iterator {
   public:
    Iterator(Tensor& tensor, int i) : tensor_(&tensor), i_(i) {}
    MITTENS_INLINE auto& operator*() const {
      return (*tensor_)[ushort(i_)];
    }
    Iterator& operator+=(int count) {
      i_ += count;
      return *this;
    }
    Iterator& operator-=(int count) {
      i_ -= count;
      return *this;
    }
    Iterator& operator++() {
      return *this += 1;
    }
    Iterator& operator--() {
      return *this -= 1;
    }
    Iterator operator++(int) {
      return {*tensor_, i_++};
    }
    Iterator operator--(int) {
      return {*tensor_, i_--};
    }
    Iterator operator+(int count) const {
      return {*tensor_, i_ + count};
    }
    Iterator operator-(int count) const {
      return {*tensor_, i_ - count};
    }
    int operator-(const Iterator& other) const {
      return i_ - other.i_;
    }
    bool operator==(const Iterator& other) const {
      return i_ == other.i_;
    }
    bool is_valid_element() const {
      return tensor_->is_valid_element(ushort(i_));
    }
    auto get_multidimensional_index() const {
      return tensor_->get_multidimensional_index(ushort(i_));
    }
    ushort mittens_index() const {
      return ushort(i_);
    }
    Tensor& mittens_tensor() const {
      return *tensor_;
    }

   private:
    Tensor* tensor_;
    int i_;
  };
  using iterator = Iterator<cooperative_tensor>;
  using const_iterator = Iterator<const cooperative_tensor>;

  static constexpr size_t get_rank() {
    return Extents::rank();
  }
  static constexpr ushort get_capacity() {
    return capacity;
  }
  MITTENS_INLINE bool is_valid_element(ushort i) const {
    if constexpr (Layout::role == mittens::TensorRole::destination) {
      ask();  // a sum of all elements asks for no more
    }
    return i < capacity && Layout::here_is(i).is_valid;
  }
  template <typename Tensor>
  MITTENS_INLINE bool is_valid_element(Iterator<Tensor> it) const {
    return is_valid_element(it.mittens_index());
  }
  template <typename I>
  bool get_mask(I) const {
    static_assert(sizeof(I) == 0, "Metal's headers have no get_mask, which a comment in them uses: is_valid_element");
  }
  MITTENS_INLINE array<int, Extents::rank()> get_multidimensional_index(ushort i) const {
    mittens_check(i);
    ask();
    return index_of(Layout::here_is(i));
  }
  template <typename Tensor>
  MITTENS_INLINE array<int, Extents::rank()> get_multidimensional_index(Iterator<Tensor> it) const {
    return get_multidimensional_index(it.mittens_index());
  }
  // Reads zero for an element that is not there.
  MITTENS_INLINE T get(ushort i) const {
    return is_valid_element(i) ? (*this)[i] : T(0);
  }
  MITTENS_INLINE void set(ushort i, T value) {
    if (is_valid_element(i)) {
      (*this)[i] = value;
    }
  }
  MITTENS_INLINE T& operator[](ushort i) {
    mittens_check(i);
    filled_[i / 64] |= 1ul << i % 64;
    is_by_index_ = true;
    return elements_[i];
  }
  MITTENS_INLINE const T& operator[](ushort i) const {
    mittens_check(i);
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
  // Finds the element for one of another tensor: the same one, or the value of its row or column.
  template <typename Other>
  MITTENS_INLINE iterator map_iterator(Other other, mittens::Site site = mittens::here()) {
    return {*this, mapped(other, site)};
  }
  template <typename Other>
  MITTENS_INLINE const_iterator map_iterator(Other other, mittens::Site site = mittens::here()) const {
    return {*this, mapped(other, site)};
  }

  template <typename U, typename E>
  MITTENS_INLINE void load(const tensor<U, E, tensor_inline>& source) {
    using Source = tensor<U, E, tensor_inline>;
    static_assert(__is_same(typename Source::mittens_value_type, T),
                  "a cooperative tensor is loaded from a tensor of its own type");
    static_assert(Source::get_rank() == get_rank(), "a cooperative tensor is loaded from a tensor of its own rank");
    typename Source::MittensReader read(source);
    for (int i = 0; i < capacity; ++i) {
      const auto place = Layout::here_is(i);
      elements_[i] = mittens::is_in(source, place) ? read(index_of<typename E::index_type>(place)) : T(0);
    }
    mittens_fill();
  }
  template <typename U, typename E>
  MITTENS_INLINE void store(const tensor<U, E, tensor_inline>& target, mittens::Site site = mittens::here()) const {
    using Target = tensor<U, E, tensor_inline>;
    static_assert(__is_same(typename Target::value_type, T),
                  "a cooperative tensor is stored to a tensor of its own type");
    static_assert(Target::get_rank() == get_rank(), "a cooperative tensor is stored to a tensor of its own rank");
    if (!mittens_is_filled()) {
      mittens::fault("a cooperative tensor is stored with elements that nothing filled", site);
    }
    ask();
    for (int i = 0; i < capacity; ++i) {
      const auto place = Layout::here_is(i);
      if (mittens::is_in(target, place)) {
        target[index_of<typename E::index_type>(place)] = elements_[i];
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
  MITTENS_INLINE static void mittens_check(ushort i) {
    if (i >= capacity) {
      mittens::fault("an element is used that this cooperative tensor does not have: get_capacity() says how many a "
                     "thread holds",
                     {});
    }
  }

  MITTENS_INLINE void mittens_fill() {
    for (auto& word : filled_) {
      word = ~0ul;
    }
    is_by_index_ = false;
  }
  MITTENS_INLINE void mittens_is_result_of(mittens::Site run) {
    mittens_fill();
    run_ = run;
  }
  MITTENS_INLINE const T* mittens_elements() const {
    return elements_;
  }
  // Asks on behalf of the kernel, for an operation that knows the places: what was done by index was done to each alike.
  MITTENS_INLINE void mittens_ask() const {
    ask();
  }

 private:
  template <typename Index = int>
  static array<Index, Extents::rank()> index_of(mittens::TensorPlace place) {
    if constexpr (Extents::rank() == 1) {
      return {Index(place.column)};
    } else {
      return {Index(place.column), Index(place.row)};
    }
  }
  template <typename It>
  MITTENS_INLINE int mapped(It other, mittens::Site site) const {
    using Other = typename remove_cv_t<remove_reference_t<decltype(other.mittens_tensor())>>::layout;
    static_assert(mittens::is_mapped<Other, Layout>,
                  "map_iterator maps elements to those of a result of the same sizes, or to its rows' or columns' "
                  "values");
    ask();
    other.mittens_tensor().mittens_ask();
    other.mittens_tensor().mittens_check(other.mittens_index());
    const auto from = Other::here_is(other.mittens_index());
    for (int i = 0; i < capacity; ++i) {
      const auto place = Layout::here_is(i);
      bool is_same = place.is_valid == from.is_valid;
      if constexpr (Layout::role != mittens::TensorRole::reduction) {
        is_same = is_same && place.row == from.row && place.column == from.column;
      } else if constexpr (Other::role != mittens::TensorRole::reduction && Layout::of_rows) {
        is_same = place.column == from.row;
      } else {
        is_same = place.column == from.column;
      }
      if (is_same) {
        return i;
      }
    }
    mittens::fault("map_iterator finds no element in this lane: ask is_iterator_compatible before, and pass the values "
                   "through memory where it says no",
                   site);
    return 0;
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
