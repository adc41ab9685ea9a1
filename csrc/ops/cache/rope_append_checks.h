// Checks of the appends' arguments that do not depend on the kind of buffers.
#pragma once

#include "ops/cache/rope_append.h"

namespace mittens {

// Heads are [.., width]; `batched` is an array [batch, ..].
void check_rotary(const char* op, const Rotary& rotary, const mx::array& heads);
void check_offset(const char* op, const Offset& offset, const mx::array& batched);
// Checks a buffer [batch, key heads, capacity, ..] against the heads; name: of the argument that holds it.
void check_room(const char* op, const char* name, const mx::array& buffer, const mx::array& heads, int start);

}  // namespace mittens
