// Binding an op of two parts: the attempt, which gives nothing where no kernel covers a call, and the op, which goes on
// to mx there. The patch of mx's own functions calls the attempt, since it has originals to go on to.
#pragma once

#include <optional>
#include <stdexcept>
#include <string>

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include "python/array_caster.h"
#include "runtime/fallback.h"

namespace mittens {

// Bad arguments give nothing either: mx is then to say what is wrong with them.
template <typename Result, typename... Arguments>
auto lenient(const char* op, std::optional<Result> (*attempt)(Arguments...)) {
  return [op, attempt](Arguments... arguments) -> std::optional<Result> {
    try {
      return attempt(arguments...);
    } catch (const std::invalid_argument&) {
      return fallback(op, "arguments that mx is to judge");
    }
  };
}

template <typename Attempt, typename Function, typename... Extra>
void define(nanobind::module_& module, const char* op, Attempt attempt, Function function, const Extra&... extra) {
  module.def(op, function, extra...);
  module.def(("try_" + std::string(op)).c_str(), lenient(op, attempt), extra...);
}

}  // namespace mittens
