"""A mixture from its router's logits on: the choice, views, gradients, parts that are ops of their own, bad input."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.support import launched_on_apple
from helpers.tolerances import LAYERS, ROUNDINGS, assert_near

import mlx_mittens as mm
from mlx_mittens import specs

OP = specs.get("mixture")
CASE = specs.Case("test", (2, 2, 3, 64, 32), {"group_size": 32, "bits": 4, "k": 2})
WORDS = range(2, 20)  # the arrays of the triples
SHARED_LOGITS = 20


def draw(rng, dtype=mx.float32, case=CASE):
    return OP.draw(rng, case, dtype)


def run(arrays, **options):
    return OP.ours(*arrays, **{**OP.arguments(CASE), **options})


@pytest.mark.parametrize("parts", ["shared", "bias", ""])
def test_a_token_is_two_launches(rng, parts):
    case = specs.Case("test", (1, 2, 3, 64, 32), {**CASE.options, "parts": parts})
    arrays = draw(rng, mx.float16, case)
    mx.eval([a for a in arrays if a is not None])
    launches = launched_on_apple(lambda: run(arrays, parts=parts))
    assert launches == ["mixture_swiglu_4bit_float16", "mixture_sum_4bit_float16"]


@pytest.mark.parametrize("more", [{}, {"precise": True, "groups": (8, 4), "dropped": -np.inf}, {"eps": 1e-3}])
@pytest.mark.parametrize("descending", [True, False])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid", "chosen", "sqrtsoftplus"])
def test_experts_are_those_that_route_top_k_chooses(rng, dtype, scores, descending, more):
    """Also with many ties, for every place of a token: each finds its expert by itself."""
    case = specs.Case("test", (3, 5, 40, 64, 32), {**CASE.options, "k": 5, "parts": ""})
    arrays = draw(rng, dtype, case)
    arrays[1] = mx.array(rng.integers(0, 4, (3, 40)) / 4).astype(dtype)
    bias = mx.array(rng.integers(0, 2, 40) / 4).astype(mx.float32)
    route = {"scores": scores, "descending": descending, "scale": 1.5, "renormalize": True, **more}
    triples = [arrays[i : i + 3] for i in (2, 5, 8)]
    with mm.simulator.enabled(gpu="m2-max"):
        y = mm.mixture(*arrays[:2], 5, *triples, None, None, None, None, 32, 4, router_bias=bias, **route)
        indices, weights = mm.route_top_k(arrays[1], 5, bias, **route)
        hidden = mm.gather_swiglu(arrays[0][:, None, None], *triples[:2], None, indices, 32, 4)
        expected = mm.gather_sum(hidden.squeeze(-2), *triples[2], indices, weights, group_size=32, bits=4)
        mx.eval(y, expected)
    np.testing.assert_array_equal(np.array(y.astype(mx.float32)), np.array(expected.astype(mx.float32)))


@pytest.mark.parametrize("fill", [mx.nan, mx.inf, -mx.inf])
def test_logits_that_are_not_finite_choose_experts_that_there_are(rng, executor, fill):
    """As route_top_k: a token's own result may be NaN, another's is not."""
    arrays = draw(rng)
    expected = np.array(run(arrays))
    arrays[1] = mx.concatenate([arrays[1][:1], mx.array([[fill, 0.5, fill]])])
    y = np.array(run(arrays))
    np.testing.assert_array_equal(y[0], expected[0])
    arrays[1] = mx.full((2, 3), fill)
    mx.eval(run(arrays))


@pytest.mark.parametrize("tokens", [0, 1])
def test_no_tokens_and_no_hidden(rng, executor, tokens):
    arrays = draw(rng, mx.float32, specs.Case("test", (max(tokens, 1), 2, 3, 64, 32), CASE.options))
    arrays = [a[:tokens] if i in (0, 1, SHARED_LOGITS) and a is not None else a for i, a in enumerate(arrays)]
    assert run(arrays).shape == (tokens, 64)
    mx.eval(run(arrays))


def test_views_of_stacks(rng, executor):
    """Every other expert, and rows of a shared expert that lie apart."""
    arrays = draw(rng)
    twice = [mx.repeat(a, 2, 0)[::2] if i in WORDS and a.ndim == 3 else a for i, a in enumerate(arrays)]
    padded = [
        mx.pad(a, [(0, 0), (0, a.shape[-1])])[:, : a.shape[-1]] if i in range(11, 20) else a
        for i, a in enumerate(twice)
    ]
    assert_near(run(padded), run(arrays), "views", ROUNDINGS)


def test_gradients_vmap_and_compile(rng, native):
    arrays = draw(rng)
    of = lambda x, logits, shared: [x, logits, *arrays[2:SHARED_LOGITS], shared, *arrays[SHARED_LOGITS + 1 :]]
    ours = lambda *given: run(of(*given), renormalize=True)
    plain = lambda *given: OP.twin(*of(*given), **OP.arguments(CASE), renormalize=True)
    primals = [arrays[0], arrays[1], arrays[SHARED_LOGITS]]
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
    case = specs.Case("test", (1, 2, 3, 64, 32), {**CASE.options, "bits": 6})
    arrays = draw(rng, mx.float32, case)
    with mm.simulator.enabled(gpu="m2-max"):
        mm.stats(reset=True)
        y = OP.ours(*arrays, **OP.arguments(case))
        mx.eval(y)
        assert "mixture" not in mm.stats() and {"gather_qmm", "route_top_k"} <= set(mm.stats())
    (exact,) = OP.exact(case, arrays)
    assert_near(y, exact.value, "6 bits", LAYERS)


def test_bad_input(rng):
    arrays = draw(rng)

    def fails(text, error=ValueError, **changes):
        given = [changes.get(name, a) for (name, _), a in zip(OP.parameters, arrays, strict=True)]
        with pytest.raises(error, match=rf"\[mixture\] {text}"):
            run(given)

    fails(r"logits has shape \(3,3\), x has shape \(2,64\)", logits=mx.zeros((3, 3)))
    fails("logits has dtype int32", mm.DtypeError, logits=mx.zeros((2, 3), mx.int32))
    fails("logits has 4 columns, gate has 3 experts: expected a logit for each", logits=mx.zeros((2, 4)))
    fails(r"shared_logits has shape \(2,2\): expected \(2\) or \(2,1\)", shared_logits=mx.zeros((2, 2)))
    fails(r"up's w has shape \(3,16,8\): expected \(3,32,8\)", up=arrays[5][:, :16])
    fails(r"shared_gate's w has shape \(16,8\): expected \(32,8\)", shared_gate=arrays[11][:16])
    fails(r"gate's w has shape \(32,8\): expected \[experts, outputs, words\]", gate=arrays[2][0])
    for options, text in (
        ({"k": 4}, "k is 4, logits has 3 columns"),
        ({"scores": "tanh"}, "scores is 'tanh': expected softmax, sigmoid, chosen or sqrtsoftplus"),
        ({"scale": mx.inf}, "scale is inf: expected a finite number"),
    ):
        with pytest.raises(ValueError, match=rf"\[mixture\] {text}"):
            run(arrays, **options)
    triples = [arrays[i : i + 3] for i in (2, 5, 8)]
    x, logits = arrays[:2]
    with pytest.raises(ValueError, match="down has 2 arrays: mode affine expects 3, w, scales and biases"):
        mm.mixture(x, logits, 2, *triples[:2], triples[2][:2], group_size=32, bits=4)
    with pytest.raises(ValueError, match="expected all or none"):
        mm.mixture(x, logits, 2, *triples, arrays[11:14], group_size=32, bits=4)
    with pytest.raises(ValueError, match="bias has 1 arrays: expected those of gate, up and down"):
        mm.mixture(x, logits, 2, *triples, group_size=32, bits=4, bias=[mx.zeros((3, 32))])
    with pytest.raises(ValueError, match=r"down's bias has shape \(3,32\), w has shape \(3,64,4\)"):
        mm.mixture(x, logits, 2, *triples, group_size=32, bits=4, bias=[mx.zeros((3, 32))] * 3)
    with pytest.raises(ValueError, match=r"router_bias has shape \(2\): expected one dimension with 3 elements"):
        mm.mixture(x, logits, 2, *triples, group_size=32, bits=4, router_bias=mx.zeros((2,)))
