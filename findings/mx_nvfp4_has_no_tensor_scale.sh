#!/usr/bin/env bash
# Behaviour: mx.quantize with mode "nvfp4" has no scale for the whole array, as files of this format from elsewhere have.
# So weights above 2,688 saturate without a word, and weights below 0.001 become zero.
# Expected: the range of float32, or an error.
source "$(dirname "${BASH_SOURCE[0]}")/in_new_environment.sh"
in_new_environment "mlx[cpu]==0.32.4" <<'PYTHON'
import mlx.core as mx

mx.set_default_device(mx.cpu)
w = mx.concatenate([mx.full((1, 16), 6000.0), mx.full((1, 16), 1e-3)], axis=1)
back = mx.dequantize(*mx.quantize(w, mode="nvfp4"), mode="nvfp4")
print("seen: 6000 becomes", back[0, 0].item(), "- 0.001 becomes", back[0, 16].item())
assert back[0, 0].item() == 2688.0 and back[0, 16].item() == 0.0
PYTHON
