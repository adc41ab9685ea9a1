"""Training of adapters on a 4-bit model: the same losses with the patch as without, by the kernels for many rows."""

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.tuner.lora import LoRALinear

import mlx_mittens as mm
from mlx_mittens import _ext

pytestmark = pytest.mark.usefixtures("native")

ROWS, STEPS = 24, 4
# Rounding of sums in another order, over a few steps of Adam.
LOSSES = {mx.float32: 1e-4, mx.bfloat16: 0.03}


class Block(nn.Module):
    """A feed-forward block whose quantized layers have adapters."""

    def __init__(self, dtype):
        super().__init__()
        layers = [nn.QuantizedLinear(64, 96, bias=False), nn.QuantizedLinear(96 + 32, 64, bias=False)]
        self.up, self.down = (LoRALinear.from_base(layer, r=8, scale=2.0) for layer in layers)
        self.set_dtype(dtype)

    def __call__(self, x):
        y = nn.silu(self.up(x))
        return x + self.down(mx.concatenate([y, y[..., :32]], -1))


def losses(model, x, target):
    """Of a few steps."""
    model.freeze()
    for layer in (model.first.up, model.first.down, model.second.up, model.second.down):
        layer.unfreeze(keys=["lora_a", "lora_b"])
    optimizer = optim.Adam(1e-3)
    loss = nn.value_and_grad(model, lambda model: ((model(x) - target).astype(mx.float32) ** 2).mean())
    found = []
    for _ in range(STEPS):
        value, gradients = loss(model)
        optimizer.update(model, gradients)
        mx.eval(value, model.parameters(), optimizer.state)
        found.append(value.item())
    return found


class Two(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.first, self.second = Block(dtype), Block(dtype)

    def __call__(self, x):
        return self.second(self.first(x))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_adapters_train_as_without_the_patch(dtype):
    model = Two(dtype)
    x, target = (mx.random.normal((2, ROWS // 2, 64)).astype(dtype) for _ in range(2))
    before = tree_map(mx.array, model.parameters())
    expected = losses(model, x, target)
    assert expected[-1] < expected[0]
    model.update(before)
    with mm.simulator.enabled(gpu="m2-max"), mm.patched(strict=True):
        _ext.simulator_record(True)
        found = losses(model, x, target)
        launched = {launch["kernel"] for launch in _ext.simulator_record(True)}
        _ext.simulator_record(False)
    np.testing.assert_allclose(found, expected, rtol=LOSSES[dtype])
    name = str(dtype).split(".")[-1]
    assert {f"quantized_matmul_{kernel}_tiles_4bit_32_{name}" for kernel in ("qmm", "qvm")} <= launched
