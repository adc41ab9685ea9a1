"""What the tests of products with weights share: inputs, float64 references, and the measure of error."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

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


def with_one_nan(blocks: np.ndarray, block_bytes: int) -> np.ndarray:
    """Bytes of GGUF blocks with the same NaN for every scale that is one: numpy's maximum of several leaves any."""
    blocks = blocks.copy()
    scales = blocks.reshape(-1, block_bytes)[:, :2].copy().view(np.float16)
    scales[np.isnan(scales)] = np.nan
    blocks.reshape(-1, block_bytes)[:, :2] = scales.view(np.uint8)
    return blocks


def exact_product(x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> cases.Exact:
    """x @ w.T + bias in float64, and the size that its terms give such a sum."""
    w = np.swapaxes(w, -1, -2)
    with np.errstate(invalid="ignore", over="ignore"):
        value = x @ w
        size = np.sqrt((x * x) @ (w * w))
    return cases.Exact(value if bias is None else value + bias, size)


def assert_error_at_most_that_of_mx(y: mx.array, twin: mx.array, exact: cases.Exact):
    """By root mean squares, against float64: a largest error is that of one number's rounding, which luck decides.

    What lies between two 16-bit numbers to within float32's rounding goes to either, hence 1.01; and eight units of
    float32 are what the order of a sum in it explains.
    """
    ours, theirs = (np.sqrt(np.mean((cases.widen(a) - exact.value) ** 2)) for a in (y, twin))
    explained = 8 * cases.EPSILON[mx.float32] * np.sqrt(np.mean(exact.value**2))
    assert ours <= max(1.01 * theirs, explained), f"error {ours:.2e}, mx's {theirs:.2e}, float32's {explained:.2e}"


def assert_right(actual: mx.array, exact: cases.Exact, dtype: mx.Dtype):
    """Within rounding of float64: 16-bit results by one unit in the last place, float32 sums by some, with outliers."""
    assert actual.dtype == dtype, f"{actual.dtype}, expected {dtype}"
    found = cases.error(actual, exact)
    allowed = (64 if dtype == mx.float32 else 1) * cases.EPSILON[dtype]
    assert found <= allowed, f"error {found:.2e}, allowed {allowed:.2e}"
