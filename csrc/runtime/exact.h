// mlx_mittens.patch(exact=True): what is computed of several rows is bit for bit what is computed of each row alone.
#pragma once

namespace mittens {

bool is_exact();

}  // namespace mittens
