// Errors of bad arguments that a person can act on: the op, the argument, its value, and the expected one.
#pragma once

#include <cmath>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

#include "mlx/array.h"
#include "mlx/utils.h"
#include "mlx_internals/releases.h"
#include "runtime/exporting.h"
#include "runtime/fallback.h"

namespace mittens {

namespace mx = mlx::core;

// An array of a dtype that an op does not take. Python sees a TypeError that is a ValueError too, as MLX raises.
class DtypeError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

namespace checks {

template <typename Error = std::invalid_argument, typename... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
  std::ostringstream message;
  message << "[" << op << "] ";
  (message << ... << parts);
  throw Error(message.str());
}

inline void has_axis(const char* op, const char* name, const mx::array& array) {
  if (array.ndim() == 0) {
    fail(op, name, " has no dimensions: expected at least one, the last of which is normalized");
  }
}

// One value for each column of x.
inline void per_column(const char* op, const char* name, const mx::array& array, const mx::array& x) {
  if (array.ndim() != 1) {
    fail(op, name, " has shape ", array.shape(), ": expected one dimension with ", x.shape(-1), " elements");
  }
  if (array.shape(0) != x.shape(-1)) {
    fail(op, name, " has ", array.size(), " elements, x has ", x.shape(-1), " columns: expected one ", name,
         " per column");
  }
}

inline void same_shape(const char* op, const char* name, const mx::array& array, const mx::array& x) {
  if (array.shape() != x.shape()) {
    fail(op, name, " has shape ", array.shape(), ", x has shape ", x.shape(), ": expected the same shape");
  }
}

inline void epsilon(const char* op, float eps) {
  if (!std::isfinite(eps) || eps < 0) {
    fail(op, "eps is ", eps, ": expected a finite number that is not negative");
  }
}

// An argument that may be absent.
struct Argument {
  Argument(const char* name, const mx::array& array) : name(name), array(&array) {}
  Argument(const char* name, const std::optional<mx::array>& array) : name(name), array(array ? &*array : nullptr) {}

  const char* name;
  const mx::array* array;
};

// The dtype that the arguments promote to; the first is not absent.
inline mx::Dtype promoted(std::initializer_list<Argument> arguments) {
  mx::Dtype dtype = arguments.begin()->array->dtype();
  for (const auto& [name, array] : arguments) {
    dtype = array && array->dtype() != dtype ? mx::promote_types(dtype, array->dtype()) : dtype;
  }
  return dtype;
}

// Names the argument that makes a dtype of the result which the op does not have.
[[noreturn]] inline void refuse(const char* op, std::initializer_list<Argument> arguments, mx::Dtype dtype) {
  for (const auto& [name, array] : arguments) {
    if (array && array->dtype() == dtype) {
      fail<DtypeError>(op, name, " has dtype ", dtype, ": expected float32, float16 or bfloat16");
    }
  }
  fail<DtypeError>(op, arguments.begin()->name, " has a dtype that makes ", dtype,
                   " of the result: expected float32, float16 or bfloat16");
}

// The dtype that the arguments promote to, which must be floating: float64 goes to mx.
inline mx::Dtype floating(const char* op, std::initializer_list<Argument> arguments) {
  const mx::Dtype dtype = promoted(arguments);
  if (!has_kernels(dtype) && !mx::issubdtype(dtype, mx::floating)) {
    refuse(op, arguments, dtype);
  }
  return dtype;
}

// The same of an op that mx has not in float64 either.
inline mx::Dtype kernel_dtype(const char* op, std::initializer_list<Argument> arguments) {
  const mx::Dtype dtype = promoted(arguments);
  if (!has_kernels(dtype)) {
    refuse(op, arguments, dtype);
  }
  return dtype;
}

// Where the op is to run. Throws ExportError in a function that MLX exports: there it is to run nowhere.
inline mx::Stream checked_stream(const char* op, mx::StreamOrDevice where) {
  refuse_export(op);
  try {
    return mx::to_stream(where);
  } catch (const std::invalid_argument& error) {
    fail(op, "stream: ", error.what(), " For an NVIDIA GPU: pip install \"mlx[cuda13]==", MITTENS_MLX_VERSION, "\"");
  }
}

}  // namespace checks

}  // namespace mittens
