#!/usr/bin/env bash
# Behaviour: the gradient of mx.block_masked_mm by mask_out is that of the masked product, times the mask once more: a
# block with the mask m gets m times its derivative, so that a mask of 0 never gets one.
# Expected: y = m * (a @ b) has the derivative a @ b by m, whatever m is.
source "$(dirname "${BASH_SOURCE[0]}")/in_new_environment.sh"
in_new_environment "mlx[cpu]==0.32.4" <<'PYTHON'
import importlib.metadata

import mlx.core as mx

mx.set_default_device(mx.cpu)
block = 32
a, b = mx.random.normal((block, 64)), mx.random.normal((64, block))
derivative = (a @ b).sum().item()
product = lambda mask: mx.block_masked_mm(a, b, block, mask).sum()
print("mlx", importlib.metadata.version("mlx"))
for mask in (1.0, 0.5, 0.0, 2.0):
    h = 0.5  # y is linear in the mask, so that a difference is exact
    difference = (product(mx.array([[mask + h]])) - product(mx.array([[mask - h]]))).item() / (2 * h)
    gradient = mx.grad(product)(mx.array([[mask]])).item()
    print(f"mask {mask}: gradient {gradient:.3f}, difference {difference:.3f}")
    assert abs(difference - derivative) < 1e-3 * max(1, abs(derivative))
    assert abs(gradient - mask * derivative) < 1e-3 * max(1, abs(derivative))
PYTHON
