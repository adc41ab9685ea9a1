"""Training of adapters on a 4-bit model: the same losses with the patch as without, by the kernels for many rows."""

import contextlib

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from helpers import tiny
from mlx.utils import tree_map
from mlx_lm.tuner.lora import LoRALinear
from mlx_lm.tuner.trainer import default_loss
from mlx_lm.tuner.utils import linear_to_lora_layers

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


def losses(model, *batch, loss):
    """Of a few steps, from the parameters that a model has, which it gets back."""
    before = tree_map(mx.array, model.parameters())
    model.freeze()
    for _, module in model.named_modules():
        module.unfreeze(keys=["lora_a", "lora_b"], recurse=False, strict=False)
    optimizer = optim.Adam(1e-3)
    step = nn.value_and_grad(model, loss)
    found = []
    for _ in range(STEPS):
        value, gradients = step(model, *batch)
        optimizer.update(model, gradients)
        mx.eval(value, model.parameters(), optimizer.state)
        found.append(value[0].item() if isinstance(value, tuple) else value.item())
    model.update(before)
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
    loss = lambda model, x, target: ((model(x) - target).astype(mx.float32) ** 2).mean()
    expected = losses(model, x, target, loss=loss)
    assert expected[-1] < expected[0]
    with mm.simulator.enabled(gpu="m2-max"), mm.patched(strict=True):
        _ext.simulator_record(True)
        found = losses(model, x, target, loss=loss)
        launched = {launch["kernel"] for launch in _ext.simulator_record(True)}
        _ext.simulator_record(False)
    np.testing.assert_allclose(found, expected, rtol=LOSSES[dtype])
    name = str(dtype).split(".")[-1]
    assert {f"quantized_matmul_{kernel}_tiles_4bit_32_{name}" for kernel in ("qmm", "qvm")} <= launched


@pytest.mark.parametrize("simulated", [False, True])
def test_a_whole_model_trains_as_without_the_patch(simulated):
    """On the CPU, and by kernels."""
    model = tiny.build("llama-3.2-1b", mx.float32, 4, num_hidden_layers=1)
    linear_to_lora_layers(model, 1, {"rank": 8, "scale": 10.0, "dropout": 0.0})
    tokens, lengths = mx.random.randint(1, 300, (2, ROWS // 2 + 1)), mx.array([[0, ROWS // 2], [0, 9]])
    expected = losses(model, tokens, lengths, loss=default_loss)
    assert expected[-1] < expected[0]
    executor = mm.simulator.enabled(gpu="m2-max") if simulated else contextlib.nullcontext()
    with executor, mm.patched(strict=True):
        mm.stats(reset=True)
        found = losses(model, tokens, lengths, loss=default_loss)
    np.testing.assert_allclose(found, expected, rtol=LOSSES[mx.float32])
    calls = mm.stats()
    for op in ("quantized_matmul", "scaled_dot_product_attention", "rms_norm", "rms_norm_vjp"):
        assert calls[op]["kernels"], op
