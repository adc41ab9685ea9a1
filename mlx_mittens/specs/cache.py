"""The row of the table of ops for rotary embedding; `specs` puts it into the table.

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
from .op import Case, Exact, Op, add_outliers, cases_for_tests, widen


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

    def exact(self, case: Case, arrays: Sequence[mx.array | None], cotangents: Sequence[mx.array] = ()) -> list[Exact]:
        options = self.arguments(case)
        heads, keys, values = (widen(a) for a in arrays[:3] if a is not None)
        freqs, query_norm, key_norm = (widen(a) for a in arrays[3:])
        key_heads, tokens = case.shape[2:4]
        parts = np.split(heads, [heads.shape[1] - 2 * key_heads, heads.shape[1] - key_heads], axis=1)
        turned = []  # heads that a norm has rounded are no more exact than the terms of what they are turned into
        for part, weight in zip(parts, (query_norm, key_norm)):
            if weight is not None:
                part = reference.rms_norm(part, weight, options["eps"])
            value, terms, inner = reference.rope(part, options["dims"], options["base"], options["offset"], freqs)
            turned.append((value, terms if weight is not None else np.zeros_like(terms), inner))
        new = slice(options["offset"], options["offset"] + tokens)
        key_terms, key_errors = np.zeros_like(keys), np.zeros_like(keys)
        keys[:, :, new], key_terms[:, :, new], key_errors[:, :, new] = turned[1]
        values[:, :, new] = parts[2]
        return [Exact(*turned[0]), Exact(keys, key_terms, key_errors), Exact(values)]


def _ours(heads, keys, values, freqs, query_norm, key_norm, dims, base, offset, eps):
    return cache.rope_append(
        heads, keys, values, dims, base=base, offset=offset, freqs=freqs, query_norm=query_norm, key_norm=key_norm,
        eps=eps or 0.0,
    )  # fmt: skip


def _twin(heads, keys, values, freqs, query_norm, key_norm, dims, base, offset, eps):
    query_heads = heads.shape[1] - 2 * keys.shape[1]
    queries, new_keys, new_values = mx.split(heads, (query_heads, query_heads + keys.shape[1]), axis=1)
    if query_norm is not None:
        queries, new_keys = mx.fast.rms_norm(queries, query_norm, eps), mx.fast.rms_norm(new_keys, key_norm, eps)
    turn = {"traditional": False, "base": base, "scale": 1.0, "offset": offset, "freqs": freqs}
    queries, new_keys = mx.fast.rope(queries, dims, **turn), mx.fast.rope(new_keys, dims, **turn)
    keys, values = keys[...], values[...]  # others, for what is assigned to them
    new = slice(offset, offset + heads.shape[2])
    keys[:, :, new], values[:, :, new] = new_keys, new_values
    return queries, keys, values


_LLAMA3: dict[str, Any] = {"base": None}  # its frequencies are scaled, and given as such

ROPE_OPS: tuple[Op, ...] = (
    RopeAppendOp(
        name="rope_append",
        parameters=tuple((name, "rows") for name in ("heads", "keys", "values", "freqs", "query_norm", "key_norm")),
        outputs=3,
        ours=_ours,
        twin=_twin,
        twin_text="two `mx.fast.rope`, two slice updates",
        summary="rotary embedding and append to a key-value cache in one kernel",
        options={"dims": 64, "base": 10000.0, "offset": 7, "eps": None},
        tests=cases_for_tests((1, 4, 2, 1, 64), (2, 3, 1, 5, 64), (2, 1, 2, 3, 65))
        + cases_for_tests((1, 4, 2, 2, 96), **_LLAMA3)
        + cases_for_tests((2, 3, 1, 3, 80), dims=80, eps=1e-6)
        + cases_for_tests((1, 2, 1, 2, 66), dims=66)
        + cases_for_tests((1, 2, 1, 2, 128), dims=128, eps=1e-6)
        + cases_for_tests((1, 1, 1, 2, 194), dims=194, **_LLAMA3)
        + cases_for_tests((1, 1, 1, 2, 2), dims=2)
        + cases_for_tests((1, 2, 1, 2, 129), dims=2, eps=1e-5, **_LLAMA3)
        + cases_for_tests((1, 2, 1, 1, 64), offset=0)
        + cases_for_tests((1, 2, 1, 2, 64), offset=300),
        cases=(
            Case("Llama-3.2-1B decode", (1, 32, 8, 1, 64), {**_LLAMA3, "offset": 200}, quick=True),
            Case("Llama-3.1-8B decode", (1, 32, 8, 1, 128), {**_LLAMA3, "dims": 128, "offset": 200}),
            Case("Qwen3-0.6B decode", (1, 16, 8, 1, 128), {"dims": 128, "base": 1e6, "offset": 200, "eps": 1e-6}),
            Case("Llama-3.2-1B prompt", (1, 32, 8, 512, 64), {**_LLAMA3, "offset": 0}),
        ),
    ),
)
