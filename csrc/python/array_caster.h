// mx.array as an argument from Python. nanobind tells an instance's class by the address of its type_info, and by its
// name where the addresses differ, as they do between modules: to save a comparison of names for each array, this asks
// by the type_info that mlx.core registered. Every header that names arrays to nanobind includes this one.
#pragma once

#include <typeinfo>

#include <nanobind/nanobind.h>

#include "mlx/array.h"

namespace mittens {

inline const std::type_info* array_type = &typeid(mlx::core::array);

// Once mlx.core is there; before it any other is taken by its name.
inline void find_array_type() {
  if (const nanobind::handle type = nanobind::type<mlx::core::array>()) {
    array_type = &nanobind::type_info(type);
  }
}

}  // namespace mittens

namespace nanobind::detail {

template <>
struct type_caster<mlx::core::array> : type_caster_base<mlx::core::array> {
  using Array = mlx::core::array;

#if NB_VERSION_MAJOR >= 3
  bool from_python(handle source, uint32_t flags, cleanup_list* cleanup) noexcept {
    return NB_CALL(nb_type_get)(NB_CTX_C(cleanup), mittens::array_type, source.ptr(), flags, cleanup,
                                reinterpret_cast<void**>(&value_));
  }
#else  // releases of MLX before 0.32.3
  bool from_python(handle source, uint8_t flags, cleanup_list* cleanup) noexcept {
    return nb_type_get(mittens::array_type, source.ptr(), flags, cleanup, reinterpret_cast<void**>(&value_));
  }
#endif

  template <typename T>
  bool can_cast() const noexcept {
    return std::is_pointer_v<T> || value_ != nullptr;
  }

  operator Array*() {
    return value_;
  }
  operator Array&() {
    return *value_;
  }
  operator Array&&() {
    return static_cast<Array&&>(*value_);
  }

 private:
  Array* value_;
};

}  // namespace nanobind::detail
