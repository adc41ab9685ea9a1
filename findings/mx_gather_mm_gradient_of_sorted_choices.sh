#!/usr/bin/env bash
# Behaviour: the gradient of mx.gather_mm by its weights raises for indices of two axes that are declared sorted, which the
# forward product takes. Without sorted_indices the same call has a gradient.
# Expected: sorted_indices is a hint for speed.
source "$(dirname "${BASH_SOURCE[0]}")/in_new_environment.sh"
in_new_environment "mlx[cpu]==0.32.4" <<'PYTHON'
import mlx.core as mx

mx.set_default_device(mx.cpu)
x, w = mx.ones((2, 1, 1, 4)), mx.ones((3, 4, 5))
chosen = mx.array([[0, 1], [1, 2]], mx.uint32)


def gradient(hint):
    return mx.grad(lambda w: mx.gather_mm(x, w, rhs_indices=chosen, sorted_indices=hint).sum())(w)


print("seen: forward, sorted:", mx.gather_mm(x, w, rhs_indices=chosen, sorted_indices=True).shape)
print("seen: gradient, not declared sorted:", gradient(False).shape)
try:
    mx.eval(gradient(True))
except ValueError as error:
    print("seen: gradient, declared sorted:", error)
else:
    raise SystemExit("changed: the gradient of sorted choices works")
PYTHON
