// Names of kernels and files, each kept once for the life of the process: made of parts without taking memory, compared
// and looked up by address. All of this is on the path of every call; names that do not depend on it are constants,
// which are looked up but once.
#pragma once

#include <array>
#include <charconv>
#include <concepts>
#include <cstddef>
#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>

#include "mlx/dtype.h"

namespace mittens {

class Name {
 public:
  Name() : text_(none()) {}
  Name(const char* text) : Name(std::string_view(text)) {}
  Name(const std::string& text) : Name(std::string_view(text)) {}
  Name(std::string_view text) : text_(kept(text)) {}

  const std::string& text() const {
    return *text_;
  }
  operator const std::string&() const {
    return *text_;
  }
  bool operator==(const Name&) const = default;

 private:
  friend std::hash<Name>;

  static const std::string* none() {
    static const std::string* const text = kept("");
    return text;
  }
  static const std::string* kept(std::string_view text);

  const std::string* text_;
};

// Text that is put together on the stack.
class ShortText {
 public:
  void add(std::string_view part) {
    if (part.size() > sizeof(text_) - size_) {
      throw std::length_error("[mlx_mittens] a name that starts with " + std::string(text_, size_) + " is too long");
    }
    part.copy(text_ + size_, part.size());
    size_ += part.size();
  }
  void add(const ShortText& part) {
    add(std::string_view(part));
  }
  void add(std::integral auto number) {
    char digits[24];
    add(std::string_view(digits, std::to_chars(digits, digits + sizeof(digits), number).ptr - digits));
  }
  operator std::string_view() const {
    return {text_, size_};
  }

 private:
  char text_[128];
  size_t size_ = 0;
};

// The host name of a kernel: "<op>_<parts>_<dtype>", or "<op>_<dtype>" of an op with one variant, which needs no name.
// Parts are whole numbers and text that stays where it is, put together as they are. Each thread knows the last names
// that it made, by their parts.
template <typename... Parts>
Name kernel_name(mlx::core::Dtype dtype, const char* op, Parts... parts) {
  using Key = std::tuple<mlx::core::Dtype::Val, const char*, Parts...>;
  struct Known {
    Key key;
    std::optional<Name> name;
  };
  static thread_local std::array<Known, 32> known{};
  const Key key{dtype.val(), op, parts...};
  size_t hash = 0;
  std::apply([&](auto... part) { ((hash = hash * 31 + std::hash<decltype(part)>()(part)), ...); }, key);
  Known& mine = known[(hash ^ hash >> 6) % known.size()];
  if (!mine.name || mine.key != key) {
    ShortText variant, text;
    (variant.add(parts), ...);
    text.add(op);
    if (!std::string_view(variant).empty()) {
      text.add("_");
      text.add(variant);
    }
    text.add(dtype == mlx::core::float32 ? "_float32" : dtype == mlx::core::float16 ? "_float16" : "_bfloat16");
    mine = {key, Name(std::string_view(text))};
  }
  return *mine.name;
}

}  // namespace mittens

template <>
struct std::hash<mittens::Name> {
  size_t operator()(const mittens::Name& name) const {
    return std::hash<const void*>()(name.text_);
  }
};
