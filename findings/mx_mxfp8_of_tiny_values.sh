#!/usr/bin/env bash
# Behaviour: mx.quantize with mode "mxfp8" turns a group of values near 1e-39 into values near 1e38: the exponent of the
# group's scale wraps below zero instead of stopping there.
# Expected: zero, or a value near the original.
source "$(dirname "${BASH_SOURCE[0]}")/in_new_environment.sh"
in_new_environment "mlx[cpu]==0.32.4" <<'PYTHON'
import mlx.core as mx

mx.set_default_device(mx.cpu)
back = mx.dequantize(*mx.quantize(mx.full((1, 32), 1e-39), mode="mxfp8"), mode="mxfp8")[0, 0].item()
print("seen: 1e-39 becomes", back)
assert back > 1e38
PYTHON
