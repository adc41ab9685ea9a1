"""Bytes of GGUF: quantized and widened as the `gguf` package does it, bit for bit."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType, quants
from helpers.matrices import BLOCK_BYTES, with_one_nan
from verification.fuzz.draw import FLOATS, Draw, type_name
from verification.fuzz.trial import Trial

import mlx_mittens as mm

KINDS = {"q4_0": GGMLQuantizationType.Q4_0, "q8_0": GGMLQuantizationType.Q8_0}
NUMBERS = ("normal", "infinite", "nan", "subnormal", "zero", "huge", "integers", "equal", "halfway", "sparse")
SCALES = (np.nan, np.inf, -np.inf, 6e-8, 0.0, -0.0, 65504)


def _weights(draw: Draw, shape: tuple[int, int], numbers: str) -> np.ndarray:
    rng = draw.rng
    weights = rng.standard_normal(shape).astype(np.float32) * np.float32(10.0 ** rng.integers(-6, 6))
    if numbers == "zero":
        weights[:] = 0
    elif numbers == "integers":
        weights = rng.integers(-127, 128, shape).astype(np.float32)
    elif numbers == "equal":
        weights[:] = rng.standard_normal()
    elif numbers == "halfway":
        weights = (rng.integers(-16, 17, shape) / 2).astype(np.float32)
    elif numbers == "sparse":
        weights *= rng.random(shape) < 0.3
    elif numbers == "subnormal":
        weights *= np.float32(1e-38)
    special = {
        "infinite": (np.inf, -np.inf),
        "nan": (np.nan,),
        "subnormal": (1e-45, -1e-45, 1e-40, 0.0),
        "huge": (3.4e38, -3.4e38, 1e38, 65504, 65520, -65536, 7e5, -6e5),
    }.get(numbers)
    if special:
        places = rng.integers(0, weights.size, draw.integer(1, 4))
        weights.reshape(-1)[places] = rng.choice(special, len(places))
    return weights


def block_bytes(draw: Draw) -> Trial:
    kind, dtype, numbers = draw.pick(list(KINDS)), draw.pick(FLOATS), draw.pick(NUMBERS)
    rows, count = draw.integer(1, 5), draw.integer(1, 8)
    with np.errstate(all="ignore"):
        weights = mx.array(_weights(draw, (rows, 32 * count), numbers)).astype(dtype)
    blocks = draw.rng.integers(0, 256, (rows, count, BLOCK_BYTES[kind]), dtype=np.uint8)
    if draw.chance(0.3):
        scales = draw.rng.choice(SCALES, (rows, count)).astype(np.float16)
        blocks[..., :2] = scales[..., None].view(np.uint8)
    blocks = blocks.reshape(rows, -1)

    def run() -> str | None:
        size = BLOCK_BYTES[kind]
        with np.errstate(all="ignore"):
            expected = quants.quantize(np.array(weights.astype(mx.float32)), KINDS[kind])
            widened = quants.dequantize(blocks, KINDS[kind])
        ours = np.array(mm.block_quantize(weights, kind))
        differs = ours.shape != expected.shape or with_one_nan(ours, size) != with_one_nan(expected, size)
        if np.any(differs):
            at = np.argwhere(differs)[0] if ours.shape == expected.shape else ours.shape
            return f"block_quantize: the bytes differ from gguf's, first at {tuple(map(int, at))}"
        ours = np.array(mm.block_dequantize(mx.array(blocks), kind))
        if not np.array_equal(ours, widened, equal_nan=True):
            return "block_dequantize: the weights differ from gguf's"
        return None

    return Trial(numbers, f"{kind} {type_name(dtype)}[{rows}, {32 * count}] {numbers}", run)
