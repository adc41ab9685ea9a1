"""Chosen experts beside a shared one: indices, views, gradients, what goes to ops of its own, and bad input."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.support import launched_on_apple
from helpers.tolerances import LAYERS, ROUNDINGS, assert_near

import mlx_mittens as mm
from mlx_mittens import specs

OP = specs.get("mixture")
CASE = specs.Case("test", (2, 2, 3, 64, 32), {"group_size": 32, "bits": 4})


def draw(rng, dtype=mx.float32, case=CASE):
    return OP.draw(rng, case, dtype)


def run(arrays, **options):
    return OP.ours(*arrays, **{**OP.arguments(CASE), **options})


def test_a_token_is_two_launches(rng):
    arrays = draw(rng, mx.float16, specs.Case("test", (1, 2, 3, 64, 32), CASE.options))
    mx.eval(arrays)
    assert launched_on_apple(lambda: run(arrays)) == ["mixture_swiglu_4bit_float16", "mixture_sum_4bit_float16"]


@pytest.mark.parametrize("bad", [3, -1, 2**31 - 1])
def test_indices_out_of_range(rng, executor, bad):
    arrays = draw(rng)
    arrays[1] = mx.array([[0, 2], [bad, 1]])
    y = np.array(run(arrays))
    assert np.isfinite(y[0]).all() and np.isnan(y[1]).all()


def test_views_of_stacks(rng, executor):
    """Every other expert, and rows of a shared expert that lie apart."""
    arrays = draw(rng)
    twice = [mx.repeat(a, 2, 0)[::2] if i in range(3, 21) and a.ndim == 3 else a for i, a in enumerate(arrays)]
    padded = [
        mx.pad(a, [(0, 0), (0, a.shape[-1])])[:, : a.shape[-1]] if i in range(12, 21) else a
        for i, a in enumerate(twice)
    ]
    assert_near(run(padded), run(arrays), "views", ROUNDINGS)


def test_gradients_vmap_and_compile(rng, native):
    arrays = draw(rng)
    ours = lambda x, weights, logits: run([x, arrays[1], weights, *arrays[3:21], logits])
    plain = lambda x, weights, logits: OP.twin(x, arrays[1], weights, *arrays[3:21], logits, **OP.arguments(CASE))
    primals = [arrays[0], arrays[2], arrays[21]]
    cotangent = mx.array(rng.normal(size=(2, 64)).astype(np.float32))
    for a, b in zip(mx.vjp(ours, primals, [cotangent])[1], mx.vjp(plain, primals, [cotangent])[1], strict=True):
        assert_near(a, b, "gradient", LAYERS)
    mapped = mx.vmap(lambda x: ours(x, *primals[1:]))(mx.stack([primals[0], 2 * primals[0]]))
    assert_near(mapped[1], ours(2 * primals[0], *primals[1:]), "vmap", LAYERS)
    assert_near(mx.compile(ours)(*primals), ours(*primals), "compile", LAYERS)


def test_gradients_through_the_kernels(rng):
    arrays = draw(rng)
    loss = lambda x: (run([x, *arrays[1:]]) ** 2).sum()
    expected = mx.grad(loss)(arrays[0])
    mx.eval(expected)
    with mm.simulator.enabled(gpu="m2-max"):
        assert_near(mx.grad(loss)(arrays[0]), expected, "gradient", LAYERS)


def test_formats_without_kernels_are_ops_of_their_own(rng, lenient):
    case = specs.Case("test", (1, 2, 3, 64, 32), {"group_size": 32, "bits": 6})
    arrays = draw(rng, mx.float32, case)
    with mm.simulator.enabled(gpu="m2-max"):
        mm.stats(reset=True)
        y = OP.ours(*arrays, **OP.arguments(case))
        mx.eval(y)
        assert "mixture" not in mm.stats() and "gather_qmm" in mm.stats()
    (exact,) = OP.exact(case, arrays)
    assert_near(y, exact.value, "6 bits", LAYERS)


def test_bad_input(rng):
    arrays = draw(rng)

    def fails(text, error=ValueError, **changes):
        given = [changes.get(name, a) for (name, _), a in zip(OP.parameters, arrays, strict=True)]
        with pytest.raises(error, match=rf"\[mixture\] {text}"):
            run(given)

    fails(r"indices has shape \(3,2\), x has shape \(2,64\)", indices=mx.zeros((3, 2), mx.uint32))
    fails("indices has dtype float32: expected integers", mm.DtypeError, indices=mx.zeros((2, 2)))
    fails(r"weights has shape \(2,3\), indices has shape \(2,2\)", weights=mx.zeros((2, 3)))
    fails(r"shared_logits has shape \(2,2\): expected \(2\) or \(2,1\)", shared_logits=mx.zeros((2, 2)))
    fails(r"up's w has shape \(3,16,8\): expected \(3,32,8\)", up=arrays[6][:, :16])
    fails(r"shared_gate's w has shape \(16,8\): expected \(32,8\)", shared_gate=arrays[12][:16])
    fails(r"gate's w has shape \(32,8\): expected \[experts, outputs, words\]", gate=arrays[3][0])
    with pytest.raises(ValueError, match="down has 2 arrays: mode affine expects 3, w, scales and biases"):
        mm.mixture(*arrays[:3], *[arrays[3:6]] * 2, arrays[9:11], *[arrays[12:15]] * 3, arrays[21], 32, 4)
