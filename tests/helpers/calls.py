"""Small calls of every op, for tests of all of them: zero sizes, dtypes, vmap."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import mlx.core as mx
import numpy as np

import mlx_mittens as mm
from helpers.matrices import BLOCK_BYTES
from mlx_mittens import specs
from mlx_mittens.specs import reference
from mlx_mittens.specs.layer_inputs import exact_gated_delta_inputs, exact_ssm_inputs
from mlx_mittens.specs.op import draw_packed

Sizes = dict[str, int]
GROUP = 32
FLOAT_MODES = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}  # bits and group sizes
EXPERTS = 3  # of a mixture


@dataclass(frozen=True)
class Argument:
    """An array argument: its kind of contents, and the names of its dimensions."""

    holds: str  # "numbers", "groups" (scales or biases), "words" (packed integers), "scales" (of a byte), "bool",
    # "indices", or a kind of blocks
    dims: tuple[str, ...]
    bits: int = 0  # of packed integers
    mode: str = "affine"  # of mx.quantize

    @property
    def is_float(self) -> bool:
        return self.holds in ("numbers", "groups")

    def draw(self, rng: np.random.Generator, sizes: Sizes, dtype: mx.Dtype, extra: tuple[int, ...] = ()) -> mx.array:
        """An array with extra dimensions in front."""
        shape = [*extra, *(sizes[d] for d in self.dims)]
        if self.holds == "bool":
            return mx.array(rng.random(shape) < 0.7)
        if self.holds == "indices":
            return mx.array(rng.integers(0, sizes["experts"], shape, dtype=np.int32))
        if self.holds == "words":
            shape[-1] = shape[-1] * self.bits // 32
            return draw_packed(rng, "w", tuple(shape), self.bits, dtype, mode=self.mode)
        if self.holds == "scales":
            shape[-1] //= FLOAT_MODES[self.mode][1]
            return draw_packed(rng, "scales", tuple(shape), self.bits, dtype, mode=self.mode)
        if self.holds == "groups":
            shape[-1] //= GROUP
        a = mx.array(rng.standard_normal(shape).astype(np.float32))
        if self.holds in BLOCK_BYTES:
            with mx.stream(mx.cpu):
                return mm.block_quantize(a, self.holds)
        return a.astype(dtype)


def numbers(*dims: str) -> Argument:
    return Argument("numbers", dims)


def triple(*dims: str, bits: int = 4) -> tuple[Argument, Argument, Argument]:
    return Argument("words", dims, bits), Argument("groups", dims), Argument("groups", dims)


@dataclass(frozen=True)
class Call:
    """An op on arrays of some sizes."""

    op: str
    what: str
    sizes: Sizes
    arguments: dict[str, Argument]
    function: Callable
    # The results in float64 where a size is zero, of the arrays in float64.
    exact: Callable[..., list[np.ndarray]]
    derived: Callable[[Sizes], Sizes] = lambda sizes: {}  # sizes that others make
    covered: bool = True  # by kernels; mx computes it otherwise
    has_gradients: Callable[[str], bool] = lambda name: True

    @property
    def name(self) -> str:
        return f"{self.op} {self.what}".strip()

    def arrays(self, rng, dtype=mx.float32, extra=lambda name: (), **sizes: int) -> dict[str, mx.array]:
        sizes = {**self.sizes, **sizes}
        sizes |= self.derived(sizes)
        return {name: a.draw(rng, sizes, dtype, extra(name)) for name, a in self.arguments.items()}

    def run(self, *arrays: mx.array) -> list[mx.array]:
        """The outputs for the arrays in the order of the arguments."""
        result = self.function(**dict(zip(self.arguments, arrays, strict=True)))
        return list(result) if isinstance(result, tuple) else [result]

    def differentiable(self) -> list[str]:
        return [name for name, a in self.arguments.items() if a.is_float and self.has_gradients(name)]


LEADS = {"1D": (), "2D": ("rows",), "3D": ("batch", "rows"), "4D": ("more", "batch", "rows")}


def _arguments(op: specs.Op) -> Callable:
    """An op on arrays that are given by name."""
    return lambda **arrays: op.ours(*arrays.values(), **op.options)


def _rows_without_elements(outputs: int):
    return lambda **arrays: [np.zeros(next(iter(arrays.values())).shape)] * outputs


def _row_calls() -> list[Call]:
    calls = []
    sizes = {"more": 2, "batch": 2, "rows": 3, "columns": 8}
    for what, lead in LEADS.items():
        some = {d: sizes[d] for d in (*lead, "columns")}
        for op in specs.ROW_OPS:
            arguments = {
                name: numbers(*lead, "columns") if kind == "rows" else numbers("columns")
                for name, kind in op.parameters
            }
            calls.append(Call(op.name, what, some, arguments, _arguments(op), _rows_without_elements(op.outputs)))
    three = {d: sizes[d] for d in (*LEADS["3D"], "columns")}
    x = numbers(*LEADS["3D"], "columns")
    for axis in (1, (0, 2), None):
        calls.append(
            Call(
                "softmax",
                f"axis {axis}",
                three,
                {"a": x},
                lambda a, axis=axis: mm.softmax(a, axis=axis),
                _rows_without_elements(1),
            )
        )
    return calls


def _product_of_nothing(weights: str, axis: int, factor: float = 1):
    """A product where a size is zero. It has the weights' size along an axis, times a factor, as columns."""

    def exact(x, bias=0, **others):
        return [np.zeros((*x.shape[:-1], int(others[weights].shape[axis] * factor))) + bias]

    return exact


def _gemv_calls() -> list[Call]:
    calls = []
    sizes = {"more": 2, "batch": 2, "rows": 3, "columns": 8, "outputs": 5}
    for what, lead in LEADS.items():
        some = {d: sizes[d] for d in (*lead, "columns", "outputs")}
        for transpose in (True, False):
            w = numbers("outputs", "columns") if transpose else numbers("columns", "outputs")
            arguments = {"w": w, "x": numbers(*lead, "columns"), "bias": numbers("outputs")}
            calls.append(
                Call("gemv", what if transpose else what + " not transposed", some, arguments,
                     partial(mm.gemv, transpose=transpose), _product_of_nothing("w", 0 if transpose else 1))
            )  # fmt: skip
    return calls


def _matmul_calls() -> list[Call]:
    """The calls of gemv, with x first."""
    calls = []
    for call in _gemv_calls():
        arguments = {name: call.arguments[name] for name in ("x", "w", "bias")}
        function = partial(mm.matmul, transpose="not transposed" not in call.what)
        calls.append(replace(call, op="matmul", arguments=arguments, function=function))
    return calls


def _quantized_matmul(x, w, scales, biases=None, bias=None, **options):
    return mm.quantized_matmul(x, w, scales, biases, bias=bias, **options)


def _quantized_calls() -> list[Call]:
    calls = []
    sizes = {"more": 2, "batch": 2, "rows": 3, "columns": 64, "outputs": 32}

    def add(what, lead, stack=(), transpose=True, bits=4, bias=True):
        w, scales, biases = triple(
            *stack, *(("outputs", "columns") if transpose else ("columns", "outputs")), bits=bits
        )
        arguments = {"x": numbers(*lead, "columns"), "w": w, "scales": scales, "biases": biases}
        if bias:
            arguments["bias"] = numbers("outputs")
        some = {d: sizes[d] for d in (*dict.fromkeys((*lead, *stack)), "columns", "outputs")}
        function = partial(_quantized_matmul, transpose=transpose, group_size=GROUP, bits=bits)
        exact = _product_of_nothing("w", -2) if transpose else _product_of_nothing("w", -1, 32 / bits)
        covered = bits != 1 and (not stack or len(lead) > 1)
        if not transpose:
            what += " not transposed"
        calls.append(Call("quantized_matmul", what, some, arguments, function, exact, covered=covered))

    for what, lead in LEADS.items():
        add(what, lead)
        add(what, lead, transpose=False, bits=8)
    for what in ("1D", "2D", "3D", "4D"):
        add(what + " by a stack", LEADS[what], stack=("batch",), bias=False)
    add("4D by a stack of stacks", LEADS["4D"], stack=("more", "batch"), bits=8, transpose=False)
    for bits in (1, 2, 3, 5, 6):
        add(f"of {bits} bits", LEADS["2D"], bits=bits)
        add(f"of {bits} bits", LEADS["2D"], bits=bits, transpose=False)
    for mode, (bits, group_size) in FLOAT_MODES.items():
        for transpose in (True, False):
            dims = ("outputs", "columns") if transpose else ("columns", "outputs")
            words, scales = Argument("words", dims, bits, mode), Argument("scales", dims, bits, mode)
            calls.append(
                Call("quantized_matmul", mode if transpose else mode + " not transposed",
                     {d: sizes[d] for d in ("rows", "columns", "outputs")},
                     {"x": numbers("rows", "columns"), "w": words, "scales": scales},
                     partial(_quantized_matmul, transpose=transpose, group_size=group_size, bits=bits, mode=mode),
                     _product_of_nothing("w", -2) if transpose else _product_of_nothing("w", -1, 32 / bits))
            )  # fmt: skip
    for what, lead in LEADS.items():
        some = {d: sizes[d] for d in (*lead, "columns", "outputs")}
        for bits in (8,) if lead else (1, 2, 3, 4, 5, 6):
            arguments = {"x": numbers(*lead, "columns")}
            for name in ("gate", "up"):
                parts = triple("outputs", "columns", bits=bits)
                arguments |= dict(zip((name, f"{name}_scales", f"{name}_biases"), parts))
            calls.append(
                Call("quantized_swiglu", f"{what} of {bits} bits", some, arguments,
                     partial(_swiglu, bits=bits), _product_of_nothing("gate", 0), covered=bits != 1)
            )  # fmt: skip
    for what, lead in LEADS.items():
        for bits in (8,) if lead else (1, 2, 3, 4, 5, 6):
            some = {d: sizes[d] for d in (*lead, "columns")}
            table = dict(zip(("w", "scales", "biases"), triple("experts", "columns", bits=bits)))
            calls.append(
                Call("quantized_embedding", f"{what} of {bits} bits", some,
                     {"indices": Argument("indices", lead), **table}, partial(_embedding, bits=bits),
                     lambda indices, w, bits=bits, **others: [
                         np.full((*indices.shape, w.shape[-1] * 32 // bits), np.nan)],
                     derived=lambda sizes: {"experts": sizes.get("experts", EXPERTS)})
            )  # fmt: skip
    matrices = [triple("outputs", "columns")] * 2
    arguments = {
        f"{name}{i}": a for i, parts in enumerate(matrices) for name, a in zip(("w", "scales", "biases"), parts)
    }
    for what in ("1D", "2D", "3D"):
        some = {d: sizes[d] for d in (*LEADS[what], "columns", "outputs")}
        calls.append(
            Call("quantized_matmuls", what, some, {"x": numbers(*LEADS[what], "columns"), **arguments},
                 _quantized_matmuls, _products_of_nothing)
        )  # fmt: skip
    return calls


def _embedding(indices, w, scales, biases, bits):
    return mm.quantized_embedding(indices, w, scales, biases, GROUP, bits)


def _quantized_matmuls(x, w0, scales0, biases0, w1, scales1, biases1):
    return tuple(mm.quantized_matmuls(x, [(w0, scales0, biases0), (w1, scales1, biases1)], GROUP, 4))


def _products_of_nothing(x, w0, w1, **others):
    return [np.zeros((*x.shape[:-1], len(w))) for w in (w0, w1)]


def _swiglu(x, gate, gate_scales, gate_biases, up, up_scales, up_biases, bits):
    return mm.quantized_swiglu(x, (gate, gate_scales, gate_biases), (up, up_scales, up_biases), GROUP, bits)


def _block_calls() -> list[Call]:
    calls = []
    sizes = {"more": 2, "batch": 2, "rows": 3, "columns": 64, "outputs": 5}
    for what, lead in LEADS.items():
        some = {d: sizes[d] for d in (*lead, "columns")}
        for kind, size in BLOCK_BYTES.items():
            w = Argument(kind, (*lead, "columns"))
            calls += [
                Call("block_matmul", f"{what} {kind}", {**some, "outputs": sizes["outputs"]},
                     {"x": numbers(*lead, "columns"), "blocks": Argument(kind, ("outputs", "columns")),
                      "bias": numbers("outputs")},
                     partial(mm.block_matmul, kind=kind), _product_of_nothing("blocks", 0)),
                Call("block_quantize", f"{what} {kind}", some, {"w": numbers(*lead, "columns")},
                     partial(mm.block_quantize, kind=kind),
                     lambda w, size=size: [np.zeros((*w.shape[:-1], w.shape[-1] // 32 * size))],
                     has_gradients=lambda name: False),
                Call("block_dequantize", f"{what} {kind}", some, {"blocks": w},
                     partial(mm.block_dequantize, kind=kind),
                     lambda blocks, size=size: [np.zeros((*blocks.shape[:-1], blocks.shape[-1] // size * 32))]),
            ]  # fmt: skip
    return calls


def _attention(q, k, v, mask=None, sinks=None):
    """In float64, with sizes of zero."""
    batch, heads, queries, _ = q.shape
    k, v = (np.repeat(a, heads // a.shape[1], axis=1) for a in (k, v))
    scores = q @ np.swapaxes(k, -1, -2) / 8
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    sinks = np.full(heads, -np.inf) if sinks is None else sinks
    most = np.maximum(scores.max(axis=-1, keepdims=True, initial=-1e30), sinks[:, None, None])
    weights = np.exp(scores - most)
    total = weights.sum(axis=-1, keepdims=True) + np.exp(sinks[:, None, None] - most)
    return [(weights / np.where(total == 0, 1, total)) @ v]


def _quantized_attention(queries, keys, keys_scales, keys_biases, values, values_scales, values_biases, mask=None):
    k, v = (
        reference.dequantize(np.asarray(words, np.uint32), scales, biases, GROUP, 8)
        if words.size
        else np.zeros((*words.shape[:-1], words.shape[-1] * 4))
        for words, scales, biases in ((keys, keys_scales, keys_biases), (values, values_scales, values_biases))
    )
    return _attention(queries, k, v, mask)


def _attention_calls() -> list[Call]:
    calls = []
    sizes = {"batch": 2, "key_heads": 2, "queries": 3, "keys": 5, "width": 64, "values_width": 64}
    q = numbers("batch", "heads", "queries", "width")
    k, v = numbers("batch", "key_heads", "keys", "width"), numbers("batch", "key_heads", "keys", "values_width")
    masks = {
        "": {},
        "mask": {"mask": numbers("batch", "heads", "queries", "keys")},
        "bool mask of two dimensions": {"mask": Argument("bool", ("queries", "keys"))},
        "sinks": {"sinks": numbers("heads")},
        "mask and sinks": {"mask": numbers("queries", "keys"), "sinks": numbers("heads")},
    }
    for what, more in masks.items():
        for kind in ("", "causal", "window") if not more else ("",):
            options = {"mask": "causal"} if kind == "causal" else {"window": 2} if kind else {}
            calls.append(
                Call("scaled_dot_product_attention", what or kind, sizes, {"q": q, "k": k, "v": v, **more},
                     partial(mm.scaled_dot_product_attention, scale=0.125, **options),
                     _attention if not options else _hidden(options),
                     derived=lambda sizes: {"heads": 2 * sizes["key_heads"]})
            )  # fmt: skip
    calls.append(
        Call("scaled_dot_product_attention", "rows of different lengths", sizes, {"q": q, "k": k, "v": v},
             _attention_of_rows, _attention, derived=lambda sizes: {"heads": 2 * sizes["key_heads"]})
    )  # fmt: skip
    prefix = [numbers("one", "key_heads", "prefix", n) for n in ("width", "values_width")]
    calls.append(
        Call("cascade_attention", "", sizes | {"prefix": 4},
             {"q": q, "k": k, "v": v, "prefix_k": prefix[0], "prefix_v": prefix[1]},
             partial(mm.cascade_attention, scale=0.125), _cascade,
             derived=lambda sizes: {"heads": 2 * sizes["key_heads"], "one": 1})
    )  # fmt: skip
    pool = [numbers("blocks", "key_heads", "block", n) for n in ("width", "values_width")]
    calls.append(
        Call("paged_attention", "", {name: size for name, size in sizes.items() if name != "keys"},
             {"q": q, "key_blocks": pool[0], "value_blocks": pool[1]}, _paged, _paged_exactly,
             derived=lambda sizes: {"heads": 2 * sizes["key_heads"], "blocks": 3, "block": 16})
    )  # fmt: skip
    names = ("", "_scales", "_biases")
    keys = dict(zip((f"keys{n}" for n in names), triple("batch", "key_heads", "keys", "width", bits=8)))
    values = dict(zip((f"values{n}" for n in names), triple("batch", "key_heads", "keys", "values_width", bits=8)))
    for what in ("", "mask"):
        calls.append(
            Call("quantized_scaled_dot_product_attention", what, sizes,
                 {"queries": q, **keys, **values, **masks[what]}, _packed_attention, _quantized_attention,
                 derived=lambda sizes: {"heads": 2 * sizes["key_heads"]},
                 has_gradients=lambda name: name in ("queries", "mask"))
        )  # fmt: skip
    return calls


def _hidden(options):
    def exact(q, k, v):
        queries, keys = q.shape[2], k.shape[2]
        at = np.arange(queries)[:, None] + keys - queries
        key = np.arange(keys)[None]
        seen = (key <= at) & (key > at - options.get("window", keys + queries))
        return _attention(q, k, v, seen)

    return exact


def _cascade(q, k, v, prefix_k, prefix_v):
    rows = [np.concatenate([np.repeat(a, len(b), 0), b], 2) for a, b in ((prefix_k, k), (prefix_v, v))]
    return _attention(q, *rows)


def _zeros_of_rows(a):
    """An int32 for each row of the batch, of any shape."""
    return (a.sum((1, 2, 3)) > mx.inf).astype(mx.int32)


def _paged(q, key_blocks, value_blocks):
    table = _zeros_of_rows(q)[:, None] + mx.array([2, 0])
    return mm.paged_attention(q, key_blocks, value_blocks, table, _zeros_of_rows(q) + 18, scale=0.125)


def _paged_exactly(q, key_blocks, value_blocks):
    rows = [np.concatenate([a[2], a[0, :, :2]], 1)[None] for a in (key_blocks, value_blocks)]
    return _attention(q, *(np.repeat(a, len(q), 0) for a in rows))


def _paged_append_calls() -> list[Call]:
    names = ("width", "values_width")
    new = [numbers("batch", "key_heads", "tokens", n) for n in names]
    pools = [numbers("blocks", "key_heads", "block", n) for n in names]

    def run(keys, values, key_blocks, value_blocks):
        zeros = _zeros_of_rows(keys)
        table = mx.cumsum(zeros + 1)[:, None] % 8  # a block for each row
        return mm.paged_append(keys, values, key_blocks, value_blocks, table, zeros + 3)[:2]

    def exact(keys, values, key_blocks, value_blocks):
        results = [a.copy() for a in (key_blocks, value_blocks)]
        for pool, fresh in zip(results, (keys, values), strict=True):
            for row in range(len(fresh)):
                pool[row + 1, :, 3 : 3 + fresh.shape[2]] = fresh[row]
        return results

    sizes = {"batch": 2, "key_heads": 2, "tokens": 3, "width": 8, "values_width": 6}
    return [
        Call("paged_append", "", sizes,
             {"keys": new[0], "values": new[1], "key_blocks": pools[0], "value_blocks": pools[1]}, run, exact,
             derived=lambda sizes: {"blocks": 8, "block": 16})
    ]  # fmt: skip


def _take_calls() -> list[Call]:
    names = ("width", "values_width")

    def run(keys, values):
        zeros = _zeros_of_rows(keys)
        return mm.take_tokens(keys, values, (zeros[:, None, None] + mx.array([2, 0, 2])).astype(mx.int32))

    def exact(keys, values):
        return [a[:, :, [2, 0, 2]] for a in (keys, values)]

    sizes = {"batch": 2, "key_heads": 2, "tokens": 5, "width": 8, "values_width": 6}
    rows = [numbers("batch", "key_heads", "tokens", n) for n in names]
    return [Call("take_tokens", "", sizes, {"keys": rows[0], "values": rows[1]}, run, exact)]


def _attention_of_rows(q, k, v):
    starts = (q.sum((1, 2, 3)) > mx.inf).astype(mx.int32)  # zeros for any shape
    return mm.scaled_dot_product_attention(q, k, v, scale=0.125, starts=starts)


def _packed_attention(queries, keys, keys_scales, keys_biases, values, values_scales, values_biases, **more):
    return mm.quantized_scaled_dot_product_attention(
        queries, (keys, keys_scales, keys_biases), (values, values_scales, values_biases), 0.125, more.get("mask"),
        GROUP, 8,
    )  # fmt: skip


def _rope_calls() -> list[Call]:
    sizes = {"batch": 2, "query_heads": 3, "key_heads": 1, "tokens": 2, "capacity": 6, "values_capacity": 7, "width": 8}
    arguments = {
        "heads": numbers("batch", "heads", "tokens", "width"),
        "keys": numbers("batch", "key_heads", "capacity", "width"),
        "values": numbers("batch", "key_heads", "values_capacity", "width"),
    }
    half = numbers("half")
    more = {
        "": ({}, {"base": 1e4}),
        "freqs": ({"freqs": half}, {}),
        "norms": ({"query_norm": numbers("width"), "key_norm": numbers("width")}, {"base": 1e4, "eps": 1e-5}),
    }

    def exact(heads, keys, values, freqs=None, query_norm=None, key_norm=None):
        key_heads = keys.shape[1]
        query_heads = heads.shape[1] - 2 * key_heads
        parts = np.split(heads, [query_heads, query_heads + key_heads], axis=1)
        for i, norm in enumerate((query_norm, key_norm)):
            if norm is not None:
                parts[i] = reference.rms_norm(parts[i], norm, 1e-5)
            parts[i] = reference.rope(parts[i], 8, None if freqs is not None else 1e4, 3, freqs)[0]
        keys, values = keys.copy(), values.copy()
        tokens = heads.shape[2]
        keys[:, :, :tokens], values[:, :, :tokens] = parts[1:]
        return [parts[0], keys, values]

    def derived(sizes):
        return {"heads": sizes["query_heads"] + 2 * sizes["key_heads"], "half": sizes["width"] // 2}

    return [
        Call("rope_append", what, sizes, {**arguments, **extra},
             partial(mm.rope_append, dims=8, offset=3, start=0, **options), exact, derived=derived,
             has_gradients=lambda name: name != "freqs")
        for what, (extra, options) in more.items()
    ]  # fmt: skip


def _quantized_rope_calls() -> list[Call]:
    sizes = {"batch": 2, "query_heads": 3, "key_heads": 1, "tokens": 2, "capacity": 6, "values_capacity": 7}
    arguments = {"heads": numbers("batch", "heads", "tokens", "width")}
    for name, capacity in (("keys", "capacity"), ("values", "values_capacity")):
        dims = ("batch", "key_heads", capacity, "width")
        arguments |= dict(zip((name, f"{name}_scales", f"{name}_biases"), triple(*dims), strict=True))

    def run(heads, keys, keys_scales, keys_biases, values, values_scales, values_biases):
        queries, keys, values = mm.quantized_rope_append(
            heads, (keys, keys_scales, keys_biases), (values, values_scales, values_biases), dims=8, offset=3, start=0,
            base=1e4, group_size=GROUP, bits=4,
        )  # fmt: skip
        return queries, *keys, *values

    def exact(heads, **buffers):
        """Where nothing is appended."""
        query_heads = heads.shape[1] - 2 * buffers["keys"].shape[1]
        return [reference.rope(heads[:, :query_heads], 8, 1e4, 3)[0], *buffers.values()]

    return [
        Call("quantized_rope_append", "", {**sizes, "width": GROUP}, arguments, run, exact,
             derived=lambda sizes: {"heads": sizes["query_heads"] + 2 * sizes["key_heads"]})
    ]  # fmt: skip


def _gathered(weights: str, pairs: str = "rhs"):
    """Products where a size of tokens, of chosen experts, of columns or of outputs is zero."""

    def exact(x, **others):
        return [np.zeros((*others[pairs].shape, x.shape[-2], others[weights].shape[1]))]

    return exact


def _moe_calls() -> list[Call]:
    sizes = {"tokens": 3, "chosen": 2, "rows": 2, "columns": 64, "outputs": 5}
    fixed = lambda sizes: {"experts": sizes.get("experts", EXPERTS)}
    x, rhs = numbers("tokens", "rows", "columns"), Argument("indices", ("tokens", "chosen"))
    calls = []
    for bits in (3, 4, 8):
        parts = lambda: triple("experts", "outputs", "columns", bits=bits)
        arguments = {"x": x, **dict(zip(("w", "scales", "biases"), parts())), "rhs": rhs}
        calls.append(
            Call("gather_qmm", f"of {bits} bits", sizes, arguments, partial(_gather_qmm, bits=bits), _gathered("w"),
                 derived=fixed, covered=bits != 3 or not mx.is_available(mx.gpu))
        )  # fmt: skip
    arguments = {"x": x}
    for name in ("gate", "up"):
        arguments |= dict(zip((name, f"{name}_scales", f"{name}_biases"), triple("experts", "outputs", "columns")))
    calls.append(
        Call("gather_swiglu", "", sizes, {**arguments, "rhs": rhs}, _gather_swiglu, _gathered("gate"), derived=fixed)
    )
    arguments = {
        "x": numbers("tokens", "chosen", "columns"), "rhs": rhs, "weights": numbers("tokens", "chosen"),
        **dict(zip(("w", "scales", "biases"), triple("experts", "outputs", "columns"))),
    }  # fmt: skip
    zeros = lambda x, w, **others: [np.zeros((x.shape[0], w.shape[1]))]
    sums = {name: size for name, size in sizes.items() if name != "rows"}
    calls.append(Call("gather_sum", "", sums, arguments, _gather_sum, zeros, derived=fixed))
    w = numbers("experts", "outputs", "columns")
    calls.append(Call("gather_mm", "", sizes, {"x": x, "w": w, "rhs": rhs}, _gather_mm, _gathered("w"), derived=fixed))
    parts = {
        **{name: triple("experts", "hidden", "columns") for name in ("gate", "up")},
        **{"down": triple("experts", "columns", "hidden"), "shared_down": triple("columns", "hidden")},
        **{name: triple("hidden", "columns") for name in ("shared_gate", "shared_up")},
    }
    arguments = {
        **{"x": numbers("tokens", "columns"), "logits": numbers("tokens", "experts")},
        **{f"{name}_{part}": a for name, parts in parts.items() for part, a in zip(("w", "scales", "biases"), parts)},
        "shared_logits": numbers("tokens"),
    }
    some = {"tokens": 3, "columns": 64, "hidden": 32}
    nothing = lambda x, **others: [np.zeros(x.shape)]
    has_second = lambda name: name in ("x", "logits", "shared_logits")  # mx's products have no second ones by scales
    calls.append(
        Call("mixture", "", some, arguments, _mixture, nothing, derived=fixed, has_gradients=has_second)
    )  # fmt: skip
    router = {"logits": numbers("tokens", "columns"), "bias": numbers("columns")}
    some = {"tokens": 3, "columns": 7}
    for scores in ("softmax", "sigmoid"):
        calls.append(
            Call("route_top_k", scores, some, router, partial(mm.route_top_k, k=2, scores=scores),
                 lambda logits, bias: [np.zeros((*logits.shape[:-1], 2))] * 2,
                 has_gradients=lambda name: name == "logits")
        )  # fmt: skip
    return calls


def _recurrence_calls() -> list[Call]:
    sizes = {"batch": 2, "steps": 3, "key_heads": 2, "rows": 3, "columns": 8}
    keys = numbers("batch", "steps", "key_heads", "columns")
    per_head = ("batch", "steps", "heads")
    arguments = {
        **{"q": keys, "k": keys, "v": numbers(*per_head, "rows"), "gamma": numbers(*per_head)},
        **{"beta": numbers(*per_head), "initial_state": numbers("batch", "heads", "rows", "columns")},
    }

    def exact(q, k, v, gamma, beta, initial_state):
        return [np.zeros(v.shape), initial_state]

    def gated_delta(q, k, v, gamma, beta, initial_state):
        part = lambda a: (a / 2) ** 2 / ((a / 2) ** 2 + 1)  # between 0 and 1, of any type
        return mm.gated_delta_update(q / 4, k / 4, v, part(gamma), part(beta), initial_state)

    spaces = {
        **{"x": numbers(*per_head, "rows"), "a_log": numbers("heads"), "b": keys, "c": keys, "d": numbers("heads")},
        **{"dt": numbers(*per_head), "bias": numbers("heads"), "state": arguments["initial_state"]},
    }

    def exact_space(x, a_log, b, c, d, dt, bias, state):
        return [x * d[:, None], state]

    def state_space(x, a_log, b, c, d, dt, bias, state):
        return mm.ssm_update(x, a_log / 4, b / 4, c / 4, d, dt, bias, state)

    per_key_head = ("batch", "key_heads", "each")
    tokens = {
        **{name: numbers("batch", "key_heads", "columns") for name in ("q", "k")},
        **{name: numbers(*per_key_head, "rows") for name in ("v", "z")},
        **{name: numbers(*per_key_head) for name in ("a", "b")},
        **{"conv_state": numbers("batch", "past", "channels"), "conv_weight": numbers("channels", "taps")},
        **{"a_log": numbers("heads"), "dt_bias": numbers("heads"), "norm_weight": numbers("rows")},
        "state": arguments["initial_state"],
    }

    of_keys, of_values = "key_channels", "value_channels"
    apart = {
        **{name: tokens[name] for name in ("q", "k", "v", "z", "b", "a_log", "norm_weight", "state")},
        "a": numbers(*per_key_head, "columns"),
        "dt_bias": numbers("heads", "columns"),
        **{f"{name}_state": numbers("batch", "past", of_keys) for name in "qk"},
        "v_state": numbers("batch", "past", of_values),
        **{f"{name}_weight": numbers(of_keys, "taps") for name in "qk"},
        "v_weight": numbers(of_values, "taps"),
    }

    def token_apart(q, k, v, z, b, a_log, norm_weight, state, a, dt_bias, q_state, k_state, v_state, q_weight,
                    k_weight, v_weight):  # fmt: skip
        past, weights = (q_state, k_state, v_state), (q_weight, k_weight, v_weight)
        y, past, state = mm.gated_delta_token(
            q, k, v, z, a, b, past, weights, a_log / 4, dt_bias, norm_weight, state, gate="sigmoid"
        )  # fmt: skip
        return y, *past, state

    def exact_apart(
        q, k, v, z, b, a_log, norm_weight, state, a, dt_bias, q_state, k_state, v_state, q_weight, k_weight, v_weight
    ):
        past = q_state, k_state, v_state
        fresh = [part.reshape(len(q), 1, math.prod(part.shape[1:])) for part in (q, k, v)]
        moved = [np.concatenate([old, new], 1)[:, 1:] for old, new in zip(past, fresh)]
        return [np.zeros((len(q), *state.shape[1:3])), *moved, state]

    def exact_token(q, k, v, z, a, b, conv_state, conv_weight, a_log, dt_bias, norm_weight, state):
        mixed = np.concatenate([part.reshape(len(q), 1, math.prod(part.shape[1:])) for part in (q, k, v)], -1)
        past = np.concatenate([conv_state, mixed], 1)[:, 1:]
        return [np.zeros((len(q), *state.shape[1:3])), past, state]

    def derived(sizes):
        heads = 2 * sizes["key_heads"]
        channels = 2 * sizes["key_heads"] * sizes["columns"] + heads * sizes["rows"]
        of_keys, of_values = sizes["key_heads"] * sizes["columns"], heads * sizes["rows"]
        parts = {"key_channels": of_keys, "value_channels": of_values, "channels": channels}
        return {"heads": heads, "each": 2, "past": 3, "taps": 4, **parts}

    def gated_delta_token(q, k, v, z, a, b, conv_state, conv_weight, a_log, dt_bias, norm_weight, state):
        return mm.gated_delta_token(
            q, k, v, z, a, b, conv_state, conv_weight, a_log / 4, dt_bias, norm_weight, state
        )  # fmt: skip

    convolved = {
        "projected": numbers("batch", "thirds"),
        "conv_state": numbers("batch", "past", "channels"),
        "conv_weight": numbers("channels", "taps"),
        "conv_bias": numbers("channels"),
    }

    def exact_convolution(projected, conv_state, conv_weight, conv_bias):
        b, _, x = np.split(projected, 3, -1)
        y = np.zeros((len(projected), len(conv_weight)))
        return [y, np.concatenate([conv_state, (b * x)[:, None]], 1)[:, 1:]]

    space_tokens = {
        "projected": numbers("batch", "projections"),
        **{name: convolved[name] for name in ("conv_state", "conv_weight", "conv_bias")},
        **{name: numbers("heads") for name in ("a_log", "d", "dt_bias")},
        "state": arguments["initial_state"],
    }

    def space_token(projected, conv_state, conv_weight, conv_bias, a_log, d, dt_bias, state):
        return mm.ssm_token(projected, conv_state, conv_weight, conv_bias, a_log / 4, d, dt_bias, state)

    def exact_space_token(projected, conv_state, conv_weight, conv_bias, a_log, d, dt_bias, state):
        inner, channels = math.prod(state.shape[1:3]), len(conv_weight)
        mixed = projected[:, None, inner : inner + channels]
        past = np.concatenate([conv_state, mixed], 1)[:, 1:]
        c = (np.concatenate([conv_state, mixed], 1) * conv_weight.T).sum(1)[:, :inner] + conv_bias[:inner]
        z = projected[:, :inner]
        y = c / (1 + np.exp(-c)) * np.repeat(d, state.shape[2]) * z / (1 + np.exp(-z))
        return [y, past, state]

    def derived_space(sizes):
        channels = 2 * sizes["key_heads"] * (sizes["rows"] + sizes["columns"])
        heads = 2 * sizes["key_heads"]
        return {**derived(sizes), "channels": channels, "projections": heads * (sizes["rows"] + 1) + channels}

    per_step = ("batch", "steps", "key_heads", "each")
    inputs = {
        **dict.fromkeys(("q", "k"), keys),
        **{"v": numbers(*per_step, "rows"), "a": numbers(*per_step), "b": numbers(*per_step)},
        **{name: tokens[name] for name in ("conv_state", "conv_weight", "a_log", "dt_bias")},
    }

    def gated_delta_inputs(q, k, v, a, b, conv_state, conv_weight, a_log, dt_bias):
        return mm.gated_delta_inputs(q, k, v, a, b, conv_state, conv_weight, a_log / 4, dt_bias)

    def exact_inputs(q, k, v, a, b, conv_state, conv_weight, a_log, dt_bias):
        return [e.value for e in exact_gated_delta_inputs(q, k, v, a, b, conv_state, conv_weight, a_log / 4, dt_bias)]

    space_inputs = {
        "mixed": numbers("batch", "steps", "channels"),
        **{name: convolved[name] for name in ("conv_state", "conv_weight", "conv_bias")},
    }

    def of_space(mixed, conv_state, conv_weight, conv_bias, inner):
        return mm.ssm_inputs(mixed, conv_state, conv_weight, conv_bias, inner)

    def exact_of_space(mixed, conv_state, conv_weight, conv_bias, inner):
        return [e.value for e in exact_ssm_inputs(mixed, conv_state, conv_weight, conv_bias, inner=inner)]

    return [
        Call("gated_delta_inputs", "", sizes, inputs, gated_delta_inputs, exact_inputs, derived=derived),
        *(Call("ssm_inputs", what, {"batch": 2, "steps": 3, "shared": 2}, space_inputs, partial(of_space, inner=inner),
               partial(exact_of_space, inner=inner),
               derived=lambda sizes, inner=inner: {"past": 3, "taps": 4, "channels": inner + 2 * sizes["shared"]})
          for what, inner in (("", 4), ("no x", 0))),
        Call("short_conv_token", "", {"batch": 2, "channels": 8}, convolved, mm.short_conv_token, exact_convolution,
             derived=lambda sizes: {"past": 2, "taps": 3, "thirds": 3 * sizes["channels"]}),
        Call("ssm_token", "", {name: size for name, size in sizes.items() if name != "steps"}, space_tokens,
             space_token, exact_space_token, derived=derived_space),
        Call("gated_delta_token", "", {name: size for name, size in sizes.items() if name != "steps"}, tokens,
             gated_delta_token, exact_token, derived=derived),
        Call("gated_delta_token", "apart", {name: size for name, size in sizes.items() if name != "steps"}, apart,
             token_apart, exact_apart, derived=derived),
        Call("gated_delta_update", "", sizes, arguments, gated_delta, exact,
             derived=lambda sizes: {"heads": 2 * sizes["key_heads"]}),
        Call("ssm_update", "", sizes, spaces, state_space, exact_space,
             derived=lambda sizes: {"heads": 2 * sizes["key_heads"]}),
    ]  # fmt: skip


def _gather_qmm(x, w, scales, biases, rhs, bits):
    return mm.gather_qmm(x[:, None], w, scales, biases, rhs_indices=rhs, group_size=GROUP, bits=bits)


def _gather_swiglu(x, gate, gate_scales, gate_biases, up, up_scales, up_biases, rhs):
    triples = (gate, gate_scales, gate_biases), (up, up_scales, up_biases)
    return mm.gather_swiglu(x[:, None], *triples, rhs_indices=rhs, group_size=GROUP)


def _gather_sum(x, rhs, weights, w, scales, biases):
    return mm.gather_sum(x, w, scales, biases, rhs, weights, group_size=GROUP)


def _mixture(x, logits, shared_logits, **packed):
    names = ("gate", "up", "down", "shared_gate", "shared_up", "shared_down")
    triples = [tuple(packed[f"{name}_{part}"] for part in ("w", "scales", "biases")) for name in names]
    return mm.mixture(x, logits, 2, *triples, shared_logits, GROUP, 4)


def _gather_mm(x, w, rhs):
    return mm.gather_mm(x[:, None], w.swapaxes(-1, -2), rhs_indices=rhs)


def _masked_calls() -> list[Call]:
    sizes = {"batch": 2, "rows": 3, "columns": 64, "outputs": 17}
    blocks = lambda sizes: {f"{name}_blocks": -(-sizes[name] // 32) for name in ("rows", "columns", "outputs")}
    zeros = lambda a, b, **masks: [np.zeros((*a.shape[:-1], b.shape[-1]))]
    calls = []
    for holds in ("bool", "numbers"):
        masks = {
            "mask_out": Argument(holds, ("rows_blocks", "outputs_blocks")),
            "mask_lhs": Argument(holds, ("batch", "rows_blocks", "columns_blocks")),
            "mask_rhs": Argument(holds, ("columns_blocks", "outputs_blocks")),
        }
        arguments = {"a": numbers("batch", "rows", "columns"), "b": numbers("columns", "outputs"), **masks}
        calls.append(
            Call("block_masked_mm", f"by {holds}", sizes, arguments, _block_masked_mm, zeros, derived=blocks,
                 covered=not mx.is_available(mx.gpu) or mx.metal.is_available())
        )  # fmt: skip
    return calls


def _block_masked_mm(a, b, **masks):
    return mm.block_masked_mm(a, b, 32, **masks)


def _shaped_calls() -> list[Call]:
    calls = []
    for op in specs.OPS:
        if isinstance(op, specs.ShapedOp):
            sizes = dict(zip(op.dimensions, op.smallest, strict=True))
            arguments = {name: numbers(*dims) for (name, _), dims in zip(op.parameters, op.arrays)}
            exact = lambda op=op, **arrays: [op.reference(*arrays.values(), **op.options).value]
            calls.append(Call(op.name, "", sizes, arguments, _arguments(op), exact))
    return calls


CALLS = [
    *_row_calls(),
    *_gemv_calls(),
    *_matmul_calls(),
    *_quantized_calls(),
    *_block_calls(),
    *_masked_calls(),
    *_attention_calls(),
    *_rope_calls(),
    *_quantized_rope_calls(),
    *_paged_append_calls(),
    *_take_calls(),
    *_moe_calls(),
    *_recurrence_calls(),
    *_shaped_calls(),
]
