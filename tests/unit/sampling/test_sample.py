"""Promises of sample alone."""

import math

import mlx.core as mx
import numpy as np
import pytest
from helpers.tolerances import ROUNDINGS, units

import mlx_mittens as mm
from mlx_mittens import specs
from mlx_mittens.specs import sampling

OPTIONS = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "hot": {"temperature": 2.5},
    "top-k": {"top_k": 7},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.05, "temperature": 1.5},
    "all": {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "min_p": 0.01},
}


def draw(rng, *shape: int, dtype=mx.float32) -> mx.array:
    return mx.array(3 * rng.standard_normal(shape).astype(np.float32)).astype(dtype)


def test_numbers_of_the_reference_are_those_of_mx():
    """It has a Threefry of its own."""
    for size in (1, 2, 3, 10, 11):
        bits = sampling.random_bits(np.array(mx.random.key(5)), size)
        uniform = np.array(mx.random.uniform(shape=(size,), key=mx.random.key(5)))
        np.testing.assert_array_equal(np.minimum(bits.astype(np.float32) * 2.0**-32, 1 - 2.0**-24), uniform)


@pytest.mark.parametrize("shape", [(1,), (2,), (5,), (64,), (3, 33), (2, 3, 20), (7, 515), (2, 9001)], ids=str)
def test_the_tokens_of_mx(executor, rng, shape):
    """A key draws the same as in mx.random.categorical, which takes another way for a single row."""
    logits, key = draw(rng, *shape), mx.array(rng.integers(0, 2**32, 2, dtype=np.uint32))
    for temperature in (1.0, 0.5):
        tokens = mm.sample(logits, key, temperature=temperature)
        with mx.stream(mx.cpu):
            expected = mx.argmax(logits * (1 / temperature) + mx.random.gumbel(shape, key=key), axis=-1)
            if len(shape) > 1 and shape[0] > 1:
                twin = mx.random.categorical(logits * (1 / temperature), key=key)
                np.testing.assert_array_equal(np.array(twin), np.array(expected))
        assert tokens.dtype == mx.uint32
        np.testing.assert_array_equal(np.array(tokens), np.array(expected))


def test_the_state_of_mx(executor, rng):
    """Without a key it uses the state of mx.random, which advances as by one number of mx's."""
    logits = draw(rng, 4, 50)
    mx.random.seed(11)
    expected = [np.array(mx.random.categorical(logits, stream=mx.cpu)) for _ in range(3)] + [mx.random.uniform()]
    mx.random.seed(11)
    for a, b in zip([np.array(mm.sample(logits)) for _ in range(3)] + [mx.random.uniform()], expected, strict=True):
        np.testing.assert_array_equal(np.array(a), np.array(b))


def test_greedy_sampling_leaves_the_state(native):
    mx.random.seed(3)
    before = np.array(mx.random.state[0])
    mx.eval(mm.sample(mx.zeros((2, 5)), temperature=0.0))
    np.testing.assert_array_equal(np.array(mx.random.state[0]), before)


def test_the_same_tokens_natively_and_by_kernels(dtype, rng):
    for what, options in OPTIONS.items():
        for shape in ((3, 40), (2, 2100), (1, 9003)):
            logits, key = draw(rng, *shape, dtype=dtype), mx.random.key(int(rng.integers(2**31)))
            with mx.stream(mx.cpu):
                native = np.array(mm.sample(logits, key, **options))
                with mm.simulator.enabled(seed=int(rng.integers(1, 2**31))):
                    np.testing.assert_array_equal(
                        np.array(mm.sample(logits, key, **options)), native, f"{what} {shape}"
                    )


@pytest.fixture
def uncompiled():
    """mx.compile compiles nothing: on a CPU each of mlx-lm's filters would take seconds."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def kept_by(logits: mx.array, draws: int, **filters) -> np.ndarray:
    """Which logits of a row are ever drawn where all that are kept are equally probable."""
    rows = mx.broadcast_to(logits, (draws, logits.size))
    seen = np.zeros(logits.size, bool)
    seen[np.array(mm.sample(rows, mx.random.key(1), temperature=1e6, **filters))] = True
    return seen


FILTERS = {
    "top_p": [0.1, 0.5, 0.9, 0.99],
    "min_p": [0.01, 0.1, 0.5, 1.0],
    "top_k": [1, 2, 9, 23],
}


@pytest.mark.parametrize("name", FILTERS)
def test_keeps_what_mlx_lm_keeps(dtype, executor, uncompiled, rng, name):
    """Logits in half types have equal ones among them; of these top-k keeps the first."""
    sample_utils = pytest.importorskip("mlx_lm.sample_utils")
    apply = getattr(sample_utils, f"apply_{name}")
    simulated = executor == "simulator"
    for value in FILTERS[name][1:3] if simulated else FILTERS[name]:
        logits = mx.round(draw(rng, 24) * 4) / 4 if value in (0.5, 9) else draw(rng, 24)
        logprobs = (logits - mx.logsumexp(logits)).astype(dtype)
        with mx.stream(mx.cpu):
            expected = np.isfinite(np.array(apply(logprobs[None], value)[0].astype(mx.float32)))
        found = kept_by(logprobs, 200 if simulated else 400, **{name: value})
        np.testing.assert_array_equal(found, expected, f"{name}={value}")


def test_keeps_what_mlx_lm_keeps_of_large_vocabularies(native, uncompiled, rng):
    """The tokens are as from mlx-lm's filters, which sort."""
    sample_utils = pytest.importorskip("mlx_lm.sample_utils")
    logits = sampling.SAMPLE_OPS[0].draw(rng, specs.Case("", (3, 151936)), mx.float32)[0]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    for top_k, top_p, min_p in ((50, 0.0, 0.0), (0, 0.9, 0.0), (0, 0.0, 0.05), (3000, 0.99, 0.001), (20, 0.6, 0.02)):
        key = mx.random.key(int(rng.integers(2**31)))
        x = sample_utils.apply_top_p(logprobs, top_p) if top_p else logprobs
        x = sample_utils.apply_min_p(x, min_p) if min_p else x
        x = sample_utils.apply_top_k(x, top_k) if top_k else x
        expected = mx.random.categorical(x * (1 / 1.5), key=key)
        tokens = mm.sample(logprobs, key, temperature=1.5, top_k=top_k, top_p=top_p, min_p=min_p)
        np.testing.assert_array_equal(np.array(tokens), np.array(expected), f"{top_k} {top_p} {min_p}")


# Of the chi-square distribution at 0.999, by degrees of freedom.
QUANTILES = (0, 10.8, 13.8, 16.3, 18.5, 20.5, 22.5, 24.3, 26.1, 27.9, 29.6, 31.3)


def chi_square(counts: np.ndarray, p: np.ndarray) -> float:
    expected = counts.sum() * p[p > 0]
    assert not counts[p == 0].any()
    return float(((counts[p > 0] - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("what", [name for name in OPTIONS if name != "greedy"])
def test_distribution(executor, rng, what):
    """By a chi-square test of 1 in 1,000, with a fixed key."""
    draws, options = (600 if executor == "simulator" else 20000), OPTIONS[what]
    logits = mx.array(np.linspace(0, 3, 12, dtype=np.float32))
    x = specs.widen(logits)
    scaled = np.where(sampling.kept(x, mx.float32, options), x / options.get("temperature", 1.0), -np.inf)
    p = np.exp(scaled - scaled.max())
    tokens = mm.sample(mx.broadcast_to(logits, (draws, 12)), mx.random.key(17), **options)
    counts = np.bincount(np.array(tokens), minlength=12)
    assert chi_square(counts, p / p.sum()) < QUANTILES[int((p > 0).sum()) - 1]


@pytest.mark.parametrize("what", OPTIONS)
def test_logprobs(dtype, executor, rng, what):
    """Of the softmax of all logits, whatever was kept."""
    for shape in ((3, 50), (1, 9001)):
        logits = draw(rng, *shape, dtype=dtype)
        tokens, logprobs = mm.sample(logits, mx.random.key(2), logprobs=True, **OPTIONS[what])
        x = specs.widen(logits)
        exact = x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)
        exact = np.take_along_axis(exact, np.array(tokens)[..., None].astype(int), -1)[..., 0]
        assert logprobs.dtype == mx.float32
        np.testing.assert_allclose(np.array(logprobs), exact, rtol=ROUNDINGS, atol=ROUNDINGS)


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)) - x.max(-1, keepdims=True)


@pytest.mark.parametrize("what", OPTIONS)
def test_logprobs_of_all_logits(dtype, executor, rng, what):
    """Beside the tokens that are drawn without them; rows of one threadgroup and of several, and off any boundary."""
    for shape in ((50,), (3, 1), (2, 3, 67), (1, 9001)):
        logits, key = draw(rng, *shape, dtype=dtype), mx.random.key(2)
        tokens, logprobs = mm.sample(logits, key, logprobs="all", **OPTIONS[what])
        np.testing.assert_array_equal(np.array(tokens), np.array(mm.sample(logits, key, **OPTIONS[what])))
        assert logprobs.shape == logits.shape and logprobs.dtype == dtype
        exact = log_softmax(specs.widen(logits))
        near = max(ROUNDINGS, units(1, dtype))
        np.testing.assert_allclose(specs.widen(logprobs), exact, rtol=near, atol=ROUNDINGS)


def test_logprobs_of_all_special_logits(dtype, executor):
    nan, inf = math.nan, math.inf
    rows = [
        ([nan] * 6, [-inf] * 6),
        ([nan] * 6, [0, nan, -inf, 1, 2, 1]),
        ([-inf, -inf, -inf, nan, -inf, -inf], [0, 1, -inf, inf, 2, 1]),
        ([-inf, 0, -inf, -inf, -inf, -inf], [-inf, 7, -inf, -inf, -inf, -inf]),
    ]
    for expected, row in rows:
        logits = mx.array([row], dtype=dtype)
        for options in OPTIONS.values():
            _, logprobs = mm.sample(logits, mx.random.key(0), logprobs="all", **options)
            np.testing.assert_array_equal(specs.widen(logprobs), [expected], f"{row} {options}")
        with mx.stream(mx.cpu):
            np.testing.assert_array_equal(specs.widen(logits - mx.logsumexp(logits)), [expected])


def test_logprobs_of_all_views(dtype, executor, rng):
    whole, key = draw(rng, 9, 67, dtype=dtype), mx.random.key(4)
    for view in (whole[1:, :], whole[:, 1:], whole.T, whole[::2, ::3]):
        copy = mx.array(np.array(view.astype(mx.float32))).astype(dtype)
        for a, b in zip(mm.sample(view, key, logprobs="all"), mm.sample(copy, key, logprobs="all"), strict=True):
            np.testing.assert_array_equal(specs.widen(a), specs.widen(b))


def test_special_logits(dtype, executor):
    nan, inf = math.nan, math.inf
    rows = [
        (0, nan, [-inf] * 6),
        (0, nan, [nan] * 6),
        (3, nan, [0, nan, -inf, inf, inf, 1]),
        (1, 0, [nan, 2, nan, -inf, nan, -inf]),
        (5, 0, [-inf] * 5 + [-1e4]),
    ]
    for token, logprob, row in rows:
        for options in OPTIONS.values():
            drawn = mm.sample(mx.array([row], dtype=dtype), mx.random.key(0), logprobs=True, **options)
            assert [a.item() for a in drawn] == pytest.approx([token, logprob], nan_ok=True), (row, options)


def test_special_logits_stay_in_their_row(dtype, executor, rng):
    logits, key = draw(rng, 4, 700, dtype=dtype), mx.random.key(6)
    for options in OPTIONS.values():
        clean = np.array(mm.sample(logits, key, **options))
        for value in (math.nan, math.inf):
            changed = mx.array(logits)
            changed[2] = value
            tokens = np.array(mm.sample(changed, key, **options))
            np.testing.assert_array_equal(tokens[[0, 1, 3]], clean[[0, 1, 3]])


def test_equal_logits(dtype, executor):
    """Greedy sampling gives the first; zeros of both signs are equal."""
    assert mm.sample(mx.array([-1.0, 3, 0, 3, 3], dtype=dtype), temperature=0.0).item() == 1
    assert mm.sample(mx.array([-1.0, -0.0, 0.0], dtype=dtype), temperature=0.0).item() == 1
    zeros = mx.array([0.0, -0.0, 0.0, -1.0], dtype=dtype)
    assert np.flatnonzero(kept_by(zeros, 200, top_k=2)).tolist() == [0, 1]
    assert np.flatnonzero(kept_by(zeros, 200, top_p=0.1)).tolist() == [0, 1, 2]


def test_all_logits_equal(executor):
    """A threshold that all of a vocabulary share, which has no room in threadgroup memory."""
    for size in (50, 3000):
        for options in ({"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}):
            tokens = np.array(mm.sample(mx.zeros((9, size)), mx.random.key(3), **options))
            assert (tokens < (3 if "top_k" in options else size)).all()
            expected = mx.random.categorical(mx.zeros((9, size)), key=mx.random.key(3), stream=mx.cpu)
            if "top_k" not in options:
                np.testing.assert_array_equal(tokens, np.array(expected))


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5)], ids=str)
def test_no_rows(executor, shape):
    for options in OPTIONS.values():
        assert mm.sample(mx.zeros(shape), **options).shape == shape[:-1]
        assert [a.shape for a in mm.sample(mx.zeros(shape), logprobs=True, **options)] == [shape[:-1]] * 2
        assert [a.shape for a in mm.sample(mx.zeros(shape), logprobs="all", **options)] == [shape[:-1], shape]


def test_more_to_keep_than_there_is(executor, rng):
    logits, key = draw(rng, 3, 20), mx.random.key(9)
    for options in ({"top_k": 20}, {"top_k": 10**6}, {"top_p": 1.0}):
        np.testing.assert_array_equal(np.array(mm.sample(logits, key, **options)), np.array(mm.sample(logits, key)))


def test_views(dtype, executor, rng):
    whole, key = draw(rng, 9, 67, dtype=dtype), mx.random.key(4)
    for view in (whole[1:, :], whole[:, 1:], whole.T, whole[::2, ::3], mx.broadcast_to(whole[:1], (5, 67))):
        copy = mx.array(np.array(view.astype(mx.float32))).astype(dtype)
        for options in OPTIONS.values():
            tokens = mm.sample(view, key, **options)
            np.testing.assert_array_equal(np.array(tokens), np.array(mm.sample(copy, key, **options)))


def test_compiled_with_the_state(native, rng):
    logits = draw(rng, 3, 40)
    mx.random.seed(8)
    expected = [np.array(mm.sample(logits, top_k=9)) for _ in range(3)]
    step = mx.compile(lambda x: mm.sample(x, top_k=9), inputs=mx.random.state, outputs=mx.random.state)
    mx.random.seed(8)
    for tokens in expected:
        np.testing.assert_array_equal(np.array(step(logits)), tokens)


def test_vmap_and_gradients(native, rng):
    logits = draw(rng, 3, 40)
    tokens = mx.vmap(lambda x: mm.sample(x, temperature=0.0))(logits)
    np.testing.assert_array_equal(np.array(tokens), np.argmax(np.array(logits), -1))
    slope = mx.grad(lambda x: mm.sample(x, mx.random.key(0), logprobs=True)[1].sum())(logits)
    drawn = np.eye(40)[np.array(mm.sample(logits, mx.random.key(0)))]
    np.testing.assert_allclose(np.array(slope), drawn - np.array(mx.softmax(logits, -1)), atol=ROUNDINGS)
    weights = draw(rng, 3, 40)
    slope = mx.grad(lambda x: (weights * mm.sample(x, mx.random.key(0), logprobs="all")[1]).sum())(logits)
    expected = mx.grad(lambda x: (weights * (x - mx.logsumexp(x, axis=-1, keepdims=True))).sum())(logits)
    np.testing.assert_allclose(np.array(slope), np.array(expected), atol=40 * ROUNDINGS)
    each = mx.vmap(lambda x: mm.sample(x, temperature=0.0, logprobs="all")[1])(logits)
    np.testing.assert_allclose(np.array(each), log_softmax(specs.widen(logits)), rtol=ROUNDINGS, atol=ROUNDINGS)


BAD = {
    r'logprobs is "some": expected True, False or "all"': (lambda: mm.sample(mx.zeros(3), logprobs="some"), ValueError),
    r"logits has no dimensions": (lambda: mm.sample(mx.array(1.0)), ValueError),
    r"logits has shape \(2,0\): expected at least one": (lambda: mm.sample(mx.zeros((2, 0))), ValueError),
    r"temperature is -1: expected 0 or a positive": (lambda: mm.sample(mx.zeros(3), temperature=-1), ValueError),
    r"temperature is nan": (lambda: mm.sample(mx.zeros(3), temperature=math.nan), ValueError),
    r"top_k is -1: expected a positive number, or 0": (lambda: mm.sample(mx.zeros(3), top_k=-1), ValueError),
    r"top_p is 1.5: expected a number from 0 to 1": (lambda: mm.sample(mx.zeros(3), top_p=1.5), ValueError),
    r"min_p is nan: expected a number from 0 to 1": (lambda: mm.sample(mx.zeros(3), min_p=math.nan), ValueError),
    r"key has shape \(3\): expected \(2\)": (lambda: mm.sample(mx.zeros(3), mx.zeros(3, mx.uint32)), ValueError),
    r"key has dtype float32: expected uint32": (lambda: mm.sample(mx.zeros(3), mx.zeros(2)), mm.DtypeError),
    r"logits has dtype int32": (lambda: mm.sample(mx.zeros(3, mx.int32)), mm.DtypeError),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(native, message):
    call, error = BAD[message]
    with pytest.raises(error, match=rf"\[sample\] {message}"):
        call()


def test_what_goes_to_mx(lenient, native):
    assert mm.sample(mx.array([0.0, 5, 1]).astype(mx.float64), temperature=0.0, stream=mx.cpu).item() == 1
    logits = mx.zeros((1, 2**20))
    for all_of_them in (mm.sample(logits, mx.random.key(1), logprobs="all")[1], mx.log(mx.softmax(logits, -1))):
        np.testing.assert_allclose(np.array(all_of_them), -20 * math.log(2), rtol=ROUNDINGS)
    tokens, logprobs = mm.sample(mx.zeros((1, 2**20)), mx.random.key(1), top_k=5, logprobs=True)
    assert tokens.item() < 5 and logprobs.item() == pytest.approx(-20 * math.log(2), rel=ROUNDINGS)


def test_no_rows_and_no_logits(executor):
    y = mm.sample(mx.zeros((0, 5)), temperature=0.0)
    mx.eval(y)
    assert y.shape == (0,)
    with pytest.raises(ValueError, match=r"\[sample\] logits has shape \(3,0\): expected at least one logit in a row"):
        mm.sample(mx.zeros((3, 0)), temperature=0.0)
