"""Bytes of GGUF: quantized and widened as the `gguf` package does it, bit for bit."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType, quants
from helpers.matrices import with_one_nan
from verification.fuzz.draw import FLOATS, Draw, type_name
from verification.fuzz.trial import Trial

import mlx_mittens as mm
from mlx_mittens.specs.gguf import KINDS

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


def _type_of(kind: str) -> GGMLQuantizationType:
    """The package's name of a kind."""
    return getattr(GGMLQuantizationType, "IQ4_" + kind[4:].upper() if kind.startswith("iq4") else kind.upper())


def block_bytes(draw: Draw) -> Trial:
    kind, dtype, numbers = draw.pick(list(KINDS)), draw.pick(FLOATS), draw.pick(NUMBERS)
    rows, count = draw.integer(1, 5), draw.integer(1, 8)
    each, known = KINDS[kind], _type_of(kind)
    quantized = ("q4_0", "q8_0") if draw.gpu else ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0")
    with np.errstate(all="ignore"):
        weights = mx.array(_weights(draw, (rows, each.weights * count), numbers)).astype(dtype)
    blocks = draw.rng.integers(0, 256, (rows, count, each.bytes), dtype=np.uint8)
    if draw.chance(0.3):
        for at in each.halves:
            scales = draw.rng.choice(SCALES, (rows, count)).astype(np.float16)
            blocks[..., at : at + 2] = scales[..., None].view(np.uint8)
    blocks = blocks.reshape(rows, -1)

    def run() -> str | None:
        with np.errstate(all="ignore"):
            widened = quants.dequantize(blocks, known)
            expected = quants.quantize(np.array(weights.astype(mx.float32)), known) if kind in quantized else None
        if expected is not None:
            ours = np.array(mm.block_quantize(weights, kind))
            alike = ours.shape == expected.shape
            differs = not alike or (with_one_nan(ours, kind) != with_one_nan(expected, kind))
            if np.any(differs):
                at = tuple(map(int, np.argwhere(differs)[0])) if alike else ours.shape
                return f"block_quantize: the bytes differ from gguf's, first at {at}"
        ours = np.array(mm.block_dequantize(mx.array(blocks), kind))
        if not np.array_equal(ours, widened, equal_nan=True):
            return "block_dequantize: the weights differ from gguf's"
        return None

    return Trial(numbers, f"{kind} {type_name(dtype)}[{rows}, {each.weights * count}] {numbers}", run)
