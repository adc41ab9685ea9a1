"""A norm that a router and its experts read: both take in the row that the product before it hands on."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.matrices import draw, quantize
from helpers.tolerances import LAYERS, assert_near, of_layer

import mlx_mittens as mm
from mlx_mittens import _ext

GROUP, EPS, COLUMNS, EXPERTS, HIDDEN = 32, 1e-5, 96, 5, 64


class Block:
    """The feed-forward part of a block, behind a product."""

    def __init__(self, rng, dtype=mx.float32, bits=4):
        quantized = lambda *shape: quantize(rng, shape, dtype, GROUP, bits)
        self.options = {"group_size": GROUP, "bits": bits}
        self.x, self.residual = (draw(rng, (1, 1, n), dtype, outliers=False) for n in (64, COLUMNS))
        self.weight = draw(rng, (COLUMNS,), dtype, outliers=False)
        self.before, self.router = quantized(COLUMNS, 64), quantized(EXPERTS, COLUMNS)
        self.gate, self.up = (quantized(EXPERTS, HIDDEN, COLUMNS) for _ in range(2))
        self.down = quantized(EXPERTS, COLUMNS, HIDDEN)
        mx.eval(self.x, self.residual, self.weight)

    def norm(self):
        product = mm.quantized_matmul(self.x, *self.before, **self.options)
        return mm.add_rms_norm(product, self.residual, self.weight, EPS)

    def logits(self, row):
        return _ext.try_products_of_norm(row, [self.router], **self.options)[0]

    def mixture(self, row, logits):
        return mm.mixture(row, logits, 2, self.gate, self.up, self.down, **self.options)

    def apart(self):
        """Sum, norm, logits and result, each computed before the next."""
        row, total = self.norm()
        mx.eval(row, total)
        logits = mm.quantized_matmul(row, *self.router, **self.options)
        mx.eval(logits)
        return total, row, logits, self.mixture(row, logits)


def kernels():
    return {op: sum(counts["kernels"].values()) for op, counts in mm.stats(reset=True).items()}


@pytest.mark.parametrize("bits", [4, 8])
def test_router_and_experts_read_one_norm(rng, dtype, bits):
    block = Block(rng, dtype, bits)
    with mm.simulator.enabled(gpu="m2-max"):
        mm.stats(reset=True)
        row, total = block.norm()
        logits = block.logits(row)
        y = block.mixture(row, logits)
        mx.eval(y, total, logits)
        counts = kernels()
        assert counts == {"quantized_matmul_sum": 1, "quantized_matmuls": 1, "mixture": 2}
        expected = block.apart()
        mx.eval(expected)
    for found, other in zip((total, logits, y), (expected[0], *expected[2:]), strict=True):
        assert_near(found, other, "mixture", LAYERS if dtype == mx.float32 else 2 * of_layer(dtype))


def test_a_third_reader_has_the_norm_computed(rng):
    block = Block(rng)
    with mm.simulator.enabled(gpu="m2-max"):
        mm.stats(reset=True)
        row, total = block.norm()
        logits = block.logits(row)
        y = block.mixture(row, logits)
        third = row * 2
        mx.eval(y, third, total)
        assert kernels()["rms_norm"] == 1
        expected = block.apart()
        mx.eval(expected)
    assert_near(third, 2 * expected[1], "norm", LAYERS)
    assert_near(y, expected[3], "mixture", LAYERS)


@pytest.mark.parametrize("why", ["computed", "alone", "another weight", "rows"])
def test_otherwise_the_experts_read_the_norm_itself(rng, why):
    block = Block(rng)
    if why == "rows":
        block.x, block.residual = (mx.concatenate([a] * 2, 1) for a in (block.x, block.residual))
    with mm.simulator.enabled(gpu="m2-max"):
        row, _ = block.norm()
        logits = mx.zeros((*row.shape[:-1], EXPERTS)) + mx.arange(EXPERTS)
        mx.eval(logits)
        if why in ("computed", "another weight"):
            block.logits(row)
        if why == "computed":
            mx.eval(row)
        if why == "another weight":
            row = mm.rms_norm(block.norm()[1], block.weight * 2, EPS)
        mm.stats(reset=True)
        y = block.mixture(row, logits)
        mx.eval(y)
        names = mm.stats()["mixture"]["kernels"]
    assert not any("normed_swiglu" in name for name in names)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("of", ["residual", "weight"])
def test_what_is_no_number(rng, dtype, of, value):
    block = Block(rng, dtype)
    array = np.array(getattr(block, of).astype(mx.float32))
    array.reshape(-1)[3] = value
    setattr(block, of, mx.array(array).astype(dtype))
    with mm.simulator.enabled(gpu="m2-max"):
        row, total = block.norm()
        block.logits(row)
        logits = mx.arange(EXPERTS).reshape(1, 1, -1).astype(dtype)
        y = block.mixture(row, logits)
        mx.eval(y, total)
        row, _ = block.norm()
        mx.eval(row)
        expected = block.mixture(row, logits)
        mx.eval(expected)
    assert bool(mx.array_equal(mx.isnan(y), mx.isnan(expected)))
