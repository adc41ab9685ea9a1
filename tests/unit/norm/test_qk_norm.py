"""Promises of qk_norm alone: heads of other numbers, where they lie."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.support import as_list, assert_same_bits
from helpers.tolerances import assert_near

import mlx_mittens as mm


def heads(rng, dtype, batch=2, tokens=3, queries=4, keys=2, width=64):
    """Queries and keys as parts of one product, [batch, tokens, heads, width]."""
    product = mx.array(rng.standard_normal((batch, tokens, (queries + 2 * keys) * width)).astype(np.float32))
    parts = product.astype(dtype).reshape(batch, tokens, queries + 2 * keys, width)
    weights = [mx.array((rng.standard_normal(width) / 4).astype(np.float32)).astype(dtype) for _ in "qk"]
    return parts[:, :, :queries], parts[:, :, queries : queries + keys], *weights


VIEWS = {
    "by tokens": lambda a: a,
    "by heads": lambda a: a.transpose(0, 2, 1, 3),
    "one batch": lambda a: a[0],
    "every other token": lambda a: a[:, ::2],
    "reversed": lambda a: a[:, ::-1],
    "broadcast": lambda a: mx.broadcast_to(a[:, :1], a.shape),
    "more axes": lambda a: a[:, None].transpose(3, 0, 2, 1, 4),
}


@pytest.mark.parametrize("view", list(VIEWS))
@pytest.mark.parametrize("width", [64, 33])
def test_is_two_norms_of_heads_where_they_lie(dtype, executor, rng, width, view):
    queries, keys, *weights = heads(rng, dtype, width=width)
    queries, keys = VIEWS[view](queries), VIEWS[view](keys)
    results = mm.qk_norm(queries, keys, *weights, 1e-6, weight_offset=1.0)
    for a, b, weight in zip(results, (queries, keys), weights, strict=True):
        assert a.shape == b.shape and a.dtype == dtype
        assert_near(a, mm.rms_norm(b, weight, 1e-6, weight_offset=1.0), "norm", 2 * _unit(dtype))


def _unit(dtype):
    return {mx.float32: 2.0**-23, mx.float16: 2.0**-10, mx.bfloat16: 2.0**-7}[dtype]


def test_nothing_is_copied(counted, rng):
    """One launch, which reads each head once where the projection left it."""
    queries, keys, *weights = heads(rng, mx.float16, tokens=8, width=128)
    mx.eval(queries, keys, weights)
    move = lambda a: a.transpose(0, 2, 1, 3)
    (launch,) = counted(lambda: mm.qk_norm(move(queries), move(keys), *weights, 1e-6))
    assert launch["device_bytes_stored"] == queries.nbytes + keys.nbytes
    rows = (queries.size + keys.size) // 128
    assert launch["device_bytes_loaded"] == queries.nbytes + keys.nbytes + rows * 256  # and a weight for each row


@pytest.mark.parametrize("absent", [(), (0,), (1,), (0, 1)])
def test_weights_that_are_absent(executor, rng, absent):
    queries, keys, *weights = heads(rng, mx.float32)
    weights = [None if i in absent else weight for i, weight in enumerate(weights)]
    offset = 1.0 if len(absent) < 2 else 0.0
    norms = lambda *heads: mm.qk_norm(*heads, *weights, 1e-6, weight_offset=offset)
    results = norms(queries, keys)
    cotangents = list(map(mx.sin, results))
    gradients = mx.vjp(norms, [queries, keys], cotangents)[1]
    for i, (x, weight) in enumerate(zip((queries, keys), weights, strict=True)):
        norm = lambda x: mm.rms_norm(x, weight, 1e-6, weight_offset=offset if weight is not None else 0.0)
        assert_near(results[i], norm(x), "norm")
        assert_near(gradients[i], mx.vjp(norm, [x], [cotangents[i]])[1][0], "gradient")


def test_empty_heads(executor, rng):
    queries, keys, *weights = heads(rng, mx.float32)
    for some, others in ((queries, keys[:, :0]), (queries[:0], keys), (queries[:, :, :0], keys)):
        results = mm.qk_norm(some, others, *weights, 1e-6)
        assert [a.shape for a in results] == [some.shape, others.shape]
        for a, b, weight in zip(results, (some, others), weights):
            assert_same_bits(a, mm.rms_norm(b, weight, 1e-6), "norm")


@pytest.mark.parametrize("argnums", [(0,), (1,), (2,), (3,), (1, 2)])
def test_gradients_of_some_arguments(native, rng, argnums):
    arrays = heads(rng, mx.float32)

    def total(*arrays):
        queries, keys = mm.qk_norm(*arrays, 1e-6, weight_offset=1.0)
        return mx.sin(queries).sum() + mx.cos(keys).sum()

    every = mx.grad(total, argnums=(0, 1, 2, 3))(*arrays)
    for argnum, gradient in zip(argnums, as_list(mx.grad(total, argnums=argnums)(*arrays)), strict=True):
        assert_same_bits(gradient, every[argnum], f"argument {argnum}")


def test_widths_that_differ(native):
    with pytest.raises(ValueError, match=r"queries has heads of width 8, keys of width 4: expected the same width"):
        mm.qk_norm(mx.ones((2, 8)), mx.ones((2, 4)), None, None, 1e-5)
