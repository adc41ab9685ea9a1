"""What the tests of products with weights share: inputs, float64 references, and the measure of error."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_mittens import specs

BLOCK_BYTES = {"q4_0": 18, "q8_0": 34}  # of GGUF's blocks: a scale in float16 and 32 integers


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


def exact_product(x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> specs.Exact:
    """x @ w.T + bias in float64, and the size that its terms give such a sum."""
    w = np.swapaxes(w, -1, -2)
    with np.errstate(invalid="ignore", over="ignore"):
        value = x @ w
        size = np.sqrt((x * x) @ (w * w))
    return specs.Exact(value if bias is None else value + bias, size)


def assert_error_at_most_that_of_mx(y: mx.array, twin: mx.array, exact: specs.Exact):
    """By root mean squares, against float64: a largest error is that of one number's rounding, which luck decides.

    What lies between two 16-bit numbers to within float32's rounding goes to either, hence 1.01; and eight units of
    float32 are what the order of a sum in it explains.
    """
    ours, theirs = (np.sqrt(np.mean((specs.widen(a) - exact.value) ** 2)) for a in (y, twin))
    explained = 8 * specs.EPSILON[mx.float32] * np.sqrt(np.mean(exact.value**2))
    assert ours <= max(1.01 * theirs, explained), f"error {ours:.2e}, mx's {theirs:.2e}, float32's {explained:.2e}"


def assert_right(actual: mx.array, exact: specs.Exact, dtype: mx.Dtype):
    """Within rounding of float64: 16-bit results by one unit in the last place, float32 sums by some, with outliers."""
    assert actual.dtype == dtype, f"{actual.dtype}, expected {dtype}"
    found = specs.error(actual, exact)
    allowed = (64 if dtype == mx.float32 else 1) * specs.EPSILON[dtype]
    assert found <= allowed, f"error {found:.2e}, allowed {allowed:.2e}"


def exact_swiglu(x, gate, up, group_size, bits):
    gated, linear = (exact_product(specs.widen(x), specs.dequantized(*w, group_size, bits)) for w in (gate, up))
    with np.errstate(over="ignore"):
        silu = gated.value / (1 + np.exp(-gated.value))
    size = np.abs(silu) * linear.magnitude + (np.abs(gated.magnitude) + np.abs(silu)) * np.abs(linear.value)
    return specs.Exact(silu * linear.value, size)
