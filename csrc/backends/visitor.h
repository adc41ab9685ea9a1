// std::visit over the kinds of Argument.
#pragma once

namespace mittens {

template <typename... Functions>
struct Visitor : Functions... {
  using Functions::operator()...;
};
template <typename... Functions>
Visitor(Functions...) -> Visitor<Functions...>;

}  // namespace mittens
