"""Gradients of attention by kernels and native code, from the logsumexp of each row."""

import os
import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from helpers.attention import HIDES, draw, hidden_keys, inputs, mask_of, poisoned, run
from helpers.support import peak_memory
from helpers.tolerances import GRADIENTS_16_BIT, LAYERS, SUMS, assert_near, units

import mlx_mittens as mm
from mlx_mittens.specs import widen
from mlx_mittens.specs.attention_gradients import exact_attention_vjp

OP = "scaled_dot_product_attention_vjp"


def exact_gradients(q, k, v, dy, scale, mask=None, sinks=None, window=None):
    """In float64, by name."""
    array = mask if isinstance(mask, mx.array) else None
    exact = exact_attention_vjp(q, k, v, dy, scale, array, sinks, array is None and mask == "causal", window)
    names = ["queries", "keys", "values"]
    names += ["mask"] if array is not None and array.dtype != mx.bool_ else []
    names += ["sinks"] if sinks is not None else []
    return dict(zip(names, exact, strict=True))


def limit_of(exact, dtype):
    """Of the largest element, and the rounding errors where terms cancel."""
    part = SUMS if dtype == mx.float32 else GRADIENTS_16_BIT
    return part * np.abs(exact.value).max() + units(2, dtype) * exact.magnitude.max()


def gradients(q, k, v, dy, scale, mask=None, sinks=None, window=None):
    """The same by the op."""
    arrays = {"queries": q, "keys": k, "values": v}
    if isinstance(mask, mx.array) and mask.dtype != mx.bool_:
        arrays["mask"] = mask
    if sinks is not None:
        arrays["sinks"] = sinks

    def attend(*given):
        named = dict(zip(arrays, given, strict=True))
        return mm.scaled_dot_product_attention(
            named["queries"], named["keys"], named["values"], scale=scale, mask=named.get("mask", mask),
            sinks=named.get("sinks"), window=window)  # fmt: skip

    mm.stats(reset=True)
    found = run(lambda: mx.vjp(attend, list(arrays.values()), [dy])[1])
    assert mm.stats()[OP]["kernels"], mm.stats()
    return dict(zip(arrays, found, strict=True))


def check(found, exact, dtype):
    for name, right in exact.items():
        assert found[name].dtype == dtype
        result = widen(found[name])
        assert np.isfinite(result).all(), name
        distance = np.abs(result - right.value).max()
        assert distance <= limit_of(right, dtype), f"gradient of the {name}: {distance} off"


# batch, heads, key heads, queries, keys, width, width of the values
SHAPES = [
    (1, 1, 1, 1, 3, 64, 64),
    (2, 4, 1, 37, 53, 64, 64),  # blocks that are not full
    (1, 8, 1, 5, 70, 128, 128),
    (1, 2, 2, 40, 23, 128, 128),  # more queries than keys: with causality some see none
    (1, 2, 1, 19, 33, 256, 256),
    (2, 2, 1, 18, 35, 80, 80),  # padded
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "additive"])
def test_against_float64(rng, dtype, executor, shape, mask):
    *sizes, value_width = shape
    q, k, v = inputs(rng, sizes, dtype, value_width, outliers=False)
    dy = draw(rng, (*q.shape[:3], value_width), dtype, False)
    scale, given = sizes[5] ** -0.5, mask_of(rng, mask, sizes, dtype)
    sinks = draw(rng, (sizes[1],), dtype, False) if mask in ("causal", "additive") else None
    found = gradients(q, k, v, dy, scale, given, sinks)
    check(found, exact_gradients(q, k, v, dy, scale, given, sinks), dtype)


@pytest.mark.parametrize("window", [1, 9])
@pytest.mark.parametrize("queries, keys", [(40, 40), (50, 30)])
def test_window(rng, executor, window, queries, keys):
    """Blocks that rows see in part; with more queries than keys, rows that see none."""
    shape = (1, 2, 1, queries, keys, 64)
    q, k, v = inputs(rng, shape, mx.float32, outliers=False)
    dy, mask = draw(rng, q.shape, mx.float32, False), mask_of(rng, "bool", shape, mx.float32)
    for given in (None, mask):
        found = gradients(q, k, v, dy, 0.125, given, window=window)
        check(found, exact_gradients(q, k, v, dy, 0.125, given, window=window), mx.float32)


@pytest.mark.parametrize(
    "shape", [(37,), (9, 1), (1, 9, 37), (4, 1, 37), (2, 1, 9, 37), (2, 4, 9, 37), (1, 1)], ids=str
)
def test_masks_that_are_broadcast(rng, executor, shape):
    """A mask's gradient is a sum over the axes that it is broadcast along."""
    q, k, v = inputs(rng, (2, 4, 2, 9, 37, 64), mx.float32, outliers=False)
    dy, mask = draw(rng, q.shape, mx.float32, False), draw(rng, shape, mx.float32, False)
    found = gradients(q, k, v, dy, 0.125, mask)
    check(found, exact_gradients(q, k, v, dy, 0.125, mask), mx.float32)


@pytest.mark.parametrize("ratio", [1, 4, 8])
def test_strides(rng, executor, ratio):
    """Arrays that are transposed, a slice of a cache, heads that are broadcast, a cotangent of one number."""
    batch, heads, queries, keys, width = 2, 8, 9, 21, 64
    q = draw(rng, (batch, queries, heads, width), mx.float32, False).swapaxes(1, 2)
    k = draw(rng, (batch, 64, heads // ratio, width), mx.float32, False).swapaxes(1, 2)[:, :, 3 : 3 + keys]
    wide = draw(rng, (batch, heads // ratio, keys, 2 * width + 1), mx.float32, False)
    shared = mx.broadcast_to(wide[:, :1, :, :width], (batch, heads // ratio, keys, width))
    mask = draw(rng, (keys, queries), mx.float32, False).T
    for v in (wide[..., 1 : width + 1], wide[..., ::2][..., :width], shared):
        for dy in (mx.ones_like(q), draw(rng, (batch, queries, heads, width), mx.float32, False).swapaxes(1, 2)):
            found = gradients(q, k, v, dy, 0.125, mask)
            check(found, exact_gradients(q, k, v, dy, 0.125, mask), mx.float32)


@pytest.mark.parametrize("width, value_width", [(64, 16), (40, 128), (3, 5), (300, 20)])
def test_values_of_another_width(rng, dtype, native, width, value_width):
    q, k, v = inputs(rng, (1, 4, 2, 9, 70, width), dtype, value_width, outliers=False)
    dy = draw(rng, (*q.shape[:3], value_width), dtype, False)
    found = gradients(q, k, v, dy, width**-0.5, "causal")
    check(found, exact_gradients(q, k, v, dy, width**-0.5, "causal"), dtype)


@pytest.mark.parametrize(
    "what", [("queries",), ("keys",), ("values",), ("keys", "values"), ("mask",), ("sinks",)], ids=str
)
def test_some_gradients_alone(rng, executor, what):
    shape = (1, 4, 2, 20, 40, 64)
    q, k, v = inputs(rng, shape, mx.float32, outliers=False)
    arrays = {"queries": q, "keys": k, "values": v, "mask": mask_of(rng, "additive", shape, mx.float32),
              "sinks": draw(rng, (4,), mx.float32, False)}  # fmt: skip
    dy = draw(rng, q.shape, mx.float32, False)

    def attend(*given):
        a = arrays | dict(zip(what, given, strict=True))
        return mm.scaled_dot_product_attention(
            a["queries"], a["keys"], a["values"], scale=0.125, mask=a["mask"], sinks=a["sinks"])  # fmt: skip

    found = run(lambda: mx.vjp(attend, [arrays[name] for name in what], [dy])[1])
    exact = exact_gradients(q, k, v, dy, 0.125, arrays["mask"], arrays["sinks"])
    check(dict(zip(what, found, strict=True)), {name: exact[name] for name in what}, mx.float32)


@pytest.mark.parametrize("seen", ["bool", "additive"])
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_see_no_key(rng, dtype, executor, seen, sinks):
    """They have no gradients but their sink's, which is 0 too, and give none."""
    q, k, v = inputs(rng, (1, 2, 1, 20, 30, 64), dtype, outliers=False)
    visible = rng.random((20, 30)) < 0.5
    visible[3:14] = False
    mask = mx.array(visible) if seen == "bool" else mx.array(np.where(visible, 0, -np.inf)).astype(dtype)
    drawn, dy = draw(rng, (2,), dtype, False) if sinks else None, draw(rng, q.shape, dtype, False)
    found = gradients(q, k, v, dy, 0.125, mask, drawn)
    check(found, exact_gradients(q, k, v, dy, 0.125, mask, drawn), dtype)
    assert not widen(found["queries"])[:, :, 3:14].any()


@pytest.mark.parametrize("how", HIDES)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_hidden_does_not_matter(rng, dtype, executor, how, value):
    """Keys and values that a row does not see may hold anything; rows that see them have NaN."""
    queries, keys = 24, 40
    hidden = hidden_keys(rng, how, queries, keys, dtype)
    q, k, v = inputs(rng, (1, 2, 1, queries, keys, 64), dtype, outliers=False)
    dy = mx.where(mx.array(~hidden.hits)[:, None], draw(rng, q.shape, dtype, False), 0)
    exact = exact_gradients(q, k, v, dy, 0.125, hidden.mask, window=hidden.window)
    spoilt = [poisoned(a, hidden.keys, value, slice(3, 50, 11)) for a in (k, v)]
    found = gradients(q, *spoilt, dy, 0.125, hidden.mask, window=hidden.window)
    clear = {"queries": (slice(None), slice(None), ~hidden.hits)}
    if not hidden.hits.any():
        clear |= {"keys": ..., "values": ...}
    for name, at in clear.items():
        distance = np.abs(widen(found[name]) - exact[name].value)[at].max()
        assert distance <= limit_of(exact[name], dtype), name
    if np.isnan(value):
        assert np.isnan(widen(found["queries"])[:, :, hidden.hits]).all()


def test_queries_that_are_not_finite(rng, executor):
    """They spoil their own gradient and the gradients of the keys that they see."""
    q, k, v = inputs(rng, (1, 2, 1, 40, 40, 64), mx.float32, outliers=False)
    dy = draw(rng, q.shape, mx.float32, False)
    right = exact_gradients(q, k, v, dy, 0.125, "causal")
    q[:, :, 20, 7] = np.nan
    found = {name: widen(a) for name, a in gradients(q, k, v, dy, 0.125, "causal").items()}
    for name, at in (("queries", np.arange(40) != 20), ("keys", np.arange(40) > 20), ("values", np.arange(40) > 20)):
        np.testing.assert_array_equal(np.isfinite(found[name]).all((0, 1, 3)), at, name)
        distance = np.abs(found[name] - right[name].value)[:, :, at].max()
        assert distance <= limit_of(right[name], mx.float32), name


def test_beyond_float16(rng, executor):
    """Scores and their gradients overflow float16, results do not."""
    q, k, v = inputs(rng, (1, 2, 1, 20, 30, 64), mx.float16, outliers=False)
    dy = draw(rng, q.shape, mx.float16, False)
    check(gradients(q * 100, k * 100, v, dy, 1e-5, "causal"),
          exact_gradients(q * 100, k * 100, v, dy, 1e-5, "causal"), mx.float16)  # fmt: skip
    check(gradients(q * 0.01, k * 0.01, v * 200, dy * 200, 1e-2),
          exact_gradients(q * 0.01, k * 0.01, v * 200, dy * 200, 1e-2), mx.float16)  # fmt: skip


def test_repeated_runs_are_equal(rng, executor):
    q, k, v = inputs(rng, (1, 4, 2, 40, 100, 64), mx.float32)
    mask, dy = draw(rng, (1, 100), mx.float32), draw(rng, q.shape, mx.float32)
    first, second = (gradients(q, k, v, dy, 0.125, mask, mx.zeros((4,))) for _ in range(2))
    for name, gradient in first.items():
        assert mx.array_equal(gradient, second[name]).item(), name


def test_any_number_of_threads_gives_the_same(tmp_path):
    """Of so few keys that no threads share them in the forward, which sums by their number."""
    program = """
import sys
import mlx.core as mx
import mlx_mittens as mm
mx.set_default_device(mx.cpu)
mx.random.seed(1)
shapes = ((4, 300, 64), (2, 250, 64), (2, 250, 64), (1, 1, 250), (4, 300, 64))
q, k, v, mask, dy = (mx.random.normal((1, *shape)) for shape in shapes)
attend = lambda q, k, v, mask: mm.scaled_dot_product_attention(q, k, v, scale=0.125, mask=mask)
mx.savez(sys.argv[1], *mx.vjp(attend, [q, k, v, mask], [dy])[1])
"""
    found = []
    for threads in ("1", "5"):
        file = tmp_path / f"{threads}.npz"
        environment = os.environ | {"MLX_MITTENS_THREADS": threads}
        subprocess.run([sys.executable, "-c", program, str(file)], env=environment, check=True)
        found.append(mx.load(str(file)))
    for name, gradient in found[0].items():
        assert mx.array_equal(gradient, found[1][name]).item(), name


@pytest.mark.parametrize("axes", [(0, 0, 0, 0), (1, None, 2, None), (None, 1, None, 0)], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
def test_vmap_and_compile(rng, executor, axes, batch):
    """Of gradients, by one call of the kernels; a mask of one batch is summed over it."""
    shapes = [(batch, 4, 5, 64), (batch, 2, 20, 64), (batch, 2, 20, 64), (1, 4, 5, 20)]
    full = [s if a is None else (*s[:a], 3, *s[a:]) for s, a in zip(shapes, axes)]
    arrays = [draw(rng, s, mx.float32, False) for s in full]
    loss = lambda q, k, v, mask: mx.sin(mm.scaled_dot_product_attention(q, k, v, scale=0.125, mask=mask)).sum()
    one = mx.compile(mx.grad(loss, argnums=(0, 1, 2, 3)))
    pick = lambda i: [a if x is None else mx.take(a, i, axis=x) for a, x in zip(arrays, axes)]
    each = [run(lambda i=i: one(*pick(i))) for i in range(3)]
    found = run(lambda: mx.vmap(one, in_axes=axes)(*arrays))
    for i, gradient in enumerate(found):
        assert_near(gradient, mx.stack([e[i] for e in each]), f"gradient {i}")


def test_vmap_over_sinks(rng, native):
    """By the composition, whose logsumexp the gradients read."""
    q, k, v = inputs(rng, (1, 2, 1, 6, 9, 16), mx.float32, outliers=False)
    sinks = draw(rng, (3, 2), mx.float32, False)
    loss = lambda q, sinks: mx.sin(
        mm.scaled_dot_product_attention(q, k, v, scale=0.3, mask="causal", sinks=sinks)).sum()  # fmt: skip
    one = mx.grad(loss, argnums=(0, 1))
    found = mx.vmap(one, in_axes=(None, 0))(q, sinks)
    for i, gradient in enumerate(found):
        assert_near(gradient, mx.stack([one(q, s)[i] for s in sinks]), f"gradient {i}")


def test_a_graph_that_is_built_outside_the_simulator(rng, native):
    q, k, v = inputs(rng, (1, 4, 2, 20, 50, 64), mx.float32, outliers=False)
    dy = draw(rng, q.shape, mx.float32, False)
    found = mx.vjp(lambda *a: mm.scaled_dot_product_attention(*a, scale=0.125), [q, k, v], [dy])[1]
    with mm.simulator.enabled():
        mx.eval(found)
    check(dict(zip(("queries", "keys", "values"), found)), exact_gradients(q, k, v, dy, 0.125), mx.float32)


def test_second_derivatives(rng, executor):
    """Composed of mx operations; of all arguments."""
    arrays = [*inputs(rng, (1, 2, 1, 6, 9, 64), mx.float32, outliers=False), draw(rng, (6, 9), mx.float32, False)]

    def second(attend):
        loss = lambda *a: mx.sin(attend(*a[:3], scale=0.125, mask=a[3])).sum()
        first = mx.grad(loss, argnums=(0, 1, 2, 3))
        return run(
            lambda: mx.grad(lambda *a: sum(mx.square(g).sum() for g in first(*a)), argnums=(0, 1, 2, 3))(*arrays)
        )

    ours = second(mm.scaled_dot_product_attention)
    with mx.stream(mx.cpu):
        twins = second(mx.fast.scaled_dot_product_attention)
    for i, (a, b) in enumerate(zip(ours, twins, strict=True)):
        assert_near(a, b, f"second derivative {i}", LAYERS)


def test_memory_grows_with_the_tokens(rng, native):
    """As the arguments do, and not as the scores, which are 256 MB of 8192 tokens."""

    def peak(tokens):
        q, k, v = inputs(rng, (1, 1, 1, tokens, tokens, 64), mx.float32)
        loss = lambda *a: mm.scaled_dot_product_attention(*a, scale=0.125, mask="causal").sum()
        mx.eval(q, k, v)
        return peak_memory(lambda: mx.grad(loss, argnums=(0, 1, 2))(q, k, v))

    shorter, longer = peak(4096), peak(8192)
    assert longer <= 2.1 * shorter
    assert longer <= 8 * 8192 * 64 * 4, "y, its cotangent and three gradients"
