"""Products of few rows of half types on CPUs, where x becomes int16 if integers can stand for its elements."""

import os
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from helpers.matrices import draw, exact_product, quantize
from helpers.support import child_environment
from helpers.tolerances import units

import mlx_mittens as mm
from mlx_mittens.specs import EPSILON, dequantized, widen

HALVES = [mx.float16, mx.bfloat16]
CPU = mx.Device(mx.cpu)

pytestmark = pytest.mark.parametrize("bits", [4, 8])


def zero_at(column, rng, columns, bits, dtype):
    """Quantized weights of 8 outputs in groups of 64, with one column of zeros."""
    middle = 1 << (bits - 1)
    integers = rng.integers(0, 2 * middle, (8, columns))
    integers[:, column] = middle
    scales = np.full((8, columns // 64), 2.0**-bits)
    per_word = 32 // bits
    shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(bits)
    words = (integers.reshape(8, -1, per_word).astype(np.uint32) << shifts).sum(-1, dtype=np.uint32)
    return mx.array(words), mx.array(scales).astype(dtype), mx.array(-middle * scales).astype(dtype)


def relative_error(y, x, triple, bits):
    exact = exact_product(widen(x), dequantized(*triple, 64, bits)).value
    return np.abs(widen(y) - exact).max() / np.sqrt(np.mean(exact**2))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("columns", [64, 4096])
@pytest.mark.parametrize("outlier", [8.0, 100.0, 6e4])
def test_an_outlier_that_meets_a_weight_of_zero_hides_nothing(rng, dtype, columns, outlier, bits):
    """The other columns are as right as without it: to the rounding of the result, of a few root mean squares."""
    triple = zero_at(5, rng, columns, bits, dtype)
    x = widen(draw(rng, (1, columns), dtype))
    x[:, 5] = outlier
    x = mx.array(x).astype(dtype)
    y = mm.quantized_matmul(x, *triple, group_size=64, bits=bits, stream=CPU)
    assert relative_error(y, x, triple, bits) < units(2, dtype)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_an_element_that_is_not_finite_stays_in_its_row(rng, dtype, value, bits):
    triple = quantize(rng, (24, 256), dtype, 64, bits)
    x = widen(draw(rng, (2, 256), dtype))
    alone = mm.quantized_matmul(mx.array(x[1:]).astype(dtype), *triple, group_size=64, bits=bits, stream=CPU)
    x[0, 17] = value
    x = mx.array(x).astype(dtype)
    y = mm.quantized_matmul(x, *triple, group_size=64, bits=bits, stream=CPU)
    assert not np.isfinite(widen(y[0])).any()
    assert mx.array_equal(y[1:], alone)


@pytest.mark.parametrize("size", [0.0, 2.0**-120, 2.0**-90, 2.0**100])
def test_tiny_and_huge_rows(rng, size, bits):
    triple = quantize(rng, (16, 192), mx.bfloat16, 64, bits)
    x = (draw(rng, (1, 192), mx.float32) * size).astype(mx.bfloat16)
    y = widen(mm.quantized_matmul(x, *triple, group_size=64, bits=bits, stream=CPU))
    exact = exact_product(widen(x), dequantized(*triple, 64, bits))
    assert (np.abs(y - exact.value) <= EPSILON[mx.bfloat16] * np.abs(exact.value) + 2.0**-14 * exact.magnitude).all()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("op", ["quantized_matmul", "quantized_swiglu"])
def test_exact_rows_are_those_of_each_row_alone(rng, dtype, op, bits):
    """Of 1 to 32 rows, some of which have outliers, and one of which is zero."""
    gate, up = (quantize(rng, (40, 512), dtype, 64, bits) for _ in range(2))
    x = widen(draw(rng, (32, 512), dtype))
    x[3::5, 100] = 500
    x[7] = 0
    x = mx.array(x).astype(dtype)

    def product(x):
        if op == "quantized_matmul":
            return mm.quantized_matmul(x, *gate, group_size=64, bits=bits, exact=True, stream=CPU)
        return mm.quantized_swiglu(x, gate, up, 64, bits, exact=True, stream=CPU)

    alone = mx.concatenate([product(x[i : i + 1]) for i in range(32)])
    for rows in (1, 2, 3, 5, 8, 9, 31, 32):
        assert mx.array_equal(product(x[:rows]), alone[:rows])


def test_every_instruction_set(bits):
    """The tests above, with each set of this machine but its best one."""
    if os.environ.get("MLX_MITTENS_CPU"):
        return  # a set was chosen from outside: this is that run
    refused = 0
    for name in ("baseline", "avx2", "avx512", "neon"):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__, "-k", f"{bits} and not every"],
            env={**child_environment(), "MLX_MITTENS_CPU": name},
            capture_output=True,
            text=True,
        )
        if f"MLX_MITTENS_CPU is '{name}', this machine runs" in done.stdout + done.stderr:
            refused += 1
        else:
            assert done.returncode == 0, done.stdout[-3000:]
    assert refused < 4
