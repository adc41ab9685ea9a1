"""A norm between two products of one row: when they share it, their results then, and other readers of either."""

import gc

import mlx.core as mx
import numpy as np
import pytest
from helpers.matrices import draw, exact_product, quantize
from helpers.support import assert_same_bits, launched_on_apple
from helpers.tolerances import (
    LAYERS,
    PART_OF_A_CHANGE,
    assert_error_at_most_that_of_mx,
    assert_near,
    assert_product_right,
    of_roundings,
)

import mlx_mittens as mm
from mlx_mittens import _ext, specs
from mlx_mittens.specs.op import gated

GROUP, EPS = 32, 1e-5
# Columns of the product before, columns of the norm, and the outputs of the matrices behind it.
SIZES = [(64, 32, (4,)), (96, 160, (12, 5, 1)), (320, 1088, (33, 2, 9, 40))]


class Model:
    """The part of a model's block between two products."""

    def __init__(self, rng, dtype=mx.float32, bits=4, before=64, columns=96, outputs=(12, 5), bias=False):
        self.bits = bits
        self.x, self.residual = (draw(rng, (1, 1, n), dtype, outliers=False) for n in (before, columns))
        self.weight = (draw(rng, (columns,), mx.float32, outliers=False) * columns**-0.5).astype(dtype)
        self.before = quantize(rng, (columns, before), dtype, GROUP, bits)
        self.bias = draw(rng, (columns,), dtype) if bias else None
        self.matrices = [quantize(rng, (n, columns), dtype, GROUP, bits) for n in outputs]
        self.up = quantize(rng, (outputs[0], columns), dtype, GROUP, bits)
        self.biases = [draw(rng, (n,), dtype) for n in outputs] if bias else None
        mx.eval(self.x, self.residual, self.weight, [a for a in (self.bias, self.biases) if a is not None])

    def product(self):
        return mm.quantized_matmul(self.x, *self.before, group_size=GROUP, bits=self.bits, bias=self.bias)

    def norm(self):
        """The norm, and the sum that it is of."""
        return mm.add_rms_norm(self.product(), self.residual, self.weight, EPS)

    def parts(self, row):
        return _ext.try_products_of_norm(row, self.matrices, GROUP, self.bits, bias=self.biases)

    def gated(self, row):
        return _ext.swiglu_of_norm(row, self.matrices[0], self.up, GROUP, self.bits)

    def of_mx(self, total):
        """The products, from the sum on, as mx rounds on the way."""
        row = mx.fast.rms_norm(total, self.weight, EPS)
        options = {"group_size": GROUP, "bits": self.bits}
        products = [mm.quantized_matmul(row, *w, **options) for w in self.matrices]
        return products if self.biases is None else [y + b for y, b in zip(products, self.biases, strict=True)]

    def exact_sum(self):
        total = specs.widen(self.x) @ specs.dequantized(*self.before, GROUP, self.bits).T + specs.widen(self.residual)
        return total if self.bias is None else total + specs.widen(self.bias)

    def exact(self, total):
        """The products, from the sum on."""
        total, dequantized = specs.widen(total), lambda w: specs.dequantized(*w, GROUP, self.bits)
        row = total / np.sqrt((total**2).mean() + EPS) * specs.widen(self.weight)
        added = self.biases or [None] * len(self.matrices)
        with_bias = [None if b is None else specs.widen(b) for b in added]
        return [exact_product(row, dequantized(w), b) for w, b in zip(self.matrices, with_bias, strict=True)]


def kernels():
    """How often each op has launched a kernel."""
    return {op: sum(count["kernels"].values()) for op, count in mm.stats().items()}


@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_products_are_no_further_off_than_of_a_norm_apart(rng, dtype, sizes, bits, seed):
    model = Model(rng, dtype, bits, *sizes, bias=seed > 0)
    with mm.simulator.enabled(seed=seed, gpu="m2-max"):
        mm.stats(reset=True)
        row, total = model.norm()
        found = model.parts(row)
        mx.eval(found, total)
        assert kernels() == {"quantized_matmul_sum": 1, "quantized_matmuls": 1}
        apart = model.of_mx(total)
        mx.eval(apart)
    assert_near(total, model.exact_sum(), "sum", of_roundings(dtype))
    exact = model.exact(total)
    for y, one in zip(found, exact, strict=True):
        assert_product_right(y, one, dtype)
    together = specs.Exact(np.concatenate([one.value for one in exact], -1))
    assert_error_at_most_that_of_mx(mx.concatenate(found, -1), mx.concatenate(apart, -1), together)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gate_and_up(rng, dtype, sizes, bits):
    model = Model(rng, dtype, bits, *sizes)
    with mm.simulator.enabled(seed=3, gpu="m2-max"):
        mm.stats(reset=True)
        row, total = model.norm()
        y = model.gated(row)
        mx.eval(y, total)
        assert kernels() == {"quantized_matmul_sum": 1, "quantized_swiglu": 1}
    model.matrices = [model.matrices[0], model.up]
    assert_product_right(y, gated(*model.exact(total)), dtype)


def test_the_sum_is_rounded_as_mx_rounds_it(rng, dtype):
    model = Model(rng, dtype, bias=True)
    with mm.simulator.enabled(gpu="m2-max"):
        product = model.product()
        mx.eval(product)
        row, total = model.norm()
        mx.eval(model.parts(row), total)
    assert_same_bits(total, product + model.residual, "sum")


def test_either_term_may_be_the_product(rng):
    model = Model(rng)
    with mm.simulator.enabled(gpu="m2-max"):
        row, total = mm.add_rms_norm(model.residual, model.product(), model.weight, EPS)
        other, _ = model.norm()
        mm.stats(reset=True)
        found, expected = model.parts(row), model.parts(other)
        mx.eval(found, expected, total)
        assert "add_rms_norm" not in kernels()
    for a, b in zip(found, expected, strict=True):
        assert_same_bits(a, b, "product")


def test_whoever_else_reads_them_gets_norm_sum_and_product(rng):
    model = Model(rng)
    with mm.simulator.enabled(gpu="m2-max"):
        product = model.product()
        row, total = mm.add_rms_norm(product, model.residual, model.weight, EPS)
        later = total * 2
        found = model.parts(row)
        after = row + 1
        mx.eval(found, later, after, product)
        assert_near(later, 2 * (product + model.residual), "sum", of_roundings(mx.float32))
        expected = mx.fast.rms_norm(product + model.residual, model.weight, EPS)
        assert_near(after - 1, expected, "norm", LAYERS)
        mx.eval(row, total)
    assert_near(total, product + model.residual, "sum", of_roundings(mx.float32))


def test_a_second_product_of_it_has_the_norm_apart(rng):
    model = Model(rng)
    with mm.simulator.enabled(gpu="m2-max"):
        row, total = model.norm()
        first = model.parts(row)
        second = mm.quantized_matmuls(row, model.matrices, GROUP, 4)
        mm.stats(reset=True)
        mx.eval(first, second, total)
        assert kernels() == {"quantized_matmul_sum": 1, "quantized_matmuls": 2, "rms_norm": 1}
    for a, b in zip(first, second, strict=True):
        assert_near(a, b, "product", LAYERS)


@pytest.mark.parametrize("why", ["read", "nvidia", "cpu", "rows", "computed", "offset", "unweighted", "no product"])
def test_a_norm_that_stays_apart(rng, why):
    model = Model(rng)
    if why == "rows":
        model.x = mx.concatenate([model.x] * 2, 1)
        model.residual = mx.concatenate([model.residual] * 2, 1)
    norm = {
        "offset": lambda p: mm.add_rms_norm(p, model.residual, model.weight, EPS, weight_offset=1.0),
        "unweighted": lambda p: mm.add_rms_norm(p, model.residual, None, EPS),
        "no product": lambda p: mm.add_rms_norm(model.residual + 1, model.residual, model.weight, EPS),
    }.get(why, lambda p: mm.add_rms_norm(p, model.residual, model.weight, EPS))

    def launched():
        row, total = norm(model.product())
        if why == "computed":
            mx.eval(row)
        others = [row + 1] if why == "read" else []
        found = model.parts(row) or mm.quantized_matmuls(row, model.matrices, GROUP, 4)
        mx.eval(found, total, others)
        return found

    mm.stats(reset=True)
    if why == "cpu":
        launched()
    else:
        with mm.simulator.enabled(gpu="nvidia" if why == "nvidia" else "m2-max"):
            launched()
    assert kernels()["add_rms_norm"] == 1
    assert "quantized_matmul_sum" not in kernels()


def test_one_matrix_without_a_norm_is_no_product_of_several(rng):
    model = Model(rng, outputs=(12,))
    with mm.simulator.enabled(gpu="m2-max"):
        assert model.parts(model.residual) is None
        row, _ = model.norm()
        (y,) = model.parts(row)
        mx.eval(y)
    assert y.shape == (1, 1, 12)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("of", ["residual", "weight", "x"])
def test_what_is_no_number(rng, dtype, of, value):
    model = Model(rng, dtype)
    array = np.array(getattr(model, of).astype(mx.float32))
    array.reshape(-1)[3] = value
    setattr(model, of, mx.array(array).astype(dtype))
    with mm.simulator.enabled(gpu="m2-max"):
        row, total = model.norm()
        found = model.parts(row)
        mx.eval(found, total)
        apart = model.of_mx(total)
        mx.eval(apart)
    for y, expected in zip(found, apart, strict=True):
        assert bool(mx.array_equal(mx.isnan(y), mx.isnan(expected)))


def test_a_sum_that_overflows_in_float16(rng):
    model = Model(rng, mx.float16)
    model.residual = model.residual + 65504.0 * (mx.arange(96) == 5).astype(mx.float16)
    model.before[1][5] = mx.full((model.before[1].shape[1],), 100.0).astype(mx.float16)
    model.before[2][5] = mx.full((model.before[1].shape[1],), 100.0).astype(mx.float16)
    model.x = mx.abs(model.x)
    with mm.simulator.enabled(gpu="m2-max"):
        row, total = model.norm()
        found = model.parts(row)
        mx.eval(found, total)
    assert bool(mx.isinf(total).any()) and all(bool(mx.isnan(y).all()) for y in found)


def test_a_row_times_its_weight_that_overflows_in_float16(rng):
    """As float16 numbers the row times the weight would be infinite, the norm is not."""
    model = Model(rng, mx.float16)
    model.residual = model.residual * 3000
    model.weight = model.weight * 500
    with mm.simulator.enabled(gpu="m2-max"):
        row, total = model.norm()
        found = model.parts(row)
        mx.eval(found, total)
    for y, exact in zip(found, model.exact(total), strict=True):
        assert_product_right(y, exact, mx.float16)


@pytest.mark.parametrize("wide", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("size", [1e25, 1e37])
def test_infinite_squares_of_numbers_give_zeros(rng, wide, size):
    model = Model(rng, wide)
    model.residual = (model.residual.astype(mx.float32) * size).astype(wide)
    with mm.simulator.enabled(gpu="m2-max"):
        row, total = model.norm()
        found, (again, _) = model.parts(row), model.norm()
        y = model.gated(again)
        mx.eval(found, y, total)
    assert bool(mx.isfinite(total).all())
    assert all(bool((part == 0).all()) for part in [*found, y])


def test_outside_of_the_simulator_they_are_composed(rng, dtype):
    model = Model(rng, dtype, bias=True)
    with mm.simulator.enabled(gpu="m2-max"):
        (row, total), (other, _) = model.norm(), model.norm()
        found, y = model.parts(row), model.gated(other)
    mx.eval(found, total, y)
    assert_near(total, model.exact_sum(), "sum", of_roundings(dtype))
    for part, one in zip(found, model.of_mx(total), strict=True):
        assert_near(part, one, "product", of_roundings(dtype) * 4)
    model.matrices, model.biases = [model.matrices[0], model.up], None
    gate, up = model.of_mx(total)
    assert_near(y, gate * mx.sigmoid(gate) * up, "gated", of_roundings(dtype) * 4)


def test_traced_norms_stay_apart(rng):
    model = Model(rng)

    def loss(x):
        model.x = x
        row, total = model.norm()
        parts = model.parts(row)
        return sum((y**2).sum() for y in parts) + total.sum()

    x = model.x
    with mm.simulator.enabled(gpu="m2-max"):
        mm.stats(reset=True)
        value, gradient = mx.value_and_grad(loss)(x)
        mx.eval(value, gradient)
        assert "quantized_matmul_sum" not in kernels()
    step = 1e-2 * gradient / mx.linalg.norm(gradient)
    mx.eval(step)
    with mm.simulator.enabled(gpu="m2-max"):
        change = loss(x + step) - loss(x - step)
        mx.eval(change)
    assert_near(change, 2 * (gradient * step).sum(), "change", PART_OF_A_CHANGE)


def test_nothing_is_left_of_rows_that_nobody_computes(rng):
    model = Model(rng)
    with mm.simulator.enabled(gpu="m2-max"):
        before = mx.get_active_memory()
        model.residual = mx.zeros((1, 1, 96)) + rng.random()
        mx.eval(model.residual)
        for _ in range(4):
            row, total = model.norm()
            model.parts(row)
            del row, total
        model.residual = None
        gc.collect()
        assert mx.get_active_memory() <= before


def test_a_launch_less(rng):
    model = Model(rng)
    names = launched_on_apple(lambda: model.parts(model.norm()[0]))
    assert names == ["quantized_matmul_sum_4bit_float32", "quantized_matmuls_normed_4bit_float32"]


@pytest.mark.parametrize("parts", ["shared", "bias", ""])
def test_a_mixture_before_the_norm(rng, dtype, parts):
    """Its second launch adds the residual; the choice and the experts are as ever."""
    op = specs.get("mixture")
    case = specs.Case("test", (1, 2, 5, 96, 64), {"group_size": GROUP, "bits": 4, "k": 2, "parts": parts})
    arrays, model = op.draw(rng, case, dtype), Model(rng, dtype)
    residual = model.residual[0]
    mx.eval(residual, [a for a in arrays if a is not None])
    run = lambda: op.ours(*arrays, **op.arguments(case))
    with mm.simulator.enabled(seed=5, gpu="m2-max"):
        y = run()
        mx.eval(y)
        mm.stats(reset=True)
        row, total = mm.add_rms_norm(run(), residual, model.weight, EPS)
        found = model.parts(row)
        mx.eval(found, total)
        kernels = {name.split()[1] for count in mm.stats().values() for name in count["kernels"]}
        assert any(name.startswith("mixture_normed_sum_4bit") for name in kernels)
        assert not any(name.startswith(("add_rms_norm", "rms_norm")) for name in kernels)
    assert_same_bits(total, y + residual, "sum")
    for part, exact in zip(found, model.exact(total), strict=True):
        assert_product_right(part, exact, dtype)


def test_a_mixture_and_its_sum_outside_of_the_simulator(rng):
    op = specs.get("mixture")
    case = specs.Case("test", (1, 2, 5, 96, 64), {"group_size": GROUP, "bits": 4, "k": 2, "parts": "shared"})
    arrays, model = op.draw(rng, case, mx.float32), Model(rng)
    run = lambda: op.ours(*arrays, **op.arguments(case))
    with mm.simulator.enabled(gpu="m2-max"):
        row, total = mm.add_rms_norm(run(), model.residual[0], model.weight, EPS)
        found = model.parts(row)
    mx.eval(found, total)
    assert_near(total, run() + model.residual[0], "sum", LAYERS)
    for part, exact in zip(found, model.exact(total), strict=True):
        assert_near(part, exact.value, "product", LAYERS)
