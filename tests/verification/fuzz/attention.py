"""Random calls of attention, over keys and values as they are and packed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
from verification.fuzz import exact
from verification.fuzz.case import Case
from verification.fuzz.compare import overflow, to_float64
from verification.fuzz.draw import Draw, describe, float32, promoted
from verification.fuzz.products import packed, size_of, size_of_packed

import mlx_mittens as mm
from mlx_mittens.specs import EPSILON
from mlx_mittens.specs.attention import composed, seen_of_rows, twin_mask, zero_unseeing

EPSILON32 = EPSILON[mx.float32]
QUERIES = (1, 1, 1, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 40, 63, 64, 65, 100)
PAIRS = ((192, 128), (96, 64), (576, 512))  # of keys and values, as models have them
WIDTHS = (64, 128, 80, 96, 32, 8, 1, 2, 7, 16, 33, 48, 72, 100, 192, 256, 512)
WIDTH_WEIGHTS = (8, 7) + (1,) * 15
MASKS = ("none", "none", "causal", "bool", "few hidden", "hardly any", "additive", "additive -inf")


@dataclass
class Shape:
    """The sizes and options of a call of attention."""

    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    width: int
    value_width: int

    @property
    def of_result(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.queries, self.value_width


def _shape(draw: Draw, most_keys: int, total: int) -> Shape:
    batch, key_heads = draw.pick((1, 1, 2, 3)), draw.pick((1, 1, 2, 3, 4))
    ratio = draw.pick((1, 1, 2, 3, 4, 5, 7, 8, 12))
    queries, keys = draw.pick(QUERIES), draw.size(most_keys, zero=0.01, small=0.4)
    width = draw.pick(WIDTHS, WIDTH_WEIGHTS)
    value_width = width if draw.chance(0.8) else draw.pick((8, 16, 33, 64, 96, 128, 256))
    if draw.chance(0.05):
        width, value_width = draw.pick(PAIRS)
    while batch * key_heads * keys * (width + value_width) > total and keys > 1:
        keys //= 2
    while batch * key_heads * ratio * queries * max(keys, 1) > 2 * total and queries > 1:
        queries //= 2
    return Shape(batch, key_heads * ratio, key_heads, 0 if draw.chance(0.01) else queries, keys, width, value_width)


def _mask(draw: Draw, shape: Shape, dtype: mx.Dtype) -> tuple[str, None | str | mx.array]:
    """A mask of a kind, that may be broadcast along any axis."""
    kind = draw.pick(MASKS)
    if kind in ("none", "causal"):
        return kind, None if kind == "none" else kind
    axes = [1 if draw.chance(0.45) else n for n in (shape.batch, shape.heads, shape.queries, shape.keys)]
    if draw.chance(0.4):
        axes = axes[draw.integer(0, 4) :]
    if kind.startswith("additive"):
        values = draw.numbers(axes)
        if kind == "additive -inf":
            values = np.where(draw.rng.random(axes) < 0.5, -np.inf, values)
        elif values.size and draw.chance(0.1):
            values.reshape(-1)[0] = np.nan
        return kind, draw.array(values, dtype)
    shown = {"bool": 0.5, "few hidden": 0.9, "hardly any": draw.pick((0.0, 0.1))}[kind]
    return kind, draw.array(draw.rng.random(axes) < shown, mx.bool_)


def _has_gradients(kind: str, mask: None | str | mx.array) -> bool:
    """Whether mx differentiates the reference: its gradient of `where` is NaN where the other branch is."""
    masked = isinstance(mask, mx.array)
    return kind not in ("hardly any", "additive -inf") and not (masked and np.isnan(to_float64(mask)).any())


def _undefined_rows(
    mask: None | str | mx.array, window: int | None, shape: Shape, special: bool, keys: mx.array
) -> np.ndarray:
    """Rows that see an infinite key: they are NaN or finite, by device and kernel in MLX itself."""
    rows = shape.batch, shape.heads, shape.queries
    if not special:
        return np.zeros(rows, bool)
    seen = exact.visible(mask, window, shape.queries, shape.keys)
    infinite = np.repeat(np.isinf(to_float64(keys)).any(-1), shape.heads // shape.key_heads, 1)[:, :, None]
    return np.broadcast_to((infinite if seen is None else infinite & np.array(seen)).any(-1), rows)


def _largest_products(q: np.ndarray, k: np.ndarray) -> np.ndarray:
    """The largest product of each query with a key, of sizes: [B, H, Tq, 1]."""
    return (q @ np.repeat(np.swapaxes(k, -1, -2), q.shape[1] // k.shape[1], 1)).max(-1, keepdims=True)


def scaled_dot_product_attention(draw: Draw) -> Case:
    dtype = draw.dtype()
    shape = _shape(draw, draw.limit(1025, 97), draw.limit(40000, 8000))
    kind = draw.kind(("normal",) * 3 + ("large", "constant", "integers", "special"))
    special = kind == "special"
    keys = shape.batch, shape.key_heads, shape.keys
    kinds = ("normal", draw.pick(("normal", "special")), "special") if special else (kind, "normal", "normal")
    shapes = (*shape.of_result[:3], shape.width), (*keys, shape.width), (*keys, shape.value_width)
    dtypes = dtype, draw.dtype_like(dtype), draw.dtype_like(dtype)
    arrays = [draw.array(draw.numbers(s, k), t) for s, k, t in zip(shapes, kinds, dtypes)]
    result_dtype = promoted(*(a.dtype for a in arrays))
    mask_kind, mask = _mask(draw, shape, result_dtype)
    masked = isinstance(mask, mx.array)
    arrays += [mask] if masked else []
    with_sinks = draw.chance(0.25)
    if with_sinks:
        arrays.append(draw.array(draw.numbers([shape.heads], draw.pick(("normal", "large", "constant"))), result_dtype))
    window = draw.pick((1, 2, 3, 8, 31, 32, 33, 64, 100, 10**6)) if draw.chance(0.25) else None
    scale = float32(draw.pick((shape.width**-0.5, 1.0, 0.1, -0.3, 0.0), (0.8, 0.08, 0.05, 0.05, 0.02)))
    exactly = draw.chance(0.1)
    undefined = _undefined_rows(mask, window, shape, special, arrays[1])

    def rest(a: tuple[mx.array, ...]) -> tuple[None | str | mx.array, mx.array | None]:
        return a[0] if masked else mask, a[-1] if with_sinks else None

    def ours(q: mx.array, k: mx.array, v: mx.array, *more: mx.array) -> mx.array:
        array, sinks = rest(more)
        return mm.scaled_dot_product_attention(
            q, k, v, scale=scale, mask=array, sinks=sinks, window=window, exact=exactly
        )

    def twin(q: mx.array, k: mx.array, v: mx.array, *more: mx.array) -> mx.array:
        array, sinks = rest(more)
        seen = twin_mask(array, window, shape.queries, shape.keys)
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=seen, sinks=sinks)
        return zero_unseeing(y, array, window, shape.queries, shape.keys)

    def in_float64(q: mx.array, k: mx.array, v: mx.array, *more: mx.array) -> mx.array:
        array, sinks = rest(more)
        return exact.attention(q, k, v, scale, array, sinks, window)

    def of_weights() -> np.ndarray:
        """The effect of rounding on a query's weights, which sum to 1: each moves as its score is rounded."""
        products = _largest_products(*map(size_of, arrays[:2]))
        return EPSILON32 * (8 + 4 * np.minimum(abs(scale) * products, 1e6)) + overflow(products)

    def noise() -> list[np.ndarray | float]:
        largest = size_of(arrays[2]).max()
        total = of_weights() * largest
        if draw.gpu and result_dtype != mx.float32:
            total = total + 2 * EPSILON[result_dtype] * largest  # the kernels' weights are of the half type
        return [np.where(undefined[..., None], np.inf, total)]

    with_mask_gradient = masked and mask.dtype != mx.bool_
    gradients = [0, 1, 2] + [3] * with_mask_gradient + [len(arrays) - 1] * with_sinks

    def gradient_noise(cotangents: Sequence[mx.array]) -> list[float]:
        # A score's gradient is its weight times the difference of two products, of the cotangent with the value and
        # with the row's result. The result is rounded to its type: where the difference is 0, that rounding is left.
        (q, k, _), y, cotangent = map(size_of, arrays[:3]), size_of(ours(*arrays)), size_of(cotangents[0])
        rows = shape.queries * (shape.heads // shape.key_heads)
        weights = of_weights().max(initial=0)
        of_score = (EPSILON[result_dtype] + weights) * (cotangent * y).sum(-1).max(initial=0)
        of_q, of_k = (abs(scale) * of_score * other for other in (k.max(initial=0), rows * q.max(initial=0)))
        of_v, of_rest = weights * rows * cotangent.max(initial=0), of_score * shape.batch * shape.key_heads * rows
        return [of_q, of_k, of_v] + [of_rest] * (with_mask_gradient + with_sinks)

    return Case(
        describe(
            arrays, draw, numbers=kind, mask=mask_kind, sinks=with_sinks, window=window, scale=scale, exact=exactly
        ),
        arrays,
        ours,
        twin,
        in_float64,
        of_nothing=lambda: [np.zeros(shape.of_result)],
        differentiable=[] if undefined.any() else gradients,
        noise=noise,
        gradient_noise=gradient_noise,
        ordinary=not special and _has_gradients(mask_kind, mask),
        hides=special and (mask is not None or window is not None),
    )


def cascade_attention(draw: Draw) -> Case:
    dtype = draw.dtype()
    shape = _shape(draw, draw.limit(300, 70), draw.limit(20000, 4000))
    prefix = draw.size(draw.limit(400, 90), small=0.4)
    kind = draw.kind(("normal",) * 3 + ("constant", "integers"))
    own, shared = (shape.batch, shape.key_heads, shape.keys), (1, shape.key_heads, prefix)
    widths = shape.width, shape.value_width
    shapes = (*shape.of_result[:3], shape.width), *((*rows, n) for rows in (own, shared) for n in widths)
    arrays = [draw.array(draw.numbers(s, kind), dtype) for s in shapes]
    mask = "causal" if draw.chance(0.3) else None
    scale = float32(shape.width**-0.5)

    def ours(*a: mx.array) -> mx.array:
        return mm.cascade_attention(*a, scale=scale, mask=mask)

    def whole(k: mx.array, v: mx.array, prefix_k: mx.array, prefix_v: mx.array) -> list[mx.array]:
        pairs = (prefix_k, k), (prefix_v, v)
        return [mx.concatenate([mx.broadcast_to(a, (len(b), *a.shape[1:])), b], 2) for a, b in pairs]

    def twin(q: mx.array, *rows: mx.array) -> mx.array:
        keys, values = whole(*rows)
        return mx.fast.scaled_dot_product_attention(q, keys, values, scale=scale, mask=seen())

    def in_float64(q: mx.array, *rows: mx.array) -> mx.array:
        return exact.attention(q, *whole(*rows), scale, seen(), None, None)

    def seen() -> mx.array | None:
        return mx.array(_behind(shape, prefix)) if mask else None

    def of_nothing() -> list[np.ndarray]:
        """The sum over keys of the prefix, or a row's own, where it has no others."""
        q, k, v, shared_k, shared_v = map(to_float64, arrays)
        keys, values = (
            np.repeat(np.concatenate([np.repeat(a, shape.batch, 0), b], 2), shape.heads // shape.key_heads, 1)
            for a, b in ((shared_k, k), (shared_v, v))
        )
        scores = scale * q @ keys.swapaxes(-1, -2)
        scores = np.where(_behind(shape, prefix), scores, -np.inf) if mask else scores
        weights = np.exp(scores - scores.max(-1, keepdims=True, initial=np.finfo(float).min))
        total = weights.sum(-1, keepdims=True)
        return [weights / np.where(total == 0, 1, total) @ values]

    def noise() -> list[np.ndarray | float]:
        q, k, shared_k = size_of(arrays[0]), size_of(arrays[1]), np.repeat(size_of(arrays[3]), shape.batch, 0)
        if prefix + shape.keys == 0:
            return [0.0]
        products = _largest_products(q, np.concatenate([shared_k, k], 2))
        weights = EPSILON32 * (8 + 4 * scale * products) + overflow(products)
        return [(weights + 2 * EPSILON[dtype]) * max(size_of(arrays[i]).max(initial=0) for i in (2, 4))]

    return Case(
        describe(arrays, draw, numbers=kind, mask=mask, prefix=prefix, scale=scale),
        arrays,
        ours,
        twin,
        in_float64,
        of_nothing,
        noise=noise,
        rounds_nothing=True,
        ordinary=False,
    )


def paged_attention(draw: Draw) -> Case:
    dtype = draw.dtype()
    shape = _shape(draw, draw.limit(300, 70), draw.limit(20000, 4000))
    shape.keys = max(shape.keys, 1)
    block = draw.pick((16, 16, 32, 64))
    entries = -(-shape.keys // block) + draw.integer(0, 1)
    blocks = shape.batch * entries + 2
    kind = draw.kind(("normal",) * 3 + ("constant", "integers"))
    pool = blocks, shape.key_heads, block
    shapes = (*shape.of_result[:3], shape.width), (*pool, shape.width), (*pool, shape.value_width)
    arrays = [draw.array(draw.numbers(s, kind), dtype) for s in shapes]
    order = draw.rng.permutation(blocks)[: shape.batch * entries]
    table = mx.array(order.reshape(shape.batch, entries).astype(np.int32))
    lengths = mx.array(draw.rng.integers(0, shape.keys + 1, shape.batch).astype(np.int32))
    mask = "causal" if draw.chance(0.3) else None
    window = draw.pick((1, 2, 8, 33, 64)) if draw.chance(0.2) else None
    scale = float32(shape.width**-0.5)
    keys = entries * block
    seen = mx.array(seen_of_rows(None, lengths, mask == "causal", window, shape.batch, shape.queries, keys))

    def ours(*a: mx.array) -> mx.array:
        return mm.paged_attention(*a, table, lengths, scale=scale, mask=mask, window=window)

    def rows(pool: mx.array) -> mx.array:
        taken = pool[table].swapaxes(1, 2)
        return taken.reshape(shape.batch, shape.key_heads, keys, pool.shape[-1])

    def twin(q: mx.array, *pools: mx.array) -> mx.array:
        y = mx.fast.scaled_dot_product_attention(q, *map(rows, pools), scale=scale, mask=seen)
        return zero_unseeing(y, seen, None, shape.queries, keys)

    def in_float64(q: mx.array, *pools: mx.array) -> mx.array:
        return exact.attention(q, *map(rows, pools), scale, seen, None, None)

    def noise() -> list[np.ndarray | float]:
        products = _largest_products(size_of(arrays[0]), size_of(rows(arrays[1])))
        weights = EPSILON32 * (8 + 4 * scale * products) + overflow(products)
        return [(weights + 2 * EPSILON[dtype]) * size_of(arrays[2]).max(initial=0)]

    return Case(
        describe(arrays, draw, numbers=kind, mask=mask, window=window, block=block, scale=scale),
        arrays,
        ours,
        twin,
        in_float64,
        of_nothing=lambda: [np.zeros(shape.of_result)],
        noise=noise,
        ordinary=False,
    )


def index_scores(draw: Draw) -> Case:
    """Gradients are those of a composition, and a rounding may decide whether a score has one."""
    dtype, width = draw.dtype(), draw.pick((64, 64, 128, 128, 33))
    batch, heads, queries = (
        draw.pick((1, 1, 2, 3)),
        draw.pick((1, 2, 3, 7, 8, 9, 16, 33)),
        draw.pick((0, 1, 1, 1, 2, 5)),
    )
    keys = draw.size(draw.limit(300, 70), zero=0.02, small=0.4)
    kind = draw.kind(("normal",) * 3 + ("constant", "integers", "small"))
    shapes = (batch, heads, queries, width), (batch, keys, width), (batch, queries, heads)
    arrays = [draw.array(draw.numbers(s, kind), dtype) for s in shapes]
    scale = float32(draw.pick((1.0, width**-0.5, -2.0)))

    def twin(q: mx.array, k: mx.array, weights: mx.array) -> mx.array:
        scores = mx.maximum(q @ k[:, None].swapaxes(-1, -2), 0)
        return ((weights * scale).swapaxes(-1, -2)[..., None] * scores).sum(axis=1)

    def noise() -> list[np.ndarray | float]:
        q, k, weights = map(to_float64, arrays)
        products = np.linalg.norm(q, axis=-1).max(initial=0) * np.linalg.norm(k, axis=-1).max(initial=0)
        return [EPSILON32 * (width + heads) * abs(scale) * np.abs(weights).sum(-1).max(initial=0) * products]

    return Case(
        describe(arrays, draw, numbers=kind, scale=scale),
        arrays,
        lambda *a: mm.index_scores(*a, scale=scale),
        twin,
        twin,
        of_nothing=lambda: [np.zeros((batch, queries, keys))],
        noise=noise,
        ordinary=False,
    )


def _behind(shape: Shape, prefix: int) -> np.ndarray:
    """A mask of a prefix that all see, and of the keys behind it by causality."""
    seen = np.arange(shape.keys) <= np.arange(shape.queries)[:, None] + shape.keys - shape.queries
    return np.concatenate([np.ones((shape.queries, prefix), bool), seen], 1)


def quantized_scaled_dot_product_attention(draw: Draw) -> Case:
    dtype = draw.dtype()
    shape = _shape(draw, draw.limit(257, 97), draw.limit(16000, 8000))
    group_size, bits = draw.pick((32, 64, 128)), draw.pick((4, 4, 4, 8, 8, 8, 8, 2, 3, 6))
    shape.width = max(group_size, shape.width // group_size * group_size)
    shape.value_width = shape.width if draw.chance(0.8) else group_size * draw.pick((1, 2))
    shape.keys = max(shape.keys, 1)
    keys = shape.batch, shape.key_heads, shape.keys
    kind = draw.kind(("normal", "normal", "constant", "small"))
    arrays = [draw.array(draw.numbers((*shape.of_result[:3], shape.width), kind), dtype)]
    for width in (shape.width, shape.value_width):
        arrays += packed(draw, (*keys, width), dtype, group_size, bits)
    mask_kind, mask = _mask(draw, shape, dtype)
    masked = isinstance(mask, mx.array)
    arrays += [mask] if masked else []
    with_sinks = draw.chance(0.2)
    if with_sinks:
        arrays.append(draw.array(draw.numbers([shape.heads]), dtype))
    window = draw.pick((1, 2, 8, 33, 64, 10**6)) if draw.chance(0.2) else None
    scale = float32(shape.width**-0.5)
    options = {"group_size": group_size, "bits": bits}
    exactly = draw.chance(0.1)

    def rest(a: tuple[mx.array, ...]) -> tuple[None | str | mx.array, mx.array | None]:
        return a[6] if masked else mask, a[-1] if with_sinks else None

    def ours(q: mx.array, *a: mx.array) -> mx.array:
        array, sinks = rest(a)
        return mm.quantized_scaled_dot_product_attention(
            q, a[:3], a[3:6], scale, array, sinks=sinks, window=window, exact=exactly, **options
        )

    def twin(q: mx.array, *a: mx.array) -> mx.array:
        array, sinks = rest(a)
        seen = twin_mask(array, window, shape.queries, shape.keys)
        y = composed(q, a[:3], a[3:6], scale, seen, sinks, **options)
        return zero_unseeing(y, array, window, shape.queries, shape.keys)

    def in_float64(q: mx.array, *a: mx.array) -> mx.array:
        array, sinks = rest(a)
        k, v = (exact.dequantize(*a[i : i + 3], **options) for i in (0, 3))
        return exact.attention(q, k, v, scale, array, sinks, window)

    def noise() -> list[np.ndarray | float]:
        largest = size_of_packed(*arrays[5:7], **options).max()
        scores = abs(scale) * _largest_products(size_of(arrays[0]), size_of_packed(*arrays[2:4], **options))
        total = EPSILON32 * (16 + 4 * scores) * largest
        if draw.gpu and dtype != mx.float32:
            total = total + 2 * EPSILON[dtype] * largest
        return [total]

    return Case(
        describe(arrays, draw, numbers=kind, mask=mask_kind, sinks=with_sinks, window=window, exact=exactly, **options),
        arrays,
        ours,
        twin,
        in_float64,
        of_nothing=lambda: [np.zeros(shape.of_result)],
        differentiable=[0],
        noise=noise,
        ordinary=_has_gradients(mask_kind, mask),
    )
