#pragma once

#include <nanobind/nanobind.h>

namespace mittens {

// Whether a function is one that the patch has put in another's place, and nobody else has put one in its place: an
// op of ours, which has no attempt, is none.
bool is_patched(nanobind::handle object);

}  // namespace mittens
