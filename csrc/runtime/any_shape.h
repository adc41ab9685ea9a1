// Ops in functions that MLX traces once for all shapes, as mx.compile(.., shapeless=True) does. Nothing in the graph
// of such a function may depend on the shapes of its trace, as a reshape to numbers does, or the choice between a
// kernel and mx. There a call of an op is one primitive, AnyShape, which calls the op when it is evaluated, at the
// shapes that it then has. Derivatives and vmap of that primitive are such primitives too, so that no op needs to know
// of this.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "mlx/utils.h"
#include "runtime/fallback.h"
#include "runtime/primitive.h"

namespace mittens {

// Whether this thread traces a function for all shapes.
bool traces_any_shape();

// While an instance exists, ops on this thread build graphs of their own also in such a trace.
class Expanding {
 public:
  Expanding();
  ~Expanding();
  Expanding(const Expanding&) = delete;
  Expanding& operator=(const Expanding&) = delete;
};

// The same, without counting calls that go to mx: the caller only asks for shapes of results.
struct AskingForShapes {
  Expanding expanding;
  Uncounted uncounted;
};

// A function that builds results from arrays on one stream.
using ArrayFunction = std::function<Arrays(const Arrays&)>;

// The results of a function as one primitive. op: the op that the function calls.
Arrays apply_for_any_shape(const char* op, ArrayFunction function, const Arrays& inputs, mx::Stream stream);

// Stands in for an array, with its shape and dtype alone.
inline mx::array stand_in_for(const mx::array& array) {
  return {array.shape(), array.dtype(), nullptr, {}};
}

// Visits the arrays in an argument or a result of an op. A struct of an op that holds arrays specializes this.
template <typename T>
struct ArraysIn {
  static_assert(std::is_arithmetic_v<T> || std::is_same_v<T, std::string> || std::is_same_v<T, mx::Dtype> ||
                    std::is_same_v<T, std::monostate>,
                "the signature of an op has a type T that may hold arrays: specialize ArraysIn<T>");
  template <typename Visitor>
  static void visit(T&, const Visitor&) {}
};
template <>
struct ArraysIn<mx::array> {
  template <typename Visitor>
  static void visit(mx::array& array, const Visitor& visitor) {
    visitor(array);
  }
};
template <>
struct ArraysIn<mx::StreamOrDevice> {
  template <typename Visitor>
  static void visit(mx::StreamOrDevice&, const Visitor&) {}
};
template <typename T>
struct ArraysIn<std::optional<T>> {
  template <typename Visitor>
  static void visit(std::optional<T>& value, const Visitor& visitor) {
    if (value) {
      ArraysIn<T>::visit(*value, visitor);
    }
  }
};
template <typename T, typename Allocator>
struct ArraysIn<std::vector<T, Allocator>> {
  template <typename Visitor>
  static void visit(std::vector<T, Allocator>& values, const Visitor& visitor) {
    for (T& value : values) {
      ArraysIn<T>::visit(value, visitor);
    }
  }
};
template <typename... Types>
struct ArraysIn<std::variant<Types...>> {
  template <typename Visitor>
  static void visit(std::variant<Types...>& value, const Visitor& visitor) {
    std::visit([&](auto& held) { ArraysIn<std::remove_reference_t<decltype(held)>>::visit(held, visitor); }, value);
  }
};
template <typename... Types>
struct ArraysIn<std::tuple<Types...>> {
  template <typename Visitor>
  static void visit(std::tuple<Types...>& values, const Visitor& visitor) {
    std::apply([&](Types&... each) { (ArraysIn<Types>::visit(each, visitor), ...); }, values);
  }
};
template <typename First, typename Second>
struct ArraysIn<std::pair<First, Second>> {
  template <typename Visitor>
  static void visit(std::pair<First, Second>& values, const Visitor& visitor) {
    ArraysIn<First>::visit(values.first, visitor);
    ArraysIn<Second>::visit(values.second, visitor);
  }
};

template <typename T>
Arrays arrays_in(T& value) {
  Arrays arrays;
  ArraysIn<T>::visit(value, [&](mx::array& array) { arrays.push_back(array); });
  return arrays;
}

template <typename T>
void replace_arrays(T& value, const Arrays& arrays) {
  size_t next = 0;
  ArraysIn<T>::visit(value, [&](mx::array& array) { array = arrays[next++]; });
}

// Wraps an op, whose last argument is its stream, so that its calls in a function for all shapes become AnyShape.
template <typename Result, typename... Arguments>
auto for_any_shape(const char* op, Result (*function)(Arguments...)) {
  using Given = std::tuple<std::remove_cvref_t<Arguments>...>;
  constexpr size_t last = sizeof...(Arguments) - 1;
  static_assert(std::is_same_v<std::tuple_element_t<last, Given>, mx::StreamOrDevice>);
  return [op, function](Arguments... arguments) -> Result {
    if (!traces_any_shape()) {
      return function(arguments...);
    }
    Given given(arguments...);
    const Arrays inputs = arrays_in(given);
    // Keep shapes and types alone: arrays here would live as long as the graph.
    ArraysIn<Given>::visit(given, [](mx::array& array) { array = stand_in_for(array); });
    Result result = [&] {
      const AskingForShapes asking;
      return std::apply(function, given);
    }();
    const mx::Stream stream = mx::to_stream(std::get<last>(given));
    std::get<last>(given) = stream;
    ArrayFunction call = [function, given](const Arrays& arrays) {
      Given with = given;
      replace_arrays(with, arrays);
      Result result = std::apply(function, with);
      return arrays_in(result);
    };
    replace_arrays(result, apply_for_any_shape(op, std::move(call), inputs, stream));
    return result;
  };
}

}  // namespace mittens
