// Reductions of a cooperative tensor's rows and columns, for the simulator.
#pragma once

namespace mpp::tensor_ops {

enum class reduction_operation { sum, max, min };

template <typename T>
struct reduction_operation_identity {
  static constexpr T sum_identity = T(0);
  static constexpr T max_identity = metal::numeric_limits<T>::lowest();
  static constexpr T min_identity = metal::numeric_limits<T>::max();
};

}  // namespace mpp::tensor_ops

namespace mittens {

// A reduction spread over the lanes of a SIMD-group.
template <typename Source, typename Destination>
struct TensorReduction {
  using T = typename Source::element_type;
  using From = typename Source::layout;
  using To = typename Destination::layout;

  const T* elements;
  T* results;
  mpp::tensor_ops::reduction_operation operation;
  T identity;
  unsigned lane;
  bool is_shuffled;

  __attribute__((no_sanitize("coverage"))) static T folded(mpp::tensor_ops::reduction_operation operation, T a, T b) {
    using mpp::tensor_ops::reduction_operation;
    return operation == reduction_operation::sum   ? T(a + b)
           : operation == reduction_operation::max ? metal::max(a, b)
                                                   : metal::min(a, b);
  }
  __attribute__((no_sanitize("coverage"))) static void combine(abi::Lanes& lanes) {
    static T values[To::values];
    TensorReduction* all[abi::simd_width];
    for (unsigned lane = 0; lane < abi::simd_width; ++lane) {
      all[lane] = value_of<TensorReduction*>(lanes.value[lane]);
    }
    for (T& value : values) {
      value = all[0]->identity;
    }
    for (const TensorReduction* of : all) {
      for (int i = 0; i < Source::capacity; ++i) {
        const TensorPlace place = From::place(of->lane, 0, i, of->is_shuffled);
        if (place.is_valid) {
          T& value = values[To::of_rows ? place.row : place.column];
          value = folded(all[0]->operation, value, of->elements[i]);
        }
      }
    }
    for (const TensorReduction* of : all) {
      for (int i = 0; i < Destination::capacity; ++i) {
        const TensorPlace place = To::place(of->lane, 0, i, of->is_shuffled);
        of->results[i] = place.is_valid ? values[place.column] : T(0);
      }
    }
  }
  MITTENS_RUNTIME static void run(TensorReduction reduction, const char* name, Site site) {
    reduction.lane = runtime->thread->lane;
    reduction.is_shuffled = has_shuffled_layout();
    TensorReduction* const pointer = &reduction;
    meet(simdgroup_scope, name, site, MITTENS_CALLER, &pointer, sizeof(pointer), combine, abi::reduction_fragments);
  }
};

template <bool of_rows, typename Source, typename Destination>
MITTENS_INLINE void reduce_tensor(Source& source, Destination& destination,
                                  mpp::tensor_ops::reduction_operation operation,
                                  typename Source::element_type identity, const char* name, Site site) {
  using From = typename Source::layout;
  static_assert(From::role == TensorRole::destination && From::simdgroups == 1,
                "a reduction is of the destination of a matmul2d with the scope execution_simdgroup");
  static_assert(__is_same(typename Destination::layout, ReductionLayout<of_rows, From>),
                "the destination of a reduction is of another operation: reduce_rows takes a tensor of "
                "get_row_reduction_destination_cooperative_tensor, reduce_columns one for columns");
  if (!source.mittens_is_filled()) {
    fault("a reduction reads a cooperative tensor with elements that nothing filled", site);
  }
  source.mittens_ask();
  TensorReduction<Source, Destination>::run(
      {source.mittens_elements(), destination.mittens_elements(), operation, identity, 0, false}, name, site);
  destination.mittens_is_result_of(site);
}

}  // namespace mittens

namespace mpp::tensor_ops {

template <typename T, typename E, typename F, typename From, typename To>
MITTENS_INLINE void reduce_rows(metal::cooperative_tensor<T, E, From>& source,
                                metal::cooperative_tensor<T, F, To>& destination,
                                reduction_operation operation = reduction_operation::sum,
                                T identity = reduction_operation_identity<T>::sum_identity,
                                mittens::Site site = mittens::here()) {
  mittens::reduce_tensor<true>(source, destination, operation, identity, "reduce_rows", site);
}
template <typename T, typename E, typename F, typename From, typename To>
MITTENS_INLINE void reduce_columns(metal::cooperative_tensor<T, E, From>& source,
                                   metal::cooperative_tensor<T, F, To>& destination,
                                   reduction_operation operation = reduction_operation::sum,
                                   T identity = reduction_operation_identity<T>::sum_identity,
                                   mittens::Site site = mittens::here()) {
  mittens::reduce_tensor<false>(source, destination, operation, identity, "reduce_columns", site);
}

// Whether map_iterator of the destination finds an element for each of the source's.
template <typename T, typename U, typename E, typename F, typename From, typename To>
bool is_iterator_compatible(const metal::cooperative_tensor<T, E, From>&, const metal::cooperative_tensor<U, F, To>&) {
  return mittens::is_mapped<From, To> && (__is_same(From, To) || !mittens::has_shuffled_layout());
}

}  // namespace mpp::tensor_ops
