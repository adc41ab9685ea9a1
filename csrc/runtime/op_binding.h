// Binding an op of two parts: the attempt, which returns nothing where no kernel covers a call, and the op, which then
// calls mx. The patch of mx's own functions calls the attempt, since it has originals to call.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/variant.h>

#include "python/array_caster.h"
#include "runtime/any_shape.h"
#include "runtime/fallback.h"

namespace mittens {

// Whether a type is one of the standard library's.
template <typename T>
constexpr bool is_standard() {
  constexpr std::string_view name = __PRETTY_FUNCTION__;  // "... [with T = std::vector<int>]", "... [T = int]"
  return name.find("T = std::") != name.npos;
}

// Python's objects become types of the standard library by headers of nanobind's, which the file of an op includes.
// Each call would be a TypeError without them: that is an error of the build here.
template <typename T>
struct Converter {
  static_assert(!nanobind::detail::is_base_caster_v<nanobind::detail::make_caster<T>> || !is_standard<T>(),
                "the signature of an op has a type T that nanobind cannot convert: include the header for it, as "
                "<nanobind/stl/vector.h> for std::vector");
  static constexpr bool found = true;
};
template <typename T>
struct Convertible {
  static constexpr bool value = Converter<T>::found;
};
template <typename T>
struct Convertible<std::optional<T>> : Convertible<T> {};
template <typename T, typename Allocator>
struct Convertible<std::vector<T, Allocator>> {
  static constexpr bool value = Converter<std::vector<T, Allocator>>::found && Convertible<T>::value;
};
template <typename First, typename Second>
struct Convertible<std::pair<First, Second>> {
  static constexpr bool value =
      Converter<std::pair<First, Second>>::found && Convertible<First>::value && Convertible<Second>::value;
};
template <typename... Types>
struct Convertible<std::variant<Types...>> {
  static constexpr bool value = (Convertible<Types>::value && ...);
};
template <typename... Types>
struct Convertible<std::tuple<Types...>> {
  static constexpr bool value = Converter<std::tuple<Types...>>::found && (Convertible<Types>::value && ...);
};

// Binds a function of C++, with a stream as its last argument where it is an op.
template <typename Result, typename... Arguments, typename... Extra>
void bind_function(nanobind::module_& module, const char* name, Result (*function)(Arguments...),
                   const Extra&... extra) {
  static_assert((Convertible<std::remove_cvref_t<Arguments>>::value && ...) && Convertible<Result>::value);
  constexpr bool is_op = (std::is_same_v<std::remove_cvref_t<Arguments>, mx::StreamOrDevice> || ...);
  if constexpr (is_op) {
    module.def(name, for_any_shape(name, function), extra...);
  } else {
    module.def(name, function, extra...);
  }
}

// Returns nothing for bad arguments too: mx then raises its own error. function: the op itself, which a function for
// all shapes calls where the attempt covers the shapes of the trace.
template <typename Result, typename... Arguments, typename Function>
auto lenient(const char* op, std::optional<Result> (*attempt)(Arguments...), Function function) {
  return [op, attempt, function = for_any_shape(op, function)](Arguments... arguments) -> std::optional<Result> {
    try {
      std::optional<Result> result = attempt(arguments...);
      if (result && traces_any_shape()) {
        return function(arguments...);
      }
      return result;
    } catch (const std::invalid_argument&) {
      return fallback(op, "arguments that mx is to judge");
    }
  };
}

template <typename Attempt, typename Function, typename... Extra>
void define(nanobind::module_& module, const char* op, Attempt attempt, Function function, const Extra&... extra) {
  bind_function(module, op, function, extra...);
  module.def(("try_" + std::string(op)).c_str(), lenient(op, attempt, function), extra...);
}

}  // namespace mittens
