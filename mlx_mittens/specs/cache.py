"""The rows of the table of ops for rotary embedding; `specs` puts them into the table.

The shape of a case is ``(batch, query_heads, key_heads, tokens, width)``. Of the options, ``base`` says whether there
are frequencies instead, ``eps`` whether there are norms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..ops import cache
from . import reference
from .op import EPSILON, Case, Exact, Op, add_outliers, all_rows, cases_for_tests, dequantized, draw_packed, widen


@dataclass(frozen=True, kw_only=True)
class RopeAppendOp(Op):
    """Rotary embedding, and keys and values into a cache. Gradients are tested beside the table."""

    # The least shape that any case's options allow.
    smallest = (1, 4, 2, 2, 64)

    def shapes(self, case: Case) -> list[tuple[int, ...]]:
        batch, query_heads, key_heads, tokens, width = case.shape
        options = self.arguments(case)
        buffer = (batch, key_heads, (options["offset"] + tokens) // 8 * 8 + 8, width)
        heads = (batch, query_heads + 2 * key_heads, tokens, width)
        return [heads, buffer, buffer, (options["dims"] // 2,), (width,), (width,)]

    def draw(self, rng: np.random.Generator, case: Case, dtype: mx.Dtype) -> list[mx.array | None]:
        # Heads are transposed, as the product with a layer's weights leaves them.
        options = self.arguments(case)
        batch, heads, tokens, width = self.shapes(case)[0]
        arrays = []
        for (name, _), shape in zip(self.parameters, self.shapes(case), strict=True):
            if name == "freqs":
                drawn = np.exp(rng.uniform(0, 9, shape)) if options["base"] is None else None
                arrays.append(None if drawn is None else mx.array(drawn.astype(np.float32)))
            elif name.endswith("norm"):
                drawn = None if options["eps"] is None else 1 + rng.standard_normal(shape) / 4
                arrays.append(None if drawn is None else mx.array(drawn.astype(np.float32)).astype(dtype))
            else:
                drawn = rng.standard_normal((batch, tokens, heads, width) if name == "heads" else shape, np.float32)
                add_outliers(rng, drawn)
                array = mx.array(drawn).astype(dtype)
                arrays.append(array.swapaxes(1, 2) if name == "heads" else array)
        return arrays

    def link(self, case: Case) -> int:
        return 1

    def updated(self, case: Case) -> Mapping[int, int]:
        return {1: 1, 2: 2}

    def bytes_moved(self, case: Case, dtype: mx.Dtype) -> int:
        return 2 * dtype.size * int(np.prod(self.shapes(case)[0]))

    def buffers(self, case: Case, arrays: Sequence[mx.array]) -> list[np.ndarray]:
        """Contents of the buffers of keys and of values, in float64."""
        return [widen(a) for a in arrays]

    def exact(self, case: Case, arrays: Sequence[mx.array | None], cotangents: Sequence[mx.array] = ()) -> list[Exact]:
        options = self.arguments(case)
        new, *held = (a for a in arrays[:-3] if a is not None)
        heads, (keys, values) = widen(new), self.buffers(case, held)
        freqs, query_norm, key_norm = (widen(a) for a in arrays[-3:])
        key_heads, tokens = case.shape[2:4]
        parts = np.split(heads, [heads.shape[1] - 2 * key_heads, heads.shape[1] - key_heads], axis=1)
        turned = []  # heads that a norm has rounded are no more exact than the terms of the turned ones
        for part, weight in zip(parts, (query_norm, key_norm)):
            if weight is not None:
                part = reference.rms_norm(part, weight, options["eps"])
            value, terms, inner = reference.rope(
                part, options["dims"], options["base"], options["offset"], freqs, options["traditional"]
            )
            turned.append((value, terms if weight is not None else np.zeros_like(terms), inner))
        fresh = slice(options["offset"], options["offset"] + tokens)
        key_terms, key_errors = np.zeros_like(keys), np.zeros_like(keys)
        keys[:, :, fresh], key_terms[:, :, fresh], key_errors[:, :, fresh] = turned[1]
        values[:, :, fresh] = parts[2]
        return [Exact(*turned[0]), Exact(keys, key_terms, key_errors), Exact(values)]


@dataclass(frozen=True, kw_only=True)
class QuantizedRopeAppendOp(RopeAppendOp):
    """The same with buffers of words, scales and biases, which are compared after dequantization."""

    def shapes(self, case: Case) -> list[tuple[int, ...]]:
        heads, buffer, _, *others = super().shapes(case)
        options = self.arguments(case)
        words = (*buffer[:-1], buffer[-1] // 32 * options["bits"])
        groups = (*buffer[:-1], buffer[-1] // options["group_size"])
        return [heads, *2 * [words, groups, groups], *others]

    def draw(self, rng: np.random.Generator, case: Case, dtype: mx.Dtype) -> list[mx.array | None]:
        arrays = super().draw(rng, case, dtype)
        bits = self.arguments(case)["bits"]
        for i, ((name, _), shape) in enumerate(zip(self.parameters, self.shapes(case), strict=True)):
            if 1 <= i <= 6:
                arrays[i] = draw_packed(rng, name, shape, bits, dtype)
        return arrays

    def updated(self, case: Case) -> Mapping[int, int]:
        return {i: i for i in range(1, 7)}

    def bytes_moved(self, case: Case, dtype: mx.Dtype) -> int:
        batch, query_heads, key_heads, tokens, width = case.shape
        options = self.arguments(case)
        packed = width * options["bits"] // 8 + 2 * dtype.size * (width // options["group_size"])
        heads = (2 * query_heads + 2 * key_heads) * width * dtype.size
        return batch * tokens * (heads + 2 * key_heads * packed)

    def buffers(self, case: Case, arrays: Sequence[mx.array]) -> list[np.ndarray]:
        options = self.arguments(case)
        triples = (arrays[:3], arrays[3:])
        return [dequantized(w, s, b, options["group_size"], options["bits"]) for w, s, b in triples]

    def exact(self, case: Case, arrays: Sequence[mx.array | None], cotangents: Sequence[mx.array] = ()) -> list[Exact]:
        """Numbers that are not quantized; the new ones may be off by a step of their group."""
        queries, *buffers = super().exact(case, arrays, cotangents)
        options = self.arguments(case)
        new = slice(options["offset"], options["offset"] + case.shape[3])
        results = []
        for buffer in buffers:
            groups = buffer.value[:, :, new].reshape(*buffer.value[:, :, new].shape[:3], -1, options["group_size"])
            extent = np.maximum(groups.max(-1), 0) - np.minimum(groups.min(-1), 0)
            step = np.repeat(extent / (2 ** options["bits"] - 1), options["group_size"], axis=-1)
            inner = np.zeros_like(buffer.value) if buffer.inner is None else buffer.inner.copy()
            inner[:, :, new] += step / EPSILON[mx.float32]
            results.append(Exact(buffer.value, buffer.magnitude, inner))
        return [queries, *results]

    def compared(self, case: Case, results: Sequence[mx.array]) -> list[mx.array]:
        options = self.arguments(case)
        triples = (results[1:4], results[4:])
        with mx.stream(mx.cpu):
            held = [mx.dequantize(w, s, b, options["group_size"], options["bits"]) for w, s, b in triples]
        return [results[0], *held]


def _ours(heads, keys, values, freqs, query_norm, key_norm, dims, base, offset, eps, traditional):
    return cache.rope_append(
        heads, keys, values, dims, base=base, offset=offset, freqs=freqs, query_norm=query_norm, key_norm=key_norm,
        eps=eps or 0.0, traditional=traditional,
    )  # fmt: skip


def _turned(heads, key_heads, freqs, query_norm, key_norm, dims, base, offset, eps, traditional):
    """Turned queries, turned keys, and values."""
    query_heads = heads.shape[1] - 2 * key_heads
    queries, new_keys, new_values = mx.split(heads, (query_heads, query_heads + key_heads), axis=1)
    if query_norm is not None:
        queries, new_keys = mx.fast.rms_norm(queries, query_norm, eps), mx.fast.rms_norm(new_keys, key_norm, eps)
    turn = {"traditional": traditional, "base": base, "scale": 1.0, "offset": offset, "freqs": freqs}
    return mx.fast.rope(queries, dims, **turn), mx.fast.rope(new_keys, dims, **turn), new_values


def _twin(heads, keys, values, freqs, query_norm, key_norm, dims, base, offset, eps, traditional):
    turned = _turned(heads, keys.shape[1], freqs, query_norm, key_norm, dims, base, offset, eps, traditional)
    queries, new_keys, new_values = turned
    keys, values = keys[...], values[...]  # copies, since the call assigns to them
    new = slice(offset, offset + heads.shape[2])
    keys[:, :, new], values[:, :, new] = new_keys, new_values
    return queries, keys, values


def _ours_packed(heads, *rest, dims, base, offset, eps, traditional, group_size, bits):
    *packed, freqs, query_norm, key_norm = rest
    queries, keys, values = cache.quantized_rope_append(
        heads, tuple(packed[:3]), tuple(packed[3:]), dims, base=base, offset=offset, freqs=freqs, query_norm=query_norm,
        key_norm=key_norm, eps=eps or 0.0, traditional=traditional, group_size=group_size, bits=bits,
    )  # fmt: skip
    return queries, *keys, *values


def _twin_packed(heads, *rest, dims, base, offset, eps, traditional, group_size, bits):
    *packed, freqs, query_norm, key_norm = rest
    turned = _turned(heads, packed[0].shape[1], freqs, query_norm, key_norm, dims, base, offset, eps, traditional)
    packed = [a[...] for a in packed]  # copies, since the call assigns to them
    new = slice(offset, offset + heads.shape[2])
    parts = [part for a in turned[1:] for part in mx.quantize(a, group_size, bits)]
    for buffer, part in zip(packed, parts, strict=True):
        buffer[:, :, new] = part
    return turned[0], *packed


_LLAMA3: dict[str, Any] = {"base": None}  # its frequencies are scaled, and given as such
_OPTIONS: dict[str, Any] = {"dims": 64, "base": 10000.0, "offset": 7, "eps": None, "traditional": False}

ROPE_OPS: tuple[Op, ...] = (
    RopeAppendOp(
        name="rope_append",
        parameters=all_rows("heads", "keys", "values", "freqs", "query_norm", "key_norm"),
        outputs=3,
        ours=_ours,
        twin=_twin,
        twin_text="two `mx.fast.rope`, two slice updates",
        summary="rotary embedding and append to a key-value cache in one kernel",
        options=_OPTIONS,
        tests=cases_for_tests((1, 4, 2, 1, 64), (2, 3, 1, 5, 64), (2, 1, 2, 3, 65))
        + cases_for_tests((1, 4, 2, 2, 96), **_LLAMA3)
        + cases_for_tests((2, 3, 1, 3, 80), dims=80, eps=1e-6)
        + cases_for_tests((1, 2, 1, 2, 66), dims=66)
        + cases_for_tests((1, 2, 1, 2, 128), dims=128, eps=1e-6)
        + cases_for_tests((1, 1, 1, 2, 194), dims=194, **_LLAMA3)
        + cases_for_tests((1, 1, 1, 2, 2), dims=2)
        + cases_for_tests((1, 2, 1, 2, 129), dims=2, eps=1e-5, **_LLAMA3)
        + cases_for_tests((1, 2, 1, 1, 64), offset=0)
        + cases_for_tests((1, 2, 1, 2, 64), offset=300)
        + cases_for_tests((2, 3, 1, 3, 80), dims=70, traditional=True)
        + cases_for_tests((1, 2, 1, 2, 129), dims=128, traditional=True, eps=1e-6),
        cases=(
            Case("Llama-3.2-1B decode", (1, 32, 8, 1, 64), {**_LLAMA3, "offset": 200}, quick=True),
            Case("Llama-3.1-8B decode", (1, 32, 8, 1, 128), {**_LLAMA3, "dims": 128, "offset": 200}),
            Case("Qwen3-0.6B decode", (1, 16, 8, 1, 128), {"dims": 128, "base": 1e6, "offset": 200, "eps": 1e-6}),
            Case("Llama-3.2-1B prompt", (1, 32, 8, 512, 64), {**_LLAMA3, "offset": 0}),
        ),
    ),
    QuantizedRopeAppendOp(
        name="quantized_rope_append",
        parameters=all_rows(
            *("heads", "keys", "keys_scales", "keys_biases", "values", "values_scales", "values_biases"),
            *("freqs", "query_norm", "key_norm"),
        ),
        outputs=3,
        ours=_ours_packed,
        twin=_twin_packed,
        twin_text="two `mx.fast.rope`, two `mx.quantize`, six slice updates",
        summary="the same into a quantized cache",
        options={**_OPTIONS, "group_size": 64, "bits": 8},
        tests=cases_for_tests((1, 4, 2, 1, 64), bits=4)
        + cases_for_tests((2, 3, 1, 5, 64), bits=3)
        + cases_for_tests((2, 1, 2, 3, 96), dims=80, group_size=32, bits=6, eps=1e-6)
        + cases_for_tests((1, 2, 1, 2, 128), dims=128, group_size=128, **_LLAMA3)
        + cases_for_tests((1, 2, 1, 2, 256), dims=256, group_size=128, bits=2, eps=1e-6, **_LLAMA3)
        + cases_for_tests((1, 2, 1, 1, 32), dims=32, group_size=32, bits=5, offset=0)
        + cases_for_tests((1, 1, 1, 1, 64), dims=2, bits=4, eps=1e-5)
        + cases_for_tests((1, 2, 1, 3, 128), dims=96, bits=4, traditional=True),
        cases=(
            Case("Llama-3.2-1B decode", (1, 32, 8, 1, 64), {**_LLAMA3, "offset": 200, "bits": 4}, quick=True),
            Case("Llama-3.1-8B decode", (1, 32, 8, 1, 128), {**_LLAMA3, "dims": 128, "offset": 200, "bits": 8}),
            Case("Qwen3-0.6B decode", (1, 16, 8, 1, 128), {"dims": 128, "base": 1e6, "offset": 200, "eps": 1e-6}),
            Case("Llama-3.2-1B prompt", (1, 32, 8, 512, 64), {**_LLAMA3, "offset": 0, "bits": 4}),
        ),
    ),
)
