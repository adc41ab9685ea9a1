// The one rule for calls that our kernels do not cover: mx computes them, unless strict mode asks for an error, so that
// no benchmark or test takes mx for ours.
#pragma once

#include <optional>
#include <string>

#include "mlx/dtype.h"

namespace mittens {

// Records why a call is unsupported and returns nullopt, so that the caller falls back to MLX. Throws
// std::runtime_error in strict mode.
std::nullopt_t fallback(const char* op, std::string reason);

// Whether the user has switched an op off (MLX_MITTENS_DISABLE); notes it as fallback() does.
bool is_switched_off(const char* op);

// Whether mx is to compute a call that a kernel covers too, since it is faster; notes why. Never in strict mode or
// under a strict patch, which ask for the kernel.
bool prefer_fallback(const char* op, std::string reason);

// While an instance exists, unsupported calls on this thread are neither counted nor rejected, because the caller will
// retry them.
class Tentative {
 public:
  Tentative();
  ~Tentative();
  Tentative(const Tentative&) = delete;
  Tentative& operator=(const Tentative&) = delete;
};

// While an instance exists, unsupported calls on this thread are not counted: the caller only asks for the shape of
// their results, and will count them when they compute.
class Uncounted {
 public:
  Uncounted();
  ~Uncounted();
  Uncounted(const Uncounted&) = delete;
  Uncounted& operator=(const Uncounted&) = delete;
};

// Notes why a call goes to mx, for stats() and for messages.
void note_fallback(const char* op, std::string reason);

// Why this thread's last call that went to mx did so.
const std::string& last_reason();

// Whether the kernels compute in this dtype.
inline bool has_kernels(mlx::core::Dtype dtype) {
  return dtype == mlx::core::float32 || dtype == mlx::core::float16 || dtype == mlx::core::bfloat16;
}

}  // namespace mittens
