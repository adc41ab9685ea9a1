"""Random calls of the rotary embedding with its append to a cache, plain or quantized.

Heads made of latents are appended under the patch alone: `heads_of_latents` draws mlx-lm's calls.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from verification.fuzz import exact
from verification.fuzz.case import Case
from verification.fuzz.compare import to_float64
from verification.fuzz.draw import Draw, describe, float32, type_name
from verification.fuzz.trial import Trial

import mlx_mittens as mm
from mlx_mittens import _ext, specs
from mlx_mittens.specs import EPSILON

EPSILON32 = EPSILON[mx.float32]


def rope_append(draw: Draw) -> Case:
    dtype, eps = draw.dtype(), float32(1e-6)
    batch, key_heads, query_heads = draw.pick((1, 1, 2, 3)), draw.pick((1, 1, 2, 3)), draw.pick((1, 2, 3, 4, 8))
    width = draw.pick((2, 4, 7, 8, 32, 33, 64, 64, 80, 96, 128, 128, 256))
    tokens = draw.pick((0, 1, 1, 1, 2, 3, 7, 8, 17, 33), [0.02] + [0.98 / 9] * 9)
    dims = 2 * draw.integer(1, width // 2) if draw.chance(0.5) else width // 2 * 2
    start = draw.integer(0, 19)
    capacity = start + tokens + draw.pick((0, 1, 5, 16))
    value_capacity = capacity if draw.chance(0.7) else start + tokens + draw.integer(0, 8)
    given_start = draw.chance(0.7)
    offset = draw.pick((0, 0, 1, 5, 100, 4095, 100000)) if given_start else start
    by_freqs, normed, traditional = draw.chance(0.3), draw.chance(0.4), draw.chance(0.3)
    base = None if by_freqs else float32(draw.pick((10000.0, 500000.0, 1e6, 100.0)))
    scale = float32(draw.pick((1.0, 1.0, 1.0, 0.5, 2.0)))
    kind = draw.kind(("normal", "normal", "large", "small"))
    arrays = [
        draw.array(draw.numbers((batch, query_heads + 2 * key_heads, tokens, width), kind), dtype),
        draw.normal((batch, key_heads, capacity, width), dtype),
        draw.normal((batch, key_heads, value_capacity, width), dtype),
    ]
    if by_freqs:
        arrays.append(draw.array(np.exp(2 * draw.rng.standard_normal(dims // 2)), mx.float32))
    if normed:
        arrays += [draw.normal([width], dtype), draw.normal([width], dtype)]

    def rest(a: tuple[mx.array, ...]) -> tuple[mx.array | None, mx.array | None, mx.array | None]:
        return (a[0] if by_freqs else None, *(a[-2:] if normed else (None, None)))

    def split(heads: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        return tuple(mx.split(heads, [query_heads, query_heads + key_heads], axis=1))

    def ours(heads: mx.array, keys: mx.array, values: mx.array, *more: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        freqs, query_norm, key_norm = rest(more)
        return mm.rope_append(
            heads, keys, values, dims, base=base, scale=scale, offset=offset, freqs=freqs, query_norm=query_norm,
            key_norm=key_norm, eps=eps, start=start if given_start else None, traditional=traditional,
        )  # fmt: skip

    def twin(heads: mx.array, keys: mx.array, values: mx.array, *more: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        freqs, query_norm, key_norm = rest(more)
        q, k, v = split(heads)
        if normed:
            q, k = mx.fast.rms_norm(q, query_norm, eps), mx.fast.rms_norm(k, key_norm, eps)
        q, k = (
            mx.fast.rope(a, dims, traditional=traditional, base=base, scale=scale, offset=offset, freqs=freqs)
            for a in (q, k)
        )
        place = mx.array([start])
        return q, mx.slice_update(keys, k, place, [2]), mx.slice_update(values, v, place, [2])

    def in_float64(heads: mx.array, keys: mx.array, values: mx.array, *more: mx.array) -> tuple[mx.array, ...]:
        freqs, query_norm, key_norm = rest(more)
        q, k, v = split(heads)
        if normed:
            q, k = exact.rms_norm(q, query_norm, eps), exact.rms_norm(k, key_norm, eps)
        pairs = dims // 2
        exponents = mx.arange(pairs).astype(mx.float64) / pairs
        frequencies = 1 / freqs if by_freqs else mx.exp(-mx.log(mx.array(base, mx.float64)) * exponents)
        angles = ((mx.arange(tokens).astype(mx.float64) + offset) * scale)[:, None] * frequencies
        c, s = mx.cos(angles), mx.sin(angles)

        def turned(x: mx.array) -> mx.array:
            if traditional:
                a, b = x[..., :dims:2], x[..., 1:dims:2]
                both = mx.stack([a * c - b * s, a * s + b * c], -1).reshape(*x.shape[:-1], dims)
                return mx.concatenate([both, x[..., dims:]], -1)
            a, b = x[..., :pairs], x[..., pairs:dims]
            return mx.concatenate([a * c - b * s, a * s + b * c, x[..., dims:]], -1)

        def appended(cache: mx.array, new: mx.array) -> mx.array:
            return mx.concatenate([cache[:, :, :start], new, cache[:, :, start + tokens :]], 2)

        return turned(q), appended(keys, turned(k)), appended(values, v)

    def noise() -> list[np.ndarray | float]:
        # The rounding of an angle turns a pair; the norms' results may be rounded to the type before they are turned.
        size = np.abs(to_float64(arrays[0])).max(initial=0)
        if normed:
            size = max(np.abs(to_float64(a)).max() for a in arrays[-2:]) * np.sqrt(width)
        frequencies = 1 / to_float64(arrays[3]) if by_freqs else np.ones(1)
        angle = (offset + tokens) * scale * frequencies.max() * (3 + np.log(base or 1))
        step = 2 * EPSILON[dtype] if dtype != mx.float32 else 0
        total = (EPSILON32 * (4 + angle) + step) * size
        return [total, total, 0.0]

    return Case(
        describe(
            arrays,
            draw,
            numbers=kind,
            dims=dims,
            offset=offset,
            start=start,
            given_start=given_start,
            base=base,
            scale=scale,
            freqs=by_freqs,
            norms=normed,
            traditional=traditional,
        ),  # fmt: skip
        arrays,
        ours,
        twin,
        in_float64,
        of_nothing=lambda: [np.zeros((batch, query_heads, tokens, width)), *map(to_float64, arrays[1:3])],
        differentiable=[0, 1, 2] + [len(arrays) - 2, len(arrays) - 1] * normed,
        noise=noise,
    )


def paged_append(draw: Draw) -> Case:
    """Some tokens go nowhere: before the first key, behind the table, and to blocks that are not in the pool."""
    dtype = draw.dtype()
    batch, key_heads, tokens = draw.pick((1, 1, 2, 3)), draw.pick((1, 1, 2, 3)), draw.pick((1, 1, 1, 2, 3, 8, 17, 40))
    widths = draw.pick((7, 8, 33, 64, 64, 80, 128)), draw.pick((1, 8, 64, 64, 128))
    block, entries = draw.pick((16, 16, 32, 64)), draw.integer(1, 4)
    blocks = batch * entries + draw.integer(0, 2)
    kind = draw.kind(("normal", "normal", "large", "small"))
    arrays = [draw.array(draw.numbers((batch, key_heads, tokens, n), kind), dtype) for n in widths]
    arrays += [draw.normal((blocks, key_heads, block, n), dtype) for n in widths]
    table = draw.rng.permutation(blocks)[: batch * entries].reshape(batch, entries).astype(np.int32)
    if draw.chance(0.3):
        table[draw.integer(0, batch - 1), draw.integer(0, entries - 1)] = draw.pick((-1, blocks, 2**31 - 1))
    positions = draw.rng.integers(-5, entries * block + 3, batch).astype(np.int32)
    source = np.full((blocks, block), -1)  # the new row that a key gets
    for row in range(batch):
        for token in range(tokens):
            at = int(positions[row]) + token
            if 0 <= at < entries * block and 0 <= table[row, at // block] < blocks:
                source[table[row, at // block], at % block] = row * tokens + token

    def ours(*a: mx.array) -> list[mx.array]:
        return mm.paged_append(*a, mx.array(table), mx.array(positions))[:2]

    def appended(fresh: mx.array, pool: mx.array) -> mx.array:
        rows = fresh.swapaxes(1, 2).reshape(batch * tokens, key_heads, fresh.shape[3])
        taken = rows[mx.array(np.maximum(source, 0))].swapaxes(1, 2)
        return mx.where(mx.array(source >= 0)[:, None, :, None], taken, pool)

    def twin(keys: mx.array, values: mx.array, key_blocks: mx.array, value_blocks: mx.array) -> list[mx.array]:
        return [appended(keys, key_blocks), appended(values, value_blocks)]

    return Case(
        describe(arrays, draw, numbers=kind, block=block, entries=entries, positions=positions.tolist()),
        arrays,
        ours,
        twin,
        twin,
        of_nothing=lambda: [to_float64(a) for a in arrays[2:]],
        differentiable=[0, 1, 2, 3],
        noise=lambda: [0.0, 0.0],
    )


def take_tokens(draw: Draw) -> Case:
    """Indices may be out of range: their rows are NaN."""
    dtype, batch, heads = draw.dtype(), draw.pick((1, 1, 2, 3)), draw.pick((1, 1, 2, 3))
    tokens, count = draw.size(draw.limit(300, 60), small=0.4), draw.size(draw.limit(200, 40), small=0.4)
    count = count if tokens else 0  # else an error
    widths = draw.pick((7, 8, 33, 64, 64, 80, 512)), draw.pick((1, 8, 64, 64, 128))
    kind = draw.kind(("normal", "normal", "large", "small"))
    arrays = [draw.array(draw.numbers((batch, heads, tokens, n), kind), dtype) for n in widths]
    low, high = draw.pick(((0, tokens), (-tokens, tokens), (-2 * tokens - 2, 2 * tokens + 2)))
    shape = (batch, draw.pick((1, heads)), count)
    numbers = draw.rng.integers(low, max(high, low + 1), shape)
    indices = draw.array(numbers, draw.pick((mx.int32, mx.uint32)) if low == 0 else mx.int32)
    numbers = np.array(indices).astype(np.int64)  # a broadcast view has fewer

    def twin(*rows: mx.array) -> list[mx.array]:
        n = np.broadcast_to(np.where(numbers < 0, numbers + tokens, numbers), (batch, heads, count))[..., None]
        is_there = (n >= 0) & (n < tokens)
        within = mx.array(np.where(is_there, n, 0))
        parts = (mx.take_along_axis(a, mx.broadcast_to(within, (*n.shape[:3], a.shape[3])), axis=2) for a in rows)
        return [mx.where(mx.array(is_there), part, mx.array(mx.nan, part.dtype)) for part in parts]

    return Case(
        describe(arrays, draw, numbers=kind, indices=shape, low=low, high=high),
        arrays,
        lambda *rows: mm.take_tokens(*rows, indices),
        twin,
        twin,
        of_nothing=lambda: [np.zeros((batch, heads, count, n)) for n in widths],
        noise=lambda: [0.0, 0.0],
    )


def quantized_rope_append(draw: Draw) -> Case:
    """Buffers are compared unpacked: there the twin is off by its own quantization."""
    dtype, eps = draw.dtype(), float32(1e-6)
    group_size, bits = draw.pick((32, 32, 64, 64, 128)), draw.pick((2, 3, 4, 4, 5, 6, 8, 8))
    width = group_size * draw.pick((1, 1, 2, 3))
    batch, key_heads, query_heads = draw.pick((1, 1, 2, 3)), draw.pick((1, 1, 2, 3)), draw.pick((1, 2, 3, 4, 8))
    tokens = draw.pick((0, 1, 1, 1, 2, 3, 7, 17), [0.02] + [0.98 / 7] * 7)
    dims = 2 * draw.integer(1, width // 2) if draw.chance(0.5) else width
    start = draw.integer(0, 19)
    capacities = [start + tokens + draw.pick((0, 1, 5, 16)) for _ in range(2)]
    offset = draw.pick((0, 0, 1, 5, 100, 4095))
    normed, traditional = draw.chance(0.4), draw.chance(0.3)
    base = float32(draw.pick((10000.0, 500000.0, 100.0)))
    arrays = [draw.array(draw.numbers((batch, query_heads + 2 * key_heads, tokens, width), "normal"), dtype)]
    for capacity in capacities:
        arrays += mx.quantize(draw.normal((batch, key_heads, capacity, width), dtype), group_size, bits)
    if normed:
        arrays += [draw.normal([width], dtype), draw.normal([width], dtype)]
    turn = {"base": base, "offset": offset, "traditional": traditional}

    def dequantized(triple: Sequence[mx.array]) -> mx.array:
        return mx.dequantize(*triple, group_size, bits)

    def ours(heads: mx.array, *rest: mx.array) -> tuple[mx.array, ...]:
        norms = dict(zip(("query_norm", "key_norm"), rest[6:]))
        queries, keys, values = mm.quantized_rope_append(
            heads, rest[:3], rest[3:6], dims, eps=eps, start=start, group_size=group_size, bits=bits, **turn, **norms
        )
        return queries, dequantized(keys), dequantized(values)

    def before() -> list[mx.array]:
        """The unpacked buffers, in float64."""
        return [mx.array(specs.dequantized(*arrays[i : i + 3], group_size, bits), mx.float64) for i in (1, 4)]

    def turned(heads: mx.array, norms: Sequence[mx.array]) -> list[mx.array]:
        parts = mx.split(heads, [query_heads, query_heads + key_heads], axis=1)
        for i, norm in enumerate(norms):
            parts[i] = mx.fast.rms_norm(parts[i], norm, eps)
        return [mx.fast.rope(a, dims, scale=1.0, **turn) for a in parts[:2]] + parts[2:]

    def twin(heads: mx.array, *rest: mx.array) -> tuple[mx.array, ...]:
        queries, *fresh = turned(heads, rest[6:])
        buffers = []
        for i, new in enumerate(fresh):
            parts = zip(rest[3 * i :], mx.quantize(new, group_size, bits))
            buffers.append(dequantized([mx.slice_update(a, b, mx.array([start]), [2]) for a, b in parts]))
        return queries, *buffers

    def in_float64(heads: mx.array, *rest: mx.array) -> tuple[mx.array, ...]:
        parts = list(mx.split(heads, [query_heads, query_heads + key_heads], axis=1))
        for i, norm in enumerate(rest[6:]):
            parts[i] = exact.rms_norm(parts[i], norm, eps)
        position = mx.arange(tokens).astype(mx.float64) + offset
        exponents = mx.arange(dims // 2).astype(mx.float64) / (dims // 2)
        angles = position[:, None] * mx.exp(-mx.log(mx.array(base, mx.float64)) * exponents)
        c, s = mx.cos(angles), mx.sin(angles)
        for i in (0, 1):
            x = parts[i]
            if traditional:
                a, b = x[..., :dims:2], x[..., 1:dims:2]
                pairs = mx.stack([a * c - b * s, a * s + b * c], -1).reshape(*x.shape[:-1], dims)
            else:
                a, b = x[..., : dims // 2], x[..., dims // 2 : dims]
                pairs = mx.concatenate([a * c - b * s, a * s + b * c], -1)
            parts[i] = mx.concatenate([pairs, x[..., dims:]], -1)
        results = [parts[0]]
        for held, new in zip(before(), parts[1:]):
            results.append(mx.concatenate([held[:, :, :start], new, held[:, :, start + tokens :]], 2))
        return tuple(results)

    def noise() -> list[np.ndarray | float]:
        size = np.sqrt(2) * np.abs(to_float64(arrays[0])).max(initial=0)
        if normed:
            size = max(size, max(np.abs(to_float64(a)).max() for a in arrays[-2:]) * np.sqrt(2 * width))
        angle = (offset + tokens) * (3 + np.log(base))
        turning = (EPSILON32 * (4 + angle) + 2 * EPSILON[dtype]) * size
        levels = 2**bits - 1
        # A step is at most the range by the levels; a group of numbers of one sign may be taken from 0 on.
        packed = turning + 1.1 * 2 * size / levels + 4 * EPSILON[dtype] * size
        results: list[np.ndarray | float] = [turning]
        for i in (1, 4):  # a number is a product and a bias, each rounded, where nothing is appended too
            scales, biases = (np.abs(to_float64(a)).max(initial=0) for a in arrays[i + 1 : i + 3])
            results.append(packed + 2 * EPSILON[dtype] * (levels * scales + biases))
        return results

    return Case(
        describe(
            arrays, draw, dims=dims, offset=offset, start=start, base=base, norms=normed, traditional=traditional,
            group_size=group_size, bits=bits,
        ),
        arrays,
        ours,
        twin,
        in_float64,
        of_nothing=lambda: [
            np.zeros((batch, query_heads, tokens, width)), *(to_float64(dequantized(arrays[i : i + 3])) for i in (1, 4))
        ],
        noise=noise,
    )  # fmt: skip


def heads_of_latents(draw: Draw) -> Trial:
    """Heads whose first columns are copied, and whose keys share the turned ones, appended step by step."""
    from mlx_lm.models.cache import KVCache

    dtype = draw.dtype()
    rows, heads = draw.pick((1, 1, 2, 3)), draw.pick((1, 2, 3, 4, 8))
    begin, columns = draw.pick((1, 2, 7, 8, 32, 63, 64, 65, 96, 128)), draw.pick((1, 5, 8, 32, 64, 128))
    dims = 2 * draw.integer(1, draw.pick((2, 16, 32, 65)))
    steps = [draw.pick((1, 1, 1, 2, 3, 7, 17)) for _ in range(draw.integer(1, 3))]
    first = draw.pick((0, 0, 1, 5, 100, 4095))
    traditional, base = draw.chance(0.5), float32(draw.pick((10000.0, 500000.0, 100.0)))
    kind = draw.kind(("normal", "normal", "large", "small"))
    drawn = [
        [
            draw.array(draw.numbers(shape, kind), dtype)
            for shape in (
                (rows, heads, tokens, begin + dims),
                (rows, heads, tokens, begin + columns),
                (rows, 1, tokens, dims),
            )
        ]
        for tokens in steps
    ]

    def offset(i: int) -> int:
        return first + sum(steps[:i])

    def ours() -> list[mx.array]:
        cache, queries = KVCache(), []
        for i, arrays in enumerate(drawn):
            whole, made, key = (a * 1 for a in arrays)
            turn = {"traditional": traditional, "base": base, "scale": 1.0, "offset": offset(i)}
            keys, values = mx.split(made, [begin], axis=-1)
            before, part = mx.split(whole, [begin], axis=-1)
            turned, key = (mx.fast.rope(a, dims, **turn) for a in (part, key))
            queries.append(_ext.before_turned(before, turned, whole, part))
            held = cache.update_and_fetch(_ext.before_turned(keys, key), values)
            mx.eval(queries, held)
        return [mx.concatenate(queries, axis=2), *held]

    def turned(x: np.ndarray, i: int) -> np.ndarray:
        return specs.reference.rope(x, dims, base, offset(i), None, traditional)[0]

    def in_float64() -> list[np.ndarray]:
        parts: list[list[np.ndarray]] = [[], [], []]
        for i, arrays in enumerate(drawn):
            whole, made, key = map(to_float64, arrays)
            shared = np.broadcast_to(turned(key, i), (*made.shape[:-1], dims))
            parts[0].append(np.concatenate([whole[..., :begin], turned(whole[..., begin:], i)], -1))
            parts[1].append(np.concatenate([made[..., :begin], shared], -1))
            parts[2].append(made[..., begin:])
        return [np.concatenate(each, axis=2) for each in parts]

    def run() -> str | None:
        mm.stats(reset=True)
        with mm.patched():
            found = [to_float64(a) for a in ours()]
        appends = sum(mm.stats().get("rope_append", {"kernels": {}})["kernels"].values())
        if appends != len(steps):
            return f"{appends} appends for {len(steps)} steps"
        size = max(np.abs(to_float64(a)).max(initial=0) for arrays in drawn for a in arrays)
        angle = (first + sum(steps)) * (3 + np.log(base))
        step = 2 * EPSILON[dtype] if dtype != mx.float32 else 0
        limit = (EPSILON32 * (4 + angle) + step) * np.sqrt(2) * size
        for name, a, b in zip(("queries", "keys", "values"), found, in_float64(), strict=True):
            apart = np.abs(a - b)
            copied = apart[..., :begin].max(initial=0) if name != "values" else apart.max(initial=0)
            if copied != 0:
                return f"{name}: copied columns are off by {copied:.3g}"
            if not apart.max(initial=0) <= limit:
                return f"{name}: off by {apart.max():.3g}, limit {limit:.3g}"
        return None

    text = (
        f"{type_name(dtype)}, {rows} rows, {heads} heads of {begin} and {dims} columns, values of {columns}, base "
        f"{base:g}, traditional {traditional}, from {first} on, steps {steps}, numbers {kind}; {draw.layouts}"
    )
    return Trial("patched", text, run)
