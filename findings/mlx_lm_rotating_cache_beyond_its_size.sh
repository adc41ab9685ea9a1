#!/usr/bin/env bash
# Behaviour: a RotatingKVCache of mlx-lm hands back more keys than its size when several tokens are appended, and only a
# single token brings it back to its size. nbytes of a plain cache counts the buffer, not the tokens in it.
# Expected: at most max_size keys.
source "$(dirname "${BASH_SOURCE[0]}")/in_new_environment.sh"
in_new_environment "mlx[cpu]==0.32.4" "mlx-lm==0.32.2" <<'PYTHON'
import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

mx.set_default_device(mx.cpu)
cache, lengths = RotatingKVCache(max_size=4, keep=0), []
for count in (3, 3, 1):
    tokens = mx.ones((1, 1, count, 64))
    lengths.append(cache.update_and_fetch(tokens, tokens)[0].shape[2])
print("seen: a cache of 4 after 3, 3 and 1 tokens hands back", lengths)
assert lengths == [3, 6, 4]
plain = KVCache()
plain.update_and_fetch(mx.ones((1, 1, 3, 64)), mx.ones((1, 1, 3, 64)))
print("seen: bytes of 3 tokens of 64 float32 keys and values:", plain.nbytes, "for", 2 * 3 * 64 * 4)
assert plain.nbytes == 2 * 256 * 64 * 4
PYTHON
