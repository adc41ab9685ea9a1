"""What the tests of products with weights share: inputs, float64 references, and the measure of error."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

import mlx_mittens as mm
from mlx_mittens import cases


def draw(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype, outliers: bool = True) -> mx.array:
    """Normal numbers; one in 64 is 20 times as large."""
    a = rng.standard_normal(shape).astype(np.float32)
    if outliers and a.size:
        a.reshape(-1)[rng.integers(0, a.size, max(1, a.size // 64))] *= 20
    return mx.array(a).astype(dtype)


def quantize(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype, group_size: int, bits: int):
    """A triple as mx.quantize gives it: made on the CPU, as the test's device may not be able to."""
    with mx.stream(mx.cpu):
        triple = mx.quantize(draw(rng, shape, mx.float32), group_size=group_size, bits=bits)
        words, scales, biases = triple[0], triple[1].astype(dtype), triple[2].astype(dtype)
        mx.eval(words, scales, biases)
    return words, scales, biases


def exact_product(x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> cases.Exact:
    """x @ w.T + bias in float64, and the size that its terms give such a sum."""
    w = np.swapaxes(w, -1, -2)
    with np.errstate(invalid="ignore", over="ignore"):
        value = x @ w
        size = np.sqrt((x * x) @ (w * w))
    return cases.Exact(value if bias is None else value + bias, size)


def assert_error_at_most_that_of_mx(x: mx.array, triple: tuple[mx.array, mx.array, mx.array]):
    """Of a product with 4-bit weights in groups of 64, against float64."""
    exact = exact_product(cases.widen(x), cases.dequantized(*triple, 64, 4)).value
    products = (mm.quantized_matmul, mx.quantized_matmul)
    ours, twin = (np.abs(cases.widen(f(x, *triple)) - exact).max() for f in products)
    assert ours <= max(twin, np.finfo(np.float32).eps * 8 * np.abs(exact).max())


def assert_right(actual: mx.array, exact: cases.Exact, dtype: mx.Dtype):
    """Within rounding of float64: 16-bit results by one unit in the last place, float32 sums by some, with outliers."""
    assert actual.dtype == dtype, f"{actual.dtype}, expected {dtype}"
    found = cases.error(actual, exact)
    allowed = (64 if dtype == mx.float32 else 1) * cases.EPSILON[dtype]
    assert found <= allowed, f"error {found:.2e}, allowed {allowed:.2e}"
