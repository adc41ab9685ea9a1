"""Ops that the patch makes one kernel of: a model calls one after the other, the first still to be computed."""

import importlib

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from helpers import tiny
from helpers.matrices import exact_swiglu
from helpers.support import assert_same_bits
from helpers.tolerances import (
    FLOAT16_TWICE,
    LAYERS,
    ROUNDINGS,
    SUM,
    SUMS,
    assert_near,
    assert_product_right,
    of_layer,
    of_roundings,
)
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

import mlx_mittens as mm

HEADS, KEY_HEADS, WIDTH = 4, 2, 64


def normal(rng, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.array(rng.normal(size=shape).astype(np.float32)).astype(dtype)


def launched() -> dict[str, int]:
    return {op: sum(counts["kernels"].values()) for op, counts in mm.stats(reset=True).items()}


def evaluated(arrays):
    mx.eval(arrays)
    return arrays


def quantized_pair(rng, dtype, columns=64, outputs=40, **options):
    """Two quantized layers of one input, and rows for them."""
    mx.random.seed(int(rng.integers(2**31)))
    layers = [
        nn.QuantizedLinear(columns, outputs, bias=False, **{"group_size": 32, "bits": 4, **options}) for _ in "gu"
    ]
    for layer in layers:
        layer.set_dtype(dtype)
    return *layers, mx.array(rng.normal(size=(2, 1, columns))).astype(dtype)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("module, activation", [("activations", "swiglu"), ("gemma4_text", "geglu")])
def test_two_quantized_products_and_their_activation_are_one_kernel(rng, dtype, bits, module, activation):
    gate, up, x = quantized_pair(rng, dtype, bits=bits)
    mm.stats(reset=True)
    with mm.patched(strict=True):
        ours = getattr(importlib.import_module(f"mlx_lm.models.{module}"), activation)
        y = ours(gate(x), up(x))
        mx.eval(y)
    assert launched() == {"quantized_swiglu": 1}
    weights = [(layer.weight, layer.scales, layer.biases) for layer in (gate, up)]
    assert_product_right(y, exact_swiglu(x, *weights, 32, bits, activation), dtype)


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text"])
def test_a_feed_forward_part_of_gemma_is_two_kernels(rng, name):
    module = importlib.import_module(f"mlx_lm.models.{name}")
    layer = module.MLP(64, 128)
    nn.quantize(layer, 32, 4)
    for rows in (1, 3):
        x = mx.array(rng.normal(size=(1, rows, 64)).astype(np.float32))
        expected = layer(x)
        mx.eval(expected)
        mm.stats(reset=True)
        with mm.patched(strict=True):
            y = layer(x)
            mx.eval(y)
        assert launched() == {"quantized_swiglu": 1, "quantized_matmul": 1}
        assert_near(y, expected, "mlp", LAYERS)
    dense = module.MLP(64, 128)
    with mm.patched():
        y = dense(x)
        mx.eval(y)
    assert_near(y, dense(x), "dense", LAYERS)


def test_swiglu_of_other_products_stays_what_it_was(lenient, rng):
    from mlx_lm.models import llama

    gate, up, x = quantized_pair(rng, mx.float32)
    other_bits, _, other_x = quantized_pair(rng, mx.float32, bits=8)
    with_bias, dense = nn.QuantizedLinear(64, 40, group_size=32), nn.Linear(64, 40)
    computed = gate(x)
    mx.eval(computed)
    pairs = {
        "another x": lambda: (gate(x), up(other_x)),
        "other bits": lambda: (gate(x), other_bits(x)),
        "one with a bias": lambda: (gate(x), with_bias(x)),
        "one dense": lambda: (gate(x), dense(x)),
        "one computed": lambda: (computed, up(x)),
        "one that broadcasts": lambda: (gate(x), up(x)[..., :1]),
        "no products": lambda: (x, x),
        "types that differ": lambda: (gate(x), up(x.astype(mx.float16))),
    }
    for what, pair in pairs.items():
        expected = llama.swiglu(*pair())
        mx.eval(expected)
        mm.stats(reset=True)
        with mm.patched():
            y = llama.swiglu(*pair())
            mx.eval(y)
        assert "quantized_swiglu" not in mm.stats(), what
        assert y.dtype == expected.dtype and y.shape == expected.shape
        assert_near(y, expected, what, FLOAT16_TWICE if what == "types that differ" else SUM)


def test_swiglu_under_transformations(rng):
    from mlx_lm.models import llama

    gate, up, x = quantized_pair(rng, mx.float32)
    f = lambda x: (llama.swiglu(gate(x), up(x)) ** 2).sum()
    runs = {
        "grad": lambda: mx.grad(f)(x),
        "compile": lambda: mx.compile(f)(x),
        "jvp": lambda: mx.jvp(f, [x], [x + 1])[1][0],
        "grad of compile": lambda: mx.grad(mx.compile(f))(x),
    }
    expected = {name: run() for name, run in runs.items()}
    mx.eval(expected)
    with mm.patched():
        for name, run in runs.items():
            assert_near(run(), expected[name], name, SUM)
        mm.stats(reset=True)
        mx.eval(mx.grad(f)(x))
    assert launched() == {"quantized_matmul": 4}  # a gradient multiplies with each matrix twice, not three times


def test_a_sum_and_its_norm_are_one_kernel(rng, dtype):
    x, residual = normal(rng, 2, 3, 64, dtype=dtype), normal(rng, 2, 3, 64, dtype=dtype)
    for weight in (normal(rng, 64, dtype=dtype), None):
        expected = evaluated([x + residual, mx.fast.rms_norm(x + residual, weight, 1e-5)])
        mm.stats(reset=True)
        with mm.patched(strict=True):
            total = x + residual
            normed = mx.fast.rms_norm(total, weight, 1e-5)
            twice = total + total
            mx.eval(normed, twice)
        assert launched() == {"add_rms_norm": 1}
        assert_same_bits(total, expected[0], "sum")
        assert_same_bits(twice, expected[0] + expected[0], "what uses the sum")
        assert_near(normed, expected[1], "norm", of_roundings(dtype))
        assert normed.dtype == dtype


def test_a_norm_the_sum_and_its_norm_are_one_kernel(rng, dtype):
    x, residual = normal(rng, 2, 3, 64, dtype=dtype), normal(rng, 2, 3, 64, dtype=dtype)
    first, second = normal(rng, 64, dtype=dtype), normal(rng, 64, dtype=dtype)

    def run(order):
        normed = mx.fast.rms_norm(x, first, 1e-5)
        total = normed + residual if order else residual + normed
        del normed
        return total, mx.fast.rms_norm(total, second, 1e-5)

    for order in (0, 1):
        expected = evaluated(run(order))
        mm.stats(reset=True)
        with mm.patched(strict=True):
            results = evaluated(run(order))
        assert launched() == {"norm_add_norm": 1}
        for what, a, b in zip(("sum", "norm"), results, expected, strict=True):
            assert a.dtype == dtype
            assert_near(a, b, what, 2 * of_roundings(dtype))


def test_a_norm_that_is_wanted_elsewhere_is_computed_once(rng):
    x, residual = normal(rng, 2, 64), normal(rng, 2, 64)
    mm.stats(reset=True)
    with mm.patched(strict=True):
        normed = mx.fast.rms_norm(x, None, 1e-5)
        total = residual + normed
        y = mx.fast.rms_norm(total, None, 1e-5)
        mx.eval(y, normed)
    assert launched() == {"rms_norm": 1, "add_rms_norm": 1}
    mm.stats(reset=True)
    with mm.patched(strict=True):
        total = residual + mx.fast.rms_norm(x, None, 1e-5)
        mx.eval(mx.fast.rms_norm(total, None, 1e-3))  # another eps: not one kernel
    assert launched() == {"rms_norm": 1, "add_rms_norm": 1}


def test_a_sum_alone_is_evaluated_with_its_norm_or_without(rng):
    x, residual = normal(rng, 2, 64), normal(rng, 2, 64)
    with mm.patched():
        total = x + residual
        normed = mx.fast.rms_norm(total, None, 1e-5)
        del normed
        assert_same_bits(total, x + residual, "sum")
        total = x + residual
        normed = mx.fast.rms_norm(total, None, 1e-5)
        again = mx.fast.rms_norm(total, None, 1e-5)  # the sum is the first one's now
        del total
        assert_near(again, evaluated(normed), "norm", ROUNDINGS)


def test_norms_of_other_sums_stay_norms(lenient, rng):
    x, residual, weight = normal(rng, 2, 3, 64), normal(rng, 2, 3, 64), normal(rng, 64)

    def wanted_elsewhere():
        total = x + residual
        return total, total * 2

    sums = {
        "computed": (lambda: evaluated(x + residual), weight),
        "wanted elsewhere": (wanted_elsewhere, weight),
        "with one row for all": (lambda: x + residual[:1], weight),
        "with a number": (lambda: x + 1.0, weight),
        "a difference": (lambda: x - residual, weight),
        "of another stream": (lambda: mx.add(x, residual, stream=mx.new_stream(mx.cpu)), weight),
        "with a wider weight": (lambda: (x + residual).astype(mx.float16) + residual.astype(mx.float16), weight),
    }
    for what, (draw, weight) in sums.items():
        total = draw()
        others = total[1:] if isinstance(total, tuple) else ()
        total = total[0] if others else total
        expected = mx.fast.rms_norm(mx.array(evaluated(total)) if what != "computed" else total, weight, 1e-5)
        mx.eval(expected)
        mm.stats(reset=True)
        with mm.patched():
            total = draw()
            others = total[1:] if isinstance(total, tuple) else ()
            total = total[0] if others else total
            y = mx.fast.rms_norm(total, weight, 1e-5)
            mx.eval(y, others)
        assert launched() == {"rms_norm": 1}, what
        assert_near(y, expected, what, SUM)


@pytest.mark.parametrize("transform", [mx.compile, mx.vmap, mx.grad], ids=["compile", "vmap", "grad"])
def test_a_sum_outlives_the_trace_of_its_norms_weight(rng, transform):
    """It is the caller's, and a trace's weight is a placeholder."""
    x, residual, weights = normal(rng, 3, 64), normal(rng, 3, 64), normal(rng, 4, 64)
    weight = weights if transform is mx.vmap else weights[0]

    def run():
        total = x + residual
        norm = lambda w: mx.fast.rms_norm(total, w, 1e-5)
        f = transform((lambda w: norm(w).sum()) if transform is mx.grad else norm)
        return evaluated([f(weight), total, f(weight + 1)])

    expected = run()
    with mm.patched():
        for i, (a, b) in enumerate(zip(run(), expected, strict=True)):
            assert_near(a, b, f"result {i}", SUMS)


def test_a_sum_and_its_norm_under_transformations(rng):
    x, residual, weight = normal(rng, 3, 64), normal(rng, 3, 64), normal(rng, 64)

    def f(x):
        total = x + residual
        return (mx.fast.rms_norm(total, weight, 1e-5) * total).sum()

    runs = {
        "grad": lambda: mx.grad(f)(x),
        "compile": lambda: mx.compile(f)(x),
        "jvp": lambda: mx.jvp(f, [x], [x + 1])[1][0],
        "vmap": lambda: mx.vmap(f)(x),
        "grad of compile": lambda: mx.grad(mx.compile(f))(x),
    }
    expected = evaluated({name: run() for name, run in runs.items()})
    with mm.patched():
        for name, run in runs.items():
            assert_near(run(), expected[name], name, SUMS)


class Layer:
    """The part of a decoder layer before attention: heads of one input, perhaps normed, and how they are turned."""

    def __init__(self, rng, dtype=mx.float32, tokens=1, batch=1, norms=False, **turn):
        self.x = evaluated(normal(rng, batch, tokens, 32, dtype=dtype))
        self.weights = evaluated([normal(rng, n * WIDTH, 32, dtype=dtype) / 6 for n in (HEADS, KEY_HEADS, KEY_HEADS)])
        self.norms = evaluated([1 + normal(rng, WIDTH, dtype=dtype) / 4 for _ in range(2)]) if norms else None
        self.turn = {"dims": WIDTH, "traditional": False, "base": 1e4, "scale": 1.0, "freqs": None, **turn}
        self.state = evaluated([normal(rng, batch, KEY_HEADS, 24, WIDTH, dtype=dtype) for _ in range(2)])
        self.cache = self.fresh_cache()

    def fresh_cache(self) -> KVCache:
        cache = KVCache()
        cache.keys, cache.values = (mx.array(np.array(a.astype(mx.float32))).astype(a.dtype) for a in self.state)
        cache.offset = 5
        mx.eval(cache.keys, cache.values)
        mx.synchronize()  # work under way on a GPU still holds the buffers: an append would copy them
        return cache

    def heads(self):
        batch, tokens, _ = self.x.shape
        x = self.x * 1  # still to be computed
        heads = [(x @ w.T).reshape(batch, tokens, -1, WIDTH) for w in self.weights]
        if self.norms:
            heads[:2] = [mx.fast.rms_norm(h, w, 1e-5) for h, w in zip(heads, self.norms)]
        return [h.transpose(0, 2, 1, 3) for h in heads]

    def rope(self, x, offset=None):
        return mx.fast.rope(x, **{"offset": self.cache.offset if offset is None else offset, **self.turn})

    def run(self):
        """The turned queries, the keys and values seen, and the whole buffers."""
        self.cache = self.fresh_cache()
        queries, keys, values = self.heads()
        queries, keys = self.rope(queries), self.rope(keys)
        return [queries, *self.cache.update_and_fetch(keys, values), self.cache.keys, self.cache.values]


FREQS = mx.exp(mx.arange(WIDTH // 2) / 4)

TURNS = {
    "plain": {},
    "tokens": {"tokens": 7},
    "batch": {"batch": 3, "tokens": 2},
    "part of a head": {"dims": 48},
    "frequencies": {"base": None, "freqs": FREQS},
    "scaled": {"scale": 0.25},
    "traditional": {"traditional": True, "tokens": 3},
    "a position in an array": {"offset": mx.array(5), "norms": True},
    "a position in an array, batch": {"offset": mx.array([5]), "batch": 3},
    "norms": {"norms": True},
    "norms, tokens": {"norms": True, "tokens": 5, "batch": 2},
}


@pytest.mark.parametrize("turn", list(TURNS))
def test_turning_and_appending_are_one_kernel(rng, executor, dtype, turn):
    layer = Layer(rng, dtype, **TURNS[turn])
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    with mm.patched(**dict.fromkeys(["cache", "linear", "rms_norm"], False)):
        expected = evaluated(layer.run())
    mx.set_default_device(before)
    mm.stats(reset=True)
    with mm.patched(linear=False):
        results = evaluated(layer.run())
    assert launched() == {"rope_append": 1}
    for what, a, b in zip(("queries", "keys", "values", "all keys", "all values"), results, expected, strict=True):
        assert a.dtype == b.dtype
        assert_near(a, b, what, of_layer(dtype))


def test_in_whatever_order_it_is_evaluated(rng):
    layer = Layer(rng)
    expected = evaluated(layer.run())
    with mm.patched(linear=False):
        for order in ((0, 1, 2, 3, 4), (4, 0), (2,), (3, 1), (0,)):
            results = layer.run()
            for i in order:
                assert_near(results[i], expected[i], f"result {i} in order {order}", SUM)
            for i, result in enumerate(results):
                assert_near(result, expected[i], f"result {i} after order {order}", SUM)


def test_the_buffers_are_updated_in_place(rng):
    layer = Layer(rng)
    with mm.patched(linear=False):
        results = evaluated(layer.run())
        place = np.asarray(memoryview(layer.cache.keys)).ctypes.data
        del results
        for _ in range(3):
            queries, keys, values = layer.heads()
            queries, keys = layer.rope(queries), layer.rope(keys)
            mx.eval(layer.cache.update_and_fetch(keys, values), queries)
            del queries, keys, values
            assert np.asarray(memoryview(layer.cache.keys)).ctypes.data == place


def assert_one_append(run):
    """A layer's results are the same as unpatched, by one kernel."""
    expected = evaluated(run())
    mm.stats(reset=True)
    with mm.patched(linear=False):
        results = evaluated(run())
    assert launched() == {"rope_append": 1}
    for i, (a, b) in enumerate(zip(results, expected, strict=True)):
        assert_near(a, b, f"result {i}", SUM)


@pytest.mark.parametrize("second", [KVCache, RotatingKVCache, QuantizedKVCache], ids=lambda kind: kind.__name__)
def test_keys_that_two_caches_take(lenient, rng, second):
    """The first one's append turns the queries; the second takes the keys as they are."""
    layer = Layer(rng)
    options = {"max_size": 16} if second is RotatingKVCache else {}

    def run():
        other = second(**options)
        mx.eval(other.update_and_fetch(*(mx.ones((1, KEY_HEADS, 5, WIDTH)) for _ in range(2))))
        layer.cache = layer.fresh_cache()
        queries, keys, values = layer.heads()
        queries, keys = layer.rope(queries), layer.rope(keys)
        return [
            queries,
            *layer.cache.update_and_fetch(keys, values),
            *(a for _, a in tree_flatten(other.update_and_fetch(keys, values))),
        ]

    assert_one_append(run)


def others(layer: Layer):
    """Layers that turn otherwise, by the difference."""

    def run(heads=layer.heads, before=lambda *turned: None, rope=(layer.rope, layer.rope), values=lambda v, q, k: v):
        def go():
            layer.cache = layer.fresh_cache()
            queries, keys, fresh = heads()
            queries, keys = (turn(a) for turn, a in zip(rope, (queries, keys)))
            before(queries, keys)
            return [queries, *layer.cache.update_and_fetch(keys, values(fresh, queries, keys)), layer.cache.keys]

        return go

    def keys_of_queries():
        queries, keys, values = layer.heads()
        return queries, layer.rope(queries)[:, :KEY_HEADS] + keys, values

    def buffer_of_queries():
        layer.cache = layer.fresh_cache()
        queries, keys, values = layer.heads()
        queries, keys = layer.rope(queries), layer.rope(keys)
        layer.cache.keys = layer.cache.keys + queries[:, :1, :1]
        return [queries, *layer.cache.update_and_fetch(keys, values), layer.cache.keys]

    def turned_otherwise(**turn):
        return lambda x: mx.fast.rope(x, **{**layer.turn, "offset": 5, **turn})

    return {
        "queries computed": run(before=lambda q, k: mx.eval(q)),
        "keys computed": run(before=lambda q, k: mx.eval(k)),
        "values of the queries": run(values=lambda v, q, k: v + q[:, :KEY_HEADS]),
        "values of the keys": run(values=lambda v, q, k: v + k),
        "values of the queries, of heads computed": run(
            heads=lambda: evaluated(layer.heads()), values=lambda v, q, k: v + q[:, :KEY_HEADS]
        ),
        "keys of other queries": run(heads=keys_of_queries),
        "keys that are not turned": run(rope=(layer.rope, lambda k: k + 0)),
        "queries that are not turned": run(rope=(lambda q: q + 0, layer.rope)),
        "other positions": run(rope=(turned_otherwise(offset=4), layer.rope)),
        "another base": run(rope=(turned_otherwise(base=1e3), layer.rope)),
        "pairs of another kind": run(rope=(turned_otherwise(traditional=True), layer.rope)),
        "positions in two arrays": run(rope=[turned_otherwise(offset=mx.array(5)) for _ in range(2)]),
        "a buffer of the queries": buffer_of_queries,
        "wider queries": run(heads=lambda: [mx.concatenate([h, h], axis=-1) if i == 0 else h
                                            for i, h in enumerate(layer.heads())]),
    }  # fmt: skip


@pytest.mark.parametrize("what", list(others(Layer(np.random.default_rng(0)))))
def test_other_layers_stay_what_they_were(lenient, rng, what):
    layer = Layer(rng)
    run = others(layer)[what]
    expected = evaluated(run())
    mm.stats(reset=True)
    with mm.patched(linear=False):
        results = evaluated(run())
    if what != "keys of other queries":  # which those are tells the kernel apart from what must not be
        assert "rope_append" not in launched()
    for i, (a, b) in enumerate(zip(results, expected, strict=True)):
        assert_near(a, b, f"result {i}", SUM)


def test_a_buffer_may_be_still_to_be_computed(rng):
    layer = Layer(rng)

    def run():
        layer.cache = layer.fresh_cache()
        layer.cache.keys = layer.cache.keys + 0
        queries, keys, values = layer.heads()
        queries, keys = layer.rope(queries), layer.rope(keys)
        return [queries, *layer.cache.update_and_fetch(keys, values), layer.cache.keys]

    assert_one_append(run)


def test_turning_and_appending_under_transformations(rng):
    layer = Layer(rng)

    def f(x):
        layer.x = x
        queries, keys, values, *_ = layer.run()
        return (queries**2).sum() + (keys**3).sum() + (values**2).sum()

    x = layer.x
    runs = {
        "grad": lambda: mx.grad(f)(x),
        "compile": lambda: mx.compile(f)(x),
        "jvp": lambda: mx.jvp(f, [x], [x + 1])[1][0],
    }
    expected = evaluated({name: run() for name, run in runs.items()})
    with mm.patched(linear=False):
        for name, run in runs.items():
            assert_near(run(), expected[name], name, SUMS)


@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-0.6b"])
def test_a_models_token_is_so_many_kernels(rng, name):
    model = tiny.build(name, mx.float16, 4)
    with mm.patched():
        tiny.tokens(model, [1, 2, 3], 2)
        mm.stats(reset=True)
        list(tiny.tokens(model, [1, 2, 3], 12))
        longer = launched()
        list(tiny.tokens(model, [1, 2, 3], 11))
        shorter = launched()
    of_a_token = {op: longer[op] - shorter.get(op, 0) for op in longer}
    layers = model.args.num_hidden_layers
    assert of_a_token == {
        "quantized_embedding": 1,
        "rms_norm": 1,
        "add_rms_norm": 2 * layers,
        "quantized_matmul": 5 * layers + 1,
        "quantized_swiglu": layers,
        "rope_append": layers,
        "scaled_dot_product_attention": layers,
        "sample": 1,
    }
