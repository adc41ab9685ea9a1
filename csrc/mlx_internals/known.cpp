#include "mlx_internals/known.h"

#include <cstdlib>

#include "mlx_internals/releases.h"

namespace mittens::mlx_internals {

std::string_view problem() {
  static const char* const setting = std::getenv("MLX_MITTENS_INTERNALS");
  static const bool is_off = setting && std::string_view(setting) == "off";
#if MITTENS_KNOWN_MLX
  return is_off ? "MLX_MITTENS_INTERNALS=off" : "";
#else
  return is_off ? "MLX_MITTENS_INTERNALS=off"
                : "built for mlx " MITTENS_MLX_VERSION ", known is " MITTENS_KNOWN_MLX_VERSION;
#endif
}

bool is_known() {
  static const bool known = problem().empty();
  return known;
}

}  // namespace mittens::mlx_internals
