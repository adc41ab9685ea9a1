#!/usr/bin/env bash
# Behaviour: mx.gather_qmm has gradients of gradients by x alone and by scales alone, but by both together they raise
# a ValueError about shapes that cannot be broadcast. mx.quantized_matmul has all three.
# Expected: the mixed second derivatives exist wherever those by each exist.
source "$(dirname "${BASH_SOURCE[0]}")/in_new_environment.sh"
in_new_environment "mlx[cpu]==0.32.4" <<'PYTHON'
import importlib.metadata

import mlx.core as mx

mx.set_default_device(mx.cpu)
experts = mx.quantize(mx.random.normal((3, 32, 64)), group_size=32, bits=4)
matrix = [a[0] for a in experts]
chosen = mx.array([[0, 2], [1, 1]], mx.uint32)


def of_experts(x, scales):
    w, _, biases = experts
    y = mx.gather_qmm(x, w, scales, biases, rhs_indices=chosen, group_size=32, bits=4)
    return y.square().sum()


def of_matrix(x, scales):
    w, _, biases = matrix
    return mx.quantized_matmul(x, w, scales, biases, group_size=32, bits=4).square().sum()


def second(function, arrays, by):
    """Whether the gradient of the sum of squares of a gradient exists."""

    def size(*arrays):
        return sum(gradient.square().sum() for gradient in mx.grad(function, argnums=by)(*arrays))

    try:
        mx.eval(mx.grad(size, argnums=by)(*arrays))
    except ValueError as error:
        return str(error)
    return "exists"


choices = {"x": (0,), "scales": (1,), "x and scales": (0, 1)}
found = {
    name: [second(function, (mx.random.normal(shape), scales), by) for by in choices.values()]
    for name, function, shape, scales in (
        ("mx.gather_qmm", of_experts, (2, 1, 1, 64), experts[1]),
        ("mx.quantized_matmul", of_matrix, (2, 64), matrix[1]),
    )
}
print("mlx", importlib.metadata.version("mlx"))
for name, results in found.items():
    print(name, dict(zip(choices, results)))
assert found["mx.quantized_matmul"] == ["exists"] * 3
assert found["mx.gather_qmm"][:2] == ["exists"] * 2 and "cannot be broadcast" in found["mx.gather_qmm"][2]
PYTHON
