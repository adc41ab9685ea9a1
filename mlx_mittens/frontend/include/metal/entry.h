// From a launch's buffers to a kernel's parameters, by the types that the compiler deduces from the kernel itself.
#pragma once

namespace mittens {

// Anything in memory: the address of a pointer parameter, the value of a reference. A is void* where one
// address space holds all others; in SPIR-V none does, and A keeps its own.
template <typename A>
struct Address {
  A address;
  template <typename P>
  MITTENS_INLINE P as() const {
    if constexpr (__is_pointer(P)) {
      return (P)address;
    } else {
      return *(__remove_reference_t(P)*)address;
    }
  }
};

// A position or an index, in the type and the number of dimensions that the kernel asks for.
template <typename V>
struct Position {
  V value;
  template <typename P>
  MITTENS_INLINE P as() const {
    if constexpr (!Vector<V>::is_vector) {
      return P(value);
    } else if constexpr (!Vector<P>::is_vector) {
      return P(value[0]);
    } else {
      P result;
      for (int i = 0; i < Vector<P>::size; ++i) {
        result[i] = Element<P>(value[i]);
      }
      return result;
    }
  }
};
template <typename V>
Position(V) -> Position<V>;

template <typename... P, typename... A>
MITTENS_INLINE void invoke(void (*kernel)(P...), A... arguments) {
  kernel(arguments.template as<P>()...);
}

template <typename Piece, typename T>
MITTENS_INLINE Piece* piece_of(T* pointer) {
  return (Piece*)pointer;
}
template <typename Piece, typename T>
MITTENS_INLINE MITTENS_DEVICE Piece* piece_of(MITTENS_DEVICE T* pointer) {
  return (MITTENS_DEVICE Piece*)pointer;
}
template <typename Piece, typename T>
MITTENS_INLINE MITTENS_THREADGROUP Piece* piece_of(MITTENS_THREADGROUP T* pointer) {
  return (MITTENS_THREADGROUP Piece*)pointer;
}

#ifdef __SPIRV__
template <typename Piece, typename T>
MITTENS_INLINE MITTENS_CONSTANT Piece* piece_of(MITTENS_CONSTANT T* pointer) {
  return (MITTENS_CONSTANT Piece*)pointer;
}
#endif

// A copy from one address space to another, for which a struct has no operator; in pieces as large as it is aligned.
template <typename To, typename From>
MITTENS_INLINE void assign(To* to, From* from) {
  using Value = metal::remove_cv_t<metal::remove_addrspace_t<From>>;
  constexpr size_t step = alignof(Value) < 16 ? alignof(Value) : 16;
  using Piece = metal::conditional_t<
      step == 1, uchar,
      metal::conditional_t<step == 2, ushort,
                           metal::conditional_t<step == 4, uint, metal::conditional_t<step == 8, uint2, uint4>>>>;
  for (size_t i = 0; i < sizeof(Value) / step; ++i) {
    piece_of<Piece>(to)[i] = piece_of<Piece>(from)[i];
  }
}

#if defined(__SPIRV__) || defined(__NVPTX__)
// The type of an entry's parameter. A pointer stays a pointer. PTX passes the object of a reference by value, and
// SPIR-V passes its address.
template <unsigned index, typename K>
struct Parameter;
template <unsigned index, typename... P>
struct Parameter<index, void (*)(P...)> {
  using Own = __type_pack_element<index, P...>;
#ifdef __SPIRV__
  using Referred = __remove_reference_t(Own)*;
#else
  using Referred = metal::decay_t<Own>;
#endif
  using type = metal::conditional_t<__is_pointer(Own), Own, Referred>;
};
template <unsigned index, typename K>
using parameter_t = typename Parameter<index, K>::type;
#endif

#ifdef __SPIRV__
template <typename T>
MITTENS_INLINE Address<T> address_of(T parameter) {
  return {parameter};
}

MITTENS_INLINE Address<MITTENS_THREADGROUP char*> dynamic_threadgroup_memory() {
  static __attribute__((address_space(3), loader_uninitialized)) char memory[MITTENS_THREADGROUP_BYTES];
  return {memory};
}
#elif !defined(__NVPTX__)
MITTENS_RUNTIME inline Address<void*> argument(void* const* buffers, unsigned index) {
  return {buffers[index]};
}
#else
// A pointer's contents, where the launch hands over the bytes themselves.
template <unsigned size>
struct alignas(16) Bytes {
  char data[size];
};

template <typename T>
MITTENS_INLINE Address<void*> address_of(const T& parameter) {
  if constexpr (__is_pointer(T)) {
    return {(void*)parameter};
  } else {
    return {(void*)&parameter};
  }
}

extern "C" MITTENS_THREADGROUP char mittens_dynamic_threadgroup_memory[];
MITTENS_INLINE Address<void*> dynamic_threadgroup_memory() {
  return {(void*)mittens_dynamic_threadgroup_memory};
}
#endif

}  // namespace mittens
