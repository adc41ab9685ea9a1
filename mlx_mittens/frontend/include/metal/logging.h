// Metal's logging, discarded here.
#pragma once

namespace metal {

struct os_log {
  template <typename... A>
  MITTENS_INLINE constexpr os_log(A...) {}
#define MITTENS_LOG(name)  \
  template <typename... A> \
  MITTENS_INLINE void name(A...) const {}
  MITTENS_LOG(log)
  MITTENS_LOG(log_debug)
  MITTENS_LOG(log_info)
  MITTENS_LOG(log_error)
  MITTENS_LOG(log_fault)
#undef MITTENS_LOG
};
static constexpr os_log os_log_default;

}  // namespace metal
