"""Helpers that the tests of products with weights share: inputs and float64 references."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from mlx_mittens import specs
from mlx_mittens.specs.op import gated

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


def draw_blocks(
    rng: np.random.Generator, rows: int, count: int, kind: str, size: float = 1 / 20, spread: int = 3
) -> np.ndarray:
    """Rows of GGUF blocks of any bytes, with finite halves, and scales of about a size: some doublings more or less."""
    each = specs.gguf.KINDS[kind]
    blocks = rng.integers(0, 256, (rows, count, each.bytes), dtype=np.uint8)
    for at in each.halves:
        halves = rng.normal(size=(rows, count, 1)) * size
        blocks[..., at : at + 2] = halves.astype(np.float16).view(np.uint8)
    if each.scales:
        exponent = round(np.log2(size)) * (8 if each.scales > 1 else 1)  # begins at bit 3, or 0
        scales = rng.integers(-spread, spread + 1, (rows, count, each.scales)) + each.scale + exponent
        blocks[..., : each.scales] = np.clip(scales, 1, 254)
    return blocks.reshape(rows, -1)


def with_one_nan(blocks: np.ndarray, kind: str) -> np.ndarray:
    """Bytes of GGUF blocks with the same NaN for every half that is one: numpy's maximum of several leaves any.

    So does its minimum of zeros of both signs, which is 0 here.
    """
    blocks, each = blocks.copy(), specs.gguf.KINDS[kind]
    for at in each.halves:
        halves = blocks.reshape(-1, each.bytes)[:, at : at + 2].copy().view(np.float16)
        halves[np.isnan(halves)] = np.nan
        halves += np.float16(0) if at else np.float16(-0.0)
        blocks.reshape(-1, each.bytes)[:, at : at + 2] = halves.view(np.uint8)
    return blocks


def exact_product(x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> specs.Exact:
    """x @ w.T + bias in float64, and the size that its terms give such a sum."""
    w = np.swapaxes(w, -1, -2)
    with np.errstate(invalid="ignore", over="ignore"):
        value = x @ w
        size = np.sqrt((x * x) @ (w * w))
    return specs.Exact(value if bias is None else value + bias, size)


def exact_swiglu(x, gate, up, group_size, bits, activation="swiglu"):
    products = (exact_product(specs.widen(x), specs.dequantized(*w, group_size, bits)) for w in (gate, up))
    return gated(*products, activation)
