#!/usr/bin/env bash
# Behaviour: on a CPU mx.block_masked_mm with bool masks gives wrong products where the matrices of a batch share one
# operand and have masks of their own: the blocks that a mask of one matrix leaves out are left out of those after it
# too. The same masks as float32 numbers give the right products.
# Expected: bools and numbers of 0 and 1 mask alike, and an operand that is shared is not written to.
source "$(dirname "${BASH_SOURCE[0]}")/in_new_environment.sh"
in_new_environment "mlx[cpu]==0.32.4" "numpy==2.4.6" <<'PYTHON'
import importlib.metadata

import mlx.core as mx
import numpy as np

mx.set_default_device(mx.cpu)
block = 32
rng = np.random.default_rng(0)
a = rng.standard_normal((2, block, 2 * block)).astype(np.float32)
b = rng.standard_normal((2 * block, block)).astype(np.float32)
of_a = np.ones((2, 1, 2), bool)
of_b = np.array([[[True], [False]], [[False], [True]]])
kept = np.repeat(of_b, block, axis=1)
exact = a.astype(np.float64) @ (b.astype(np.float64) * kept)


def error(dtype):
    masks = (mx.array(mask.astype(dtype)) for mask in (of_a, of_b))
    y = mx.block_masked_mm(mx.array(a), mx.array(b), block, None, *masks)
    return [float(np.abs(np.array(y[i]) - exact[i]).max()) for i in range(2)]


found = {"bool": error(bool), "float32": error(np.float32)}
print("mlx", importlib.metadata.version("mlx"))
for name, errors in found.items():
    print(f"masks of {name}: largest errors of both products", *(f"{e:.1e}" for e in errors))
assert max(found["float32"]) < 1e-4
assert found["bool"][0] < 1e-4 and found["bool"][1] > 1
PYTHON
