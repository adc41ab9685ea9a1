"""Rows of the table of ops for attention; `specs` puts them together.

The shape of a case is ``(batch, heads, key_heads, queries, keys, width)``. Of the options, ``mask`` says what mask is
drawn: ``causal``, ``bool``, ``additive`` or none; ``sinks``, whether there are sinks; ``value_width``, how wide values
are where that is another width than the keys'; ``ragged``, whether rows of the batch have starts and ends.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..ops import attention
from .attention_gradients import exact_attention_vjp
from .op import Case, Exact, Op, add_outliers, cases_for_tests, dequantized, draw_packed, on_all_cores, widen

# Scores of float64 that are held at once.
_PIECE = 2**22


@dataclass(frozen=True, kw_only=True)
class AttentionOp(Op):
    """Attention over keys and values as they are, or packed; the gradients of cases of few scores."""

    packed: bool = False

    # The least shape that any case's options allow.
    smallest = (1, 2, 1, 2, 64, 64)

    def shapes(self, case: Case) -> list[tuple[int, ...]]:
        batch, heads, key_heads, queries, keys, width = case.shape
        options = self.arguments(case)
        rows = []
        for columns in (width, options["value_width"] or width):
            if self.packed:
                groups = (batch, key_heads, keys, columns // options["group_size"])
                rows += [(batch, key_heads, keys, columns * options["bits"] // 32), groups, groups]
            else:
                rows.append((batch, key_heads, keys, columns))
        mask = (batch, 1, queries, keys) if options["mask"] == "bool" else (heads, queries, keys)
        return [(batch, heads, queries, width), *rows, mask, (heads,), (batch,), (batch,)]

    def draw(self, rng: np.random.Generator, case: Case, dtype: mx.Dtype) -> list[mx.array | None]:
        # Keys and values of decoding are the front of a larger cache; a prompt's are transposed, as layers make
        # them.
        options = self.arguments(case)
        cache = case.shape[3] <= 16
        arrays = []
        for (name, kind), shape in zip(self.parameters, self.shapes(case), strict=True):
            if kind == "mask":
                arrays.append(_draw_mask(rng, options["mask"], shape, dtype))
            elif kind == "sinks":
                arrays.append(mx.array(rng.standard_normal(shape)).astype(dtype) if options["sinks"] else None)
            elif kind in ("starts", "ends"):
                keys = case.shape[4]
                span = (0, keys // 2) if kind == "starts" else (keys // 2, keys)
                rows = rng.integers(*span, shape, dtype=np.int32, endpoint=True)
                arrays.append(mx.array(rows) if options["ragged"] else None)
            elif self.packed and name != "q":
                draw = lambda s, name=name: draw_packed(rng, name, s, options["bits"], dtype)
                arrays.append(front_of_cache(draw, shape))
            elif name != "q" and cache:
                arrays.append(front_of_cache(lambda s: draw_rows(rng, s, dtype), shape))
            else:
                batch, heads, tokens, width = shape
                arrays.append(draw_rows(rng, (batch, tokens, heads, width), dtype).swapaxes(1, 2))
        return arrays

    def cotangents(self, rng: np.random.Generator, case: Case, dtype: mx.Dtype) -> list[mx.array]:
        if not case.vjp or self.packed:
            return super().cotangents(rng, case, dtype)
        batch, heads, _, queries, _, width = case.shape
        return [draw_rows(rng, (batch, heads, queries, width), dtype)]

    def bytes_moved(self, case: Case, dtype: mx.Dtype) -> int:
        batch, heads, _, queries, keys, width = case.shape
        options = self.arguments(case)
        sizes = {"key_words": 4, "value_words": 4, "starts": 4, "ends": 4}
        size = 0
        for (name, kind), shape in zip(self.parameters, self.shapes(case), strict=True):
            masked, ragged = options["mask"] in ("bool", "additive"), options["ragged"]
            optional = {"mask": masked, "sinks": options["sinks"], "starts": ragged, "ends": ragged}
            there = optional.get(kind, True)
            item = 1 if kind == "mask" and options["mask"] == "bool" else sizes.get(name, dtype.size)
            size += there * item * int(np.prod(shape))
        return size + batch * heads * queries * (options["value_width"] or width) * dtype.size

    def exact(self, case: Case, arrays: Sequence[mx.array | None], cotangents: Sequence[mx.array] = ()) -> list[Exact]:
        options = self.arguments(case)
        *rows, mask, sinks, starts, ends = arrays
        causal, window, scale = options["mask"] == "causal", options["window"], case.shape[-1] ** -0.5
        if case.vjp:
            queries, k, v, dy = (a for a in (*rows, *cotangents) if a is not None)
            return exact_attention_vjp(queries, k, v, dy, scale, mask, sinks, causal, window)
        q, *rest = (a for a in rows if a is not None)
        if self.packed:
            keys, values = (
                dequantized(words, scales, biases, options["group_size"], options["bits"])
                for words, scales, biases in (rest[:3], rest[3:])
            )
        else:
            keys, values = (widen(a) for a in rest)
        if options["ragged"]:
            mask = mx.array(seen_of_rows(starts, ends, causal, window, case.shape[0], *case.shape[3:5]))
            causal, window = False, None
        return [exact_attention(widen(q), keys, values, scale, mask, sinks, causal, window)]


def seen_of_rows(
    starts: mx.array | None,
    ends: mx.array | None,
    causal: bool,
    window: int | None,
    batch: int,
    queries: int,
    keys: int,
) -> np.ndarray:
    """Which keys queries see whose rows of the batch have starts and ends: ``[batch, 1, queries, keys]`` of bool."""
    first = np.zeros(batch, int) if starts is None else np.array(starts)
    end = np.full(batch, keys) if ends is None else np.array(ends)
    first, end = first.reshape(batch, 1, -1, 1), end.reshape(batch, 1, 1, 1)
    key, query = np.arange(keys), np.arange(queries)[:, None] + end - queries
    seen = (key >= first) & (key < end)
    if causal or window:
        seen = seen & (key <= query)
    return np.broadcast_to(seen & (key > query - window) if window else seen, (batch, 1, queries, keys))


def exact_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    mask: mx.array | None = None,
    sinks: mx.array | None = None,
    causal: bool = False,
    window: int | None = None,
) -> Exact:
    """Attention in float64, some queries of a head at a time.

    The scores and their exponentials are float32 in every type; where one of them is off, so is a weight. A query that
    sees no key gets 0.
    """
    batch, heads, queries, _ = q.shape
    key_heads, keys = k.shape[1:3]
    value = np.empty((batch, heads, queries, v.shape[-1]))
    size, inner = np.empty_like(value), np.empty_like(value)
    added, allowed = None, None  # the mask, as it is one of numbers or of bool
    if mask is not None and mask.dtype == mx.bool_:
        allowed = np.broadcast_to(np.array(mask), (batch, heads, queries, keys))
    elif mask is not None:
        added = np.broadcast_to(np.array(mask.astype(mx.float32)), (batch, heads, queries, keys))
    sink_scores = widen(sinks)
    step = max(1, _PIECE // max(keys, 1))

    def piece(b: int, h: int, first: int) -> None:
        some = slice(first, first + step)
        rows, columns, weighted = q[b, h, some], k[b, h * key_heads // heads], v[b, h * key_heads // heads]
        scores = scale * rows @ columns.T
        sizes = abs(scale) * np.sqrt((rows * rows) @ (columns * columns).T)
        position = np.arange(queries)[some, None] + keys - queries
        key = np.arange(keys)
        seen = np.ones(scores.shape, bool)
        if causal or window:
            seen &= key <= position
        if window:
            seen &= key > position - window
        if added is not None:
            scores = scores + added[b, h, some]
            seen &= added[b, h, some] > -np.inf
        elif allowed is not None:
            seen &= allowed[b, h, some]
        scores = np.where(seen, scores, -np.inf)
        most = scores.max(-1, keepdims=True, initial=-np.inf if sink_scores is None else sink_scores[h])
        weights = np.exp(scores - most)
        total = weights.sum(-1, keepdims=True)
        if sink_scores is not None:
            total = total + np.exp(sink_scores[h] - most)
        weights = np.where(seen.any(-1, keepdims=True), weights / total, 0)
        value[b, h, some] = weights @ weighted
        size[b, h, some] = weights @ np.abs(weighted)
        off = weights * (1 + sizes + np.where(weights > 0, np.abs(scores), 0))
        inner[b, h, some] = off @ np.abs(weighted) + off.sum(-1, keepdims=True) * np.abs(value[b, h, some])

    def quietly(where: tuple[int, int, int]) -> None:
        with np.errstate(all="ignore"):  # here, as threads have settings of their own
            piece(*where)

    on_all_cores(quietly, itertools.product(range(batch), range(heads), range(0, queries, step)))
    return Exact(value, size, inner)


def draw_rows(rng: np.random.Generator, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    a = rng.standard_normal(shape, dtype=np.float32)
    add_outliers(rng, a)
    return mx.array(a).astype(dtype)


def _draw_mask(rng: np.random.Generator, kind: str | None, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array | None:
    if kind == "bool":
        return mx.array(rng.random(shape) < 0.7)
    if kind == "additive":
        return mx.array(np.where(rng.random(shape) < 0.2, -np.inf, rng.standard_normal(shape))).astype(dtype)
    return None


def front_of_cache(draw, shape: tuple[int, ...]) -> mx.array:
    """A view of a buffer that grows by 256 keys, as mlx-lm keeps them."""
    batch, heads, keys, width = shape
    return draw((batch, heads, -(-keys // 256) * 256, width))[:, :, :keys]


def _mask_of(mask: str | None, array: mx.array | None) -> None | str | mx.array:
    return "causal" if mask == "causal" else array


def _ours(q, k, v, array, sinks_array, starts, ends, *, mask, sinks, window, value_width, ragged):
    return attention.scaled_dot_product_attention(
        q, k, v, scale=q.shape[-1] ** -0.5, mask=_mask_of(mask, array), sinks=sinks_array, window=window,
        starts=starts, ends=ends,
    )  # fmt: skip


def twin_mask(mask: None | str | mx.array, window: int | None, queries: int, keys: int) -> None | str | mx.array:
    """A mask for mx, which has no window: one that stands for it too."""
    if window is None:
        return mask
    query = mx.arange(queries)[:, None] + keys - queries
    key = mx.arange(keys)
    seen = (key <= query) & (key > query - window)
    if mask is None or isinstance(mask, str):
        return seen
    return seen & mask if mask.dtype == mx.bool_ else mx.where(seen, mask, mx.array(-mx.inf, mask.dtype))


def zero_unseeing(y: mx.array, mask: None | str | mx.array, window: int | None, queries: int, keys: int) -> mx.array:
    """A result of mx, with 0 for rows that see no key, whose results depend on the device."""
    seen = twin_mask(mask, window, queries, keys)
    if isinstance(seen, str):
        seen = mx.arange(keys) <= mx.arange(queries)[:, None] + keys - queries
    if seen is None:
        return y
    shown = seen if seen.dtype == mx.bool_ else mx.not_equal(seen, -mx.inf)
    shown = shown if shown.ndim else shown.reshape(1)
    return mx.where(shown.any(-1, keepdims=True), y, mx.zeros_like(y))


def _twin_seen(q, keys, array, starts, ends, mask, window):
    if starts is None:
        return twin_mask(_mask_of(mask, array), window, q.shape[2], keys)
    return mx.array(seen_of_rows(starts, ends, mask == "causal", window, q.shape[0], q.shape[2], keys))


def _twin(q, k, v, array, sinks_array, starts, ends, *, mask, sinks, window, value_width, ragged):
    seen = _twin_seen(q, k.shape[2], array, starts, ends, mask, window)
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5, mask=seen, sinks=sinks_array)


def _ours_packed(q, *rest, mask, sinks, window, value_width, ragged, group_size, bits):
    *packed, array, sinks_array, starts, ends = rest
    return attention.quantized_scaled_dot_product_attention(
        q, tuple(packed[:3]), tuple(packed[3:]), q.shape[-1] ** -0.5, _mask_of(mask, array), group_size, bits,
        sinks=sinks_array, window=window, starts=starts, ends=ends,
    )  # fmt: skip


def _twin_packed(q, *rest, mask, sinks, window, value_width, ragged, group_size, bits):
    *packed, array, sinks_array, starts, ends = rest
    seen = _twin_seen(q, packed[0].shape[2], array, starts, ends, mask, window)
    return composed(q, packed[:3], packed[3:], q.shape[-1] ** -0.5, seen, sinks_array, group_size, bits)


def composed(
    q: mx.array,
    keys: Sequence[mx.array],
    values: Sequence[mx.array],
    scale: float,
    mask: None | str | mx.array,
    sinks: mx.array | None,
    group_size: int,
    bits: int,
) -> mx.array:
    """mlx-lm's attention over packed keys and values, with sinks: two quantized products and a softmax."""
    batch, heads, queries, _ = q.shape
    key_heads, count = keys[0].shape[1:3]
    grouped = (batch, key_heads, heads // key_heads * queries, -1)

    def product(a: mx.array, packed: Sequence[mx.array], transpose: bool) -> mx.array:
        words, scales, biases = packed
        if mx.default_device() == mx.gpu and not mx.metal.is_available():
            # These products of MLX 0.32.4's CUDA build can end the process.
            b = mx.dequantize(words, scales, biases, group_size, bits)
            return a @ (b.swapaxes(-1, -2) if transpose else b)
        return mx.quantized_matmul(a, words, scales, biases, transpose, group_size, bits)

    scores = product((q * scale).reshape(grouped), keys, True)
    scores = scores.reshape(batch, heads, queries, count)
    if isinstance(mask, str):
        mask = mx.arange(count) <= mx.arange(queries)[:, None] + count - queries
    if mask is not None:
        hidden = mx.finfo(scores.dtype).min
        scores = mx.where(mask, scores, hidden) if mask.dtype == mx.bool_ else scores + mask
    if sinks is not None:
        first = mx.broadcast_to(sinks[None, :, None, None], (batch, heads, queries, 1))
        scores = mx.softmax(mx.concatenate([first, scores], -1), axis=-1, precise=True)[..., 1:]
    else:
        scores = mx.softmax(scores, axis=-1, precise=True)
    return product(scores.reshape(grouped), values, False).reshape(batch, heads, queries, -1)


# A product, exponentials and another product, and each rounds: measured by the effect of these roundings
# (Exact.inner), the worst of 1600 draws of the tests was 2.9 units off.
UNITS = 8

# Queries and keys.
_FEW_AND_MANY = ((1, 40), (20, 20))

# Widths of keys and of values, where they differ.
_PAIRS = ((96, 64), (192, 128), (576, 512))

# Small enough for the simulator, where tests/verification/test_levels.py demands that they reach every variant of the
# kernels.
_TESTS = (
    cases_for_tests((2, 4, 2, 1, 70, 64), (1, 8, 1, 2, 33, 128), (1, 2, 2, 1, 300, 64))
    + cases_for_tests((1, 4, 2, 3, 50, 64), (1, 4, 1, 5, 40, 128), (2, 2, 1, 20, 37, 64), mask="causal")
    + cases_for_tests((1, 4, 2, 4, 45, 64), (1, 2, 1, 18, 40, 64), mask="bool", sinks=True)
    + cases_for_tests((1, 4, 2, 2, 45, 64), (1, 2, 1, 18, 40, 128), mask="additive")
    + cases_for_tests((1, 2, 1, 2, 90, 64), (1, 2, 1, 40, 40, 64), mask="causal", window=17)
    + cases_for_tests((1, 1, 1, 40, 40, 128), mask="causal", window=2)
    + cases_for_tests((1, 2, 1, 1, 540, 256))  # more splits than lanes
    + cases_for_tests(
        *((1, 2, 1, *n, width) for width in (32, 48, 72, 80, 96, 112, 192, 256, 512) for n in _FEW_AND_MANY)
    )
    + tuple(
        case
        for width, value_width in _PAIRS
        for case in cases_for_tests(*((1, 2, 1, *n, width) for n in _FEW_AND_MANY), value_width=value_width)
    )
    + cases_for_tests(*((1, heads, 1, 1, 37, width) for width in (64, 128) for heads in (1, 7, 8, 9, 16)))
    + cases_for_tests(*((1, 2, 1, 18, 40, width) for width in (64, 128, 256)), mask="additive", sinks=True, vjp=True)
)

_RAGGED_TESTS = tuple(
    case
    for width, value_width in (*((n, None) for n in (32, 48, 64, 72, 80, 96, 112, 128, 192, 256, 512)), *_PAIRS)
    for case in cases_for_tests(
        *((2, 2, 1, *n, width) for n in _FEW_AND_MANY), value_width=value_width, mask="causal", ragged=True
    )
)


def _on_nvidia(*shapes: tuple[int, ...], **options: Any) -> tuple[Case, ...]:
    return tuple(Case("test", shape, options, gpu="nvidia") for shape in shapes)


# The kernels that load ahead: one row, more rows than 16, and a short window of enough rows to fill half a GPU.
_AHEAD_TESTS = tuple(
    case
    for width in (64, 96, 128)
    for case in (
        *_on_nvidia((1, 2, 1, 1, 70, width), (1, 2, 1, 9, 40, width), mask="causal"),
        *_on_nvidia((66, 1, 1, 17, 20, width), mask="causal", window=5),
    )
) + _on_nvidia((1, 2, 2, 1, 640, 64))  # parts that eight simdgroups put together

_PACKED_TESTS = tuple(
    case
    for bits in (4, 8)
    for case in (
        *(
            case
            for width in (64, 96, 128)
            for case in (
                *_on_nvidia((1, 2, 1, 1, 70, width), (1, 2, 1, 9, 40, width), mask="causal", bits=bits, group_size=32),
                *_on_nvidia((66, 1, 1, 17, 20, width), mask="causal", window=5, bits=bits, group_size=32),
            )
        ),
        Case("test", (1, 2, 1, 33, 40, 64), {"mask": "causal", "bits": bits}, gpu="nvidia", left_to_mx=True),
        *cases_for_tests((1, 8, 2, 1, 70, 64), (2, 2, 1, 3, 33, 128), bits=bits),
        *cases_for_tests(
            (1, 4, 2, 2, 45, 64), (1, 8, 2, 2, 37, 128), bits=bits, group_size=32, mask="causal", sinks=True
        ),
        *cases_for_tests((1, 4, 2, 2, 37, 128), bits=bits, group_size=128, mask="bool"),
        *cases_for_tests(*((1, 9, 1, *n, width) for width in (64, 128, 192, 256) for n in _FEW_AND_MANY), bits=bits),
        *cases_for_tests(*((1, 1, 1, *n, 96) for n in _FEW_AND_MANY), bits=bits, group_size=32),
        *cases_for_tests(*((1, 2, 1, *n, 192) for n in _FEW_AND_MANY), bits=bits, value_width=128),
        *(
            case
            for width, value_width in (*((n, None) for n in (64, 96, 128, 192, 256)), (192, 128))
            for case in cases_for_tests(
                *((2, 2, 1, *n, width) for n in _FEW_AND_MANY),
                bits=bits, group_size=32, value_width=value_width, mask="causal", ragged=True,
            )
        ),
    )
)  # fmt: skip

# Decoding with a cache: heads, width, ratio; on a CPU and in the short form only some, since mx takes its time there.
_ON_CPU = {(1024, 128, 4), (4096, 64, 4), (4096, 128, 1), (4096, 128, 4), (4096, 128, 8), (8192, 128, 4)}
_QUICK = {(4096, 128, 4)}


def _decode(lengths: tuple[int, ...], **options: Any) -> tuple[Case, ...]:
    return tuple(
        Case(
            "decode",
            (1, 32, 32 // ratio, 1, keys, width),
            options,
            quick=(keys, width, ratio) in _QUICK,
            gpu_only=(keys, width, ratio) not in _ON_CPU,
        )
        for keys in lengths
        for width in (64, 128)
        for ratio in (1, 4, 8)
    )


_PREFILL = (
    Case("prompt", (1, 8, 8, 512, 512, 64), {"mask": "causal"}, quick=True),
    Case("prompt", (1, 8, 2, 512, 512, 128), {"mask": "causal"}),
    Case("prompt", (1, 8, 8, 512, 512, 64)),
    Case("prompt", (1, 1, 1, 2048, 2048, 64), {"mask": "causal"}),
    Case("prompt", (1, 1, 1, 2048, 2048, 128), {"mask": "causal"}),
    Case("prompt, sliding window", (1, 1, 1, 2048, 2048, 128), {"mask": "causal", "window": 512}),
    Case("prompt", (1, 32, 8, 512, 512, 128), {"mask": "causal"}, gpu_only=True),
    Case("prompt", (1, 32, 8, 2048, 2048, 64), {"mask": "causal"}, gpu_only=True),
    Case("prompt", (1, 32, 8, 2048, 2048, 128), {"mask": "causal"}, gpu_only=True),
    Case("training", (1, 8, 2, 512, 512, 128), {"mask": "causal"}, vjp=True),
    Case("training", (1, 32, 8, 2048, 2048, 128), {"mask": "causal"}, vjp=True, gpu_only=True),
)

_KEYS = (("k", "rows"), ("v", "rows"))
_PACKED = tuple((f"{what}_{part}", "rows") for what in ("key", "value") for part in ("words", "scales", "biases"))
_MORE = (("mask", "mask"), ("sinks", "sinks"), ("starts", "starts"), ("ends", "ends"))

ATTENTION_OPS: tuple[Op, ...] = (
    AttentionOp(
        name="scaled_dot_product_attention",
        parameters=(("q", "rows"), *_KEYS, *_MORE),
        ours=_ours,
        twin=_twin,
        twin_text="`mx.fast.scaled_dot_product_attention`",
        summary="attention of prompts and of decoding",
        options={"mask": None, "sinks": False, "window": None, "value_width": None, "ragged": False},
        tests=_TESTS + _AHEAD_TESTS + _RAGGED_TESTS,
        cases=_decode((1024, 4096, 8192, 65536)) + _PREFILL,
        units=UNITS,
    ),
    AttentionOp(
        name="quantized_scaled_dot_product_attention",
        parameters=(("q", "rows"), *_PACKED, *_MORE),
        ours=_ours_packed,
        twin=_twin_packed,
        twin_text="mlx-lm's function of this name",
        summary="attention over a quantized cache",
        options={
            "mask": None,
            "sinks": False,
            "window": None,
            "value_width": None,
            "ragged": False,
            "group_size": 64,
            "bits": 8,
        },
        tests=_PACKED_TESTS,
        cases=tuple(
            Case("decode", (1, 32, 8, 1, keys, 128), {"bits": bits}, quick=keys == 1024, gpu_only=keys > 1024)
            for bits in (8, 4)
            for keys in (1024, 4096, 8192, 65536)
        ),
        packed=True,
        units=UNITS,
    ),
)
