"""The rows of the table of ops for keys and values in blocks of a pool; `specs` puts them into the table.

The shape of a case is ``(batch, heads, key_heads, queries, keys, width)`` of attention and ``(batch, key_heads, tokens,
width)`` of an append. Of the options, ``block`` says how many keys a block has, ``bits`` whether pools are packed, and
``ragged`` whether rows have lengths of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..ops import attention, cache
from .attention import UNITS, draw_rows, exact_attention, seen_of_rows
from .op import EPSILON, Case, Exact, Op, cases_for_tests, dequantized, draw_packed, widen

_POOLS = tuple((f"{pool}{what}", "rows") for pool in ("keys", "values") for what in ("", "_scales", "_biases"))


def draw_table(rng: np.random.Generator, shape: tuple[int, ...]) -> mx.array:
    """Each block of a pool once, in any order."""
    order = np.argsort(rng.random(math.prod(shape)), kind="stable")  # a calibration repeats few numbers
    return mx.array(order.reshape(shape).astype(np.int32))


@dataclass(frozen=True, kw_only=True)
class PagedOp(Op):
    """Ops that read or write pools: draws the pools and their tables."""

    def pool_shapes(self, case: Case, blocks: int, key_heads: int, width: int) -> list[tuple[int, ...]]:
        options = self.arguments(case)
        rows: tuple[int, ...] = (blocks, key_heads, options["block"])
        bits, group_size = options["bits"], options["group_size"]
        groups: tuple[int, ...] = (*rows, width // group_size)
        return 2 * [(*rows, width * bits // 32 if bits else width), groups, groups]

    def draw_pool(
        self, rng: np.random.Generator, case: Case, name: str, shape: tuple[int, ...], dtype: mx.Dtype
    ) -> mx.array | None:
        bits = self.arguments(case)["bits"]
        if bits:
            return draw_packed(rng, name, shape, bits, dtype)
        return None if name.endswith(("scales", "biases")) else draw_rows(rng, shape, dtype)

    def held(self, case: Case, pools: Sequence[mx.array | None]) -> list[np.ndarray]:
        """Contents of the pools of keys and of values, in float64."""
        options = self.arguments(case)
        if not options["bits"]:
            return [widen(a) for a in pools if a is not None]
        there = [a for a in pools if a is not None]
        triples = (there[:3], there[3:])
        return [dequantized(w, s, b, options["group_size"], options["bits"]) for w, s, b in triples]

    def pool_bytes(self, case: Case, width: int, dtype: mx.Dtype) -> float:
        """Bytes of a key."""
        options = self.arguments(case)
        packed = width * options["bits"] / 8 + 2 * dtype.size * (width // options["group_size"])
        return packed if options["bits"] else float(width * dtype.size)


@dataclass(frozen=True, kw_only=True)
class PagedAttentionOp(PagedOp):
    smallest = (2, 2, 1, 1, 3, 64)

    def shapes(self, case: Case) -> list[tuple[int, ...]]:
        batch, heads, key_heads, queries, keys, width = case.shape
        entries = -(-keys // self.arguments(case)["block"]) + 1
        pools = self.pool_shapes(case, batch * entries + 1, key_heads, width)
        return [(batch, heads, queries, width), *pools, (heads,), (batch, entries), (batch,)]

    def draw(self, rng: np.random.Generator, case: Case, dtype: mx.Dtype) -> list[mx.array | None]:
        options, keys = self.arguments(case), case.shape[4]
        arrays: list[mx.array | None] = []
        for (name, kind), shape in zip(self.parameters, self.shapes(case), strict=True):
            if name == "q":
                batch, heads, queries, width = shape
                arrays.append(draw_rows(rng, (batch, queries, heads, width), dtype).swapaxes(1, 2))
            elif kind == "sinks":
                arrays.append(mx.array(rng.standard_normal(shape)).astype(dtype) if options["sinks"] else None)
            elif name == "block_table":
                arrays.append(draw_table(rng, shape))
            elif name == "lengths":
                lengths = rng.integers(keys // 2, keys + 1, shape) if options["ragged"] else np.full(shape, keys)
                arrays.append(mx.array(lengths.astype(np.int32)))
            else:
                arrays.append(self.draw_pool(rng, case, name, shape, dtype))
        return arrays

    def bytes_moved(self, case: Case, dtype: mx.Dtype) -> int:
        batch, heads, key_heads, queries, keys, width = case.shape
        rows = 2 * batch * heads * queries * width * dtype.size
        return rows + int(2 * batch * key_heads * keys * self.pool_bytes(case, width, dtype))

    def exact(self, case: Case, arrays: Sequence[mx.array | None], cotangents: Sequence[mx.array] = ()) -> list[Exact]:
        q, *pools, sinks, table, lengths = arrays
        options = self.arguments(case)
        assert q is not None and table is not None
        keys, values = (_rows(a, np.array(table)) for a in self.held(case, pools))
        batch, queries = case.shape[0], case.shape[3]
        causal, window = options["mask"] == "causal", options["window"]
        seen = seen_of_rows(None, lengths, causal, window, batch, queries, keys.shape[2])
        return [exact_attention(widen(q), keys, values, case.shape[-1] ** -0.5, mx.array(seen), sinks)]


def _rows(pool, table):
    """The rows of a pool that a table names: ``[batch, heads, keys, ..]``, an array of either kind."""
    rows = pool[table].swapaxes(1, 2)
    return rows.reshape(*rows.shape[:2], -1, rows.shape[-1])


def _pools(arrays: Sequence[Any], bits: int) -> tuple[Any, Any]:
    return (tuple(arrays[:3]), tuple(arrays[3:])) if bits else (arrays[0], arrays[3])


def _ours(q, *rest, block, bits, group_size, mask, window, sinks, ragged):
    *pools, given, table, lengths = rest
    return attention.paged_attention(
        q, *_pools(pools, bits), table, lengths, scale=q.shape[-1] ** -0.5, mask=mask, sinks=given, window=window,
        group_size=group_size, bits=bits or 8,
    )  # fmt: skip


def _twin(q, *rest, block, bits, group_size, mask, window, sinks, ragged):
    *pools, given, table, lengths = rest
    held = _pools(pools, bits)
    rows = [_rows(mx.dequantize(*a, group_size, bits) if bits else a, table) for a in held]
    keys = rows[0].shape[2]
    seen = seen_of_rows(None, lengths, mask == "causal", window, len(q), q.shape[2], keys)
    return mx.fast.scaled_dot_product_attention(q, *rows, scale=q.shape[-1] ** -0.5, mask=mx.array(seen), sinks=given)


@dataclass(frozen=True, kw_only=True)
class PagedAppendOp(PagedOp):
    """Rows begin in the middle of a block."""

    smallest = (2, 1, 1, 64)

    def first(self, case: Case) -> int:
        return int(self.arguments(case)["block"]) - 2

    def shapes(self, case: Case) -> list[tuple[int, ...]]:
        batch, key_heads, tokens, width = case.shape
        entries = (self.first(case) + tokens - 1) // self.arguments(case)["block"] + 1
        new = (batch, key_heads, tokens, width)
        return [new, new, *self.pool_shapes(case, batch * entries + 1, key_heads, width), (batch, entries), (batch,)]

    def draw(self, rng: np.random.Generator, case: Case, dtype: mx.Dtype) -> list[mx.array | None]:
        arrays: list[mx.array | None] = []
        for (name, _), shape in zip(self.parameters, self.shapes(case), strict=True):
            if name == "block_table":
                arrays.append(draw_table(rng, shape))
            elif name == "positions":
                arrays.append(mx.full(shape, self.first(case), mx.int32))
            elif name.startswith("new"):
                batch, heads, tokens, width = shape
                arrays.append(draw_rows(rng, (batch, tokens, heads, width), dtype).swapaxes(1, 2))
            else:
                arrays.append(self.draw_pool(rng, case, name, shape, dtype))
        return arrays

    def link(self, case: Case) -> int:
        return 2

    def updated(self, case: Case) -> Mapping[int, int]:
        return {2 + i: i for i in range(6)} if self.arguments(case)["bits"] else {2: 0, 5: 1}

    def bytes_moved(self, case: Case, dtype: mx.Dtype) -> int:
        batch, key_heads, tokens, width = case.shape
        return int(2 * batch * key_heads * tokens * (width * dtype.size + self.pool_bytes(case, width, dtype)))

    def exact(self, case: Case, arrays: Sequence[mx.array | None], cotangents: Sequence[mx.array] = ()) -> list[Exact]:
        """New numbers may be off by a step of their group where they are packed."""
        *new, table, positions = (*arrays[:2], *arrays[-2:])
        options = self.arguments(case)
        place, steps = np.array(table), 2 ** (options["bits"] or 1) - 1
        results = []
        for pool, fresh in zip(self.held(case, arrays[2:8]), (widen(a) for a in new if a is not None), strict=True):
            inner = np.zeros_like(pool)
            groups = fresh.reshape(*fresh.shape[:3], -1, options["group_size"] if options["bits"] else fresh.shape[-1])
            extent = np.maximum(groups.max(-1), 0) - np.minimum(groups.min(-1), 0)
            step = np.repeat(extent / steps, groups.shape[-1], axis=-1) if options["bits"] else np.zeros_like(fresh)
            for row, token in np.ndindex(fresh.shape[0], fresh.shape[2]):
                at = int(np.array(positions)[row]) + token
                to = place[row, at // options["block"]], slice(None), at % options["block"]
                pool[to], inner[to] = fresh[row, :, token], step[row, :, token] / EPSILON[mx.float32]
            results.append(Exact(pool, None, inner))
        return results

    def compared(self, case: Case, results: Sequence[mx.array]) -> list[mx.array]:
        options = self.arguments(case)
        if not options["bits"]:
            return list(results)
        with mx.stream(mx.cpu):
            triples = (results[:3], results[3:])
            return [mx.dequantize(w, s, b, options["group_size"], options["bits"]) for w, s, b in triples]


def _flat(pools, bits):
    return tuple(a for pool in pools for a in (pool if bits else (pool,)))


def _ours_append(keys, values, *rest, block, bits, group_size):
    *pools, table, positions = rest
    options = {"group_size": group_size, "bits": bits or 8}
    return _flat(cache.paged_append(keys, values, *_pools(pools, bits), table, positions, **options)[:2], bits)


def _twin_append(keys, values, *rest, block, bits, group_size):
    *pools, table, positions = rest
    batch, tokens = keys.shape[0], keys.shape[2]
    at = positions[:, None] + mx.arange(tokens)
    blocks, within = mx.take_along_axis(table, at // block, 1), at % block
    parts = []
    for pool, new in zip(_pools(pools, bits), (keys, values), strict=True):
        held = pool if bits else (pool,)
        for buffer, part in zip(held, mx.quantize(new, group_size, bits) if bits else (new,), strict=True):
            buffer = buffer[...]  # a new array: the assignment must not change the held one
            rows = part.swapaxes(1, 2).reshape(batch * tokens, *part.shape[1::2])
            buffer[blocks.reshape(-1), :, within.reshape(-1)] = rows
            parts.append(buffer)
    return tuple(parts)


_OPTIONS: dict[str, Any] = {"block": 16, "bits": 0, "group_size": 64}

PAGED_ATTENTION_OPS: tuple[Op, ...] = (
    PagedAttentionOp(
        name="paged_attention",
        parameters=(("q", "rows"), *_POOLS, ("sinks", "sinks"), ("block_table", "rows"), ("lengths", "rows")),
        ours=_ours,
        twin=_twin,
        twin_text="two `mx.take`, `mx.fast.scaled_dot_product_attention` with a mask",
        summary="attention over blocks of keys and values that a table names",
        options={**_OPTIONS, "mask": None, "window": None, "sinks": False, "ragged": False},
        tests=(
            *cases_for_tests((3, 4, 2, 1, 40, 64), (1, 2, 1, 1, 17, 128), (1, 2, 1, 1, 1, 96), (2, 2, 1, 1, 30, 256)),
            *cases_for_tests((1, 2, 1, 1, 20, 80)),
            *cases_for_tests((2, 4, 2, 3, 70, 64), mask="causal", ragged=True, block=32),
            *cases_for_tests((2, 2, 1, 18, 40, 80), mask="causal", ragged=True),
            *cases_for_tests(*((1, 1, 1, 17, 20, width) for width in (64, 96, 128, 256)), mask="causal"),
            *cases_for_tests((2, 4, 2, 2, 130, 64), window=33, sinks=True, block=64),
            *cases_for_tests((1, 2, 1, 1, 300, 64), (1, 2, 1, 1, 600, 64)),  # several threadgroups share their keys
            *cases_for_tests((2, 4, 2, 1, 70, 64), (1, 2, 1, 1, 20, 128), bits=8),
            *cases_for_tests((1, 2, 1, 18, 40, 128), (1, 1, 1, 17, 20, 64), bits=8, mask="causal"),
            *cases_for_tests((1, 2, 1, 1, 33, 96), (1, 1, 1, 17, 20, 96), bits=8, group_size=32, block=32, ragged=True),
        ),
        cases=(
            Case("decode", (4, 8, 2, 1, 512, 64), quick=True),
            Case("decode", (8, 32, 8, 1, 4096, 128)),
            Case("decode", (8, 32, 8, 1, 4096, 128), {"bits": 8}, gpu_only=True),
        ),
        units=UNITS,
    ),
)

PAGED_APPEND_OPS: tuple[Op, ...] = (
    PagedAppendOp(
        name="paged_append",
        parameters=(
            *(("new_keys", "rows"), ("new_values", "rows")),
            *(*_POOLS, ("block_table", "rows"), ("positions", "rows")),
        ),
        outputs=2,
        ours=_ours_append,
        twin=_twin_append,
        twin_text="two `mx.quantize` for packed pools, two or six indexed updates",
        summary="keys and values of new tokens into blocks that a table names, in one kernel",
        options=_OPTIONS,
        tests=(
            *cases_for_tests((2, 2, 1, 64), (3, 1, 5, 80), (1, 2, 3, 33)),
            *cases_for_tests((2, 2, 3, 64), bits=8, block=32),
            *cases_for_tests((1, 2, 2, 128), bits=4, group_size=128),
            *cases_for_tests((2, 1, 2, 96), bits=6, group_size=32),
        ),
        cases=(
            Case("decode", (4, 2, 1, 64), quick=True),
            Case("decode", (8, 8, 1, 128)),
            Case("decode", (8, 8, 1, 128), {"bits": 8}),
        ),
    ),
)
