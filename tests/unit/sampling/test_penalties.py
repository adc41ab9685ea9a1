"""Penalties and masks of sample, beside mlx-lm's logits processors and float64."""

import itertools
import math

import mlx.core as mx
import numpy as np
import pytest
from helpers.tolerances import ROUNDINGS

import mlx_mittens as mm
from mlx_mittens import specs
from mlx_mittens.specs import sampling

PENALTIES = {
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 0.7},
    "frequency": {"frequency_penalty": 0.3},
    "all": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.15},
    "rewards": {"repetition_penalty": 0.6, "presence_penalty": -0.5, "frequency_penalty": -0.25},
}
OPTIONS = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "chat": {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "min_p": 0.01},
}
SHAPES = [(40,), (2, 3, 33), (3, 515), (1, 9003)]


def draw(rng, *shape: int, dtype=mx.float32) -> mx.array:
    return mx.array(3 * rng.standard_normal(shape).astype(np.float32)).astype(dtype)


def draw_tokens(rng, logits: mx.array, count: int, dtype=np.int32) -> mx.array:
    """The last tokens of each row: likely ones, some of them several times, and padding."""
    order = np.argsort(-specs.widen(logits), axis=-1)[..., : max(count // 2, 1)]
    places = rng.integers(0, order.shape[-1], (*logits.shape[:-1], count))
    tokens = np.take_along_axis(order, places, -1)
    padding = rng.choice([-1, -(2**31), logits.shape[-1], 2**31 - 1], tokens.shape)
    return mx.array(np.where(rng.random(tokens.shape) < 0.2, padding, tokens).astype(dtype))


def draw_mask(rng, logits: mx.array) -> mx.array:
    words = -(-logits.shape[-1] // 32)
    return mx.array(rng.integers(0, 2**32, (*logits.shape[:-1], words), dtype=np.uint32))


def as_logits(x: np.ndarray, dtype: mx.Dtype) -> mx.array:
    return mx.array(x.astype(np.float32)).astype(dtype)


def same(a, b, what="") -> None:
    for ours, expected in zip(*(r if isinstance(r, tuple) else (r,) for r in (a, b)), strict=True):
        assert ours.dtype == expected.dtype
        np.testing.assert_array_equal(specs.widen(ours), specs.widen(expected), what)


def processed(logits: mx.array, tokens: mx.array, **penalties: float) -> mx.array:
    """By mlx-lm's own processors, in their order."""
    make = pytest.importorskip("mlx_lm.sample_utils").make_logits_processors
    sizes = {name.replace("penalty", "context_size"): tokens.size for name in penalties}
    with mx.stream(mx.cpu):
        x = mx.array(logits)
        for processor in make(**penalties, **sizes):
            x = processor(tokens, x)
        return x


@pytest.mark.parametrize("what", PENALTIES)
def test_what_mlx_lms_processors_do(dtype, executor, rng, what):
    """Bit for bit: the logarithmic probabilities of all logits tell."""
    for columns, count in itertools.product((67, 9000), (1, 20, 700)):
        logits = draw(rng, 1, columns, dtype=dtype)
        tokens = mx.array(rng.integers(0, min(columns, 60), count).astype(np.int32))
        expected = processed(logits, tokens, **PENALTIES[what])
        key = mx.random.key(int(rng.integers(2**31)))
        ours = mm.sample(logits, key, tokens=tokens, logprobs="all", **PENALTIES[what])
        same(ours, mm.sample(expected, key, logprobs="all"), f"{columns} {count}")


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("masked", [False, True], ids=["all tokens", "mask"])
def test_rows_of_their_own_tokens(dtype, executor, rng, options, masked):
    """Beside float64, which rounds each step: the same token, and logarithmic probability, as of changed logits."""
    for shape, what in zip(SHAPES, ("all", "rewards", "all", "frequency"), strict=True):
        logits = draw(rng, *shape, dtype=dtype)
        tokens = draw_tokens(rng, logits, 20)
        mask = draw_mask(rng, logits) if masked else None
        changed = as_logits(sampling.adjusted(logits, tokens, mask, **PENALTIES[what]), dtype)
        key = mx.random.key(int(rng.integers(2**31)))
        for logprobs in (False, True, "all"):
            ours = mm.sample(
                logits, key, tokens=tokens, mask=mask, logprobs=logprobs, **PENALTIES[what], **OPTIONS[options]
            )
            same(ours, mm.sample(changed, key, logprobs=logprobs, **OPTIONS[options]), f"{shape} {logprobs}")


@pytest.mark.parametrize("options", OPTIONS)
def test_masks(dtype, executor, rng, options):
    for shape in SHAPES:
        logits = draw(rng, *shape, dtype=dtype)
        whole = draw_mask(rng, logits)
        for mask in (whole, whole.view(mx.int32), whole.reshape(-1, whole.shape[-1])[0]):
            changed = as_logits(sampling.adjusted(logits, None, mask), dtype)
            key = mx.random.key(int(rng.integers(2**31)))
            same(
                mm.sample(logits, key, mask=mask, logprobs="all", **OPTIONS[options]),
                mm.sample(changed, key, logprobs="all", **OPTIONS[options]),
                str(shape),
            )


def test_a_mask_of_one_token_and_of_none(dtype, executor, rng):
    for columns in (1, 31, 32, 33, 9003):
        logits = draw(rng, 1, columns, dtype=dtype)
        for token in {0, columns // 2, columns - 1}:
            bits = np.zeros(-(-columns // 32) * 32, np.uint8)
            bits[token] = 1
            mask = mx.array(np.packbits(bits, bitorder="little").view(np.uint32))
            drawn, logprob = mm.sample(logits, mx.random.key(1), mask=mask, logprobs=True)
            assert drawn.item() == token and logprob.item() == 0
        nothing = mx.zeros_like(mask)
        for options in OPTIONS.values():
            drawn, logprob = mm.sample(logits, mx.random.key(1), mask=nothing, logprobs=True, **options)
            assert drawn.item() == 0 and math.isnan(logprob.item())
            drawn, logprobs = mm.sample(logits, mx.random.key(1), mask=nothing, logprobs="all", **options)
            assert drawn.item() == 0 and np.isnan(specs.widen(logprobs)).all()


def test_penalties_of_rows(dtype, executor, rng):
    """A number for each row, zeros among them; and numbers of other types."""
    for shape in ((4, 515), (2, 2, 40)):
        logits = draw(rng, *shape, dtype=dtype)
        tokens = draw_tokens(rng, logits, 9)
        lead = shape[:-1]
        numbers = {
            "repetition_penalty": np.array([1.3, 0.0, 1.0, 0.5], np.float32).reshape(lead),
            "presence_penalty": np.array([0.0, 0.6, -0.6, 0.0], np.float32).reshape(lead),
            "frequency_penalty": np.array([0.25, 0.0, 0.1, 0.0], np.float32).reshape(lead),
        }
        changed = as_logits(sampling.adjusted(logits, tokens, **numbers), dtype)
        key = mx.random.key(3)
        for of in (mx.float32, mx.float16) if dtype == mx.float16 else (mx.float32,):
            given = {name: mx.array(v).astype(of) for name, v in numbers.items()}
            ours = mm.sample(logits, key, tokens=tokens, logprobs="all", **given)
            same(ours, mm.sample(changed, key, logprobs="all"), str(shape))
        one = mm.sample(logits, key, tokens=tokens, presence_penalty=mx.array(0.5), logprobs="all")
        same(one, mm.sample(logits, key, tokens=tokens, presence_penalty=0.5, logprobs="all"))


def test_penalties_that_change_nothing(dtype, executor, rng):
    logits = draw(rng, 3, 70, dtype=dtype)
    tokens, key = draw_tokens(rng, logits, 9), mx.random.key(3)
    expected = mm.sample(logits, key, logprobs="all")
    for options in (
        {"tokens": tokens},
        {"tokens": tokens, "repetition_penalty": 0.0},
        {"tokens": tokens, "repetition_penalty": mx.ones(3), "presence_penalty": mx.zeros(3)},
        {"tokens": tokens[:, :0], **PENALTIES["all"]},
        {"tokens": mx.full((3, 5), -1), **PENALTIES["all"]},
        {"tokens": mx.full((3, 5), 70), **PENALTIES["all"]},
        {"mask": mx.full((3, 3), 0xFFFFFFFF, mx.uint32)},
    ):
        same(mm.sample(logits, key, logprobs="all", **options), expected, str(options))


@pytest.mark.parametrize("of", [mx.int32, mx.uint32, mx.int64, mx.uint64], ids=str)
def test_types_of_tokens(executor, rng, of):
    logits = draw(rng, 2, 70)
    tokens = mx.array([[3, 5, 3, -1], [0, 69, 70, 2]]).astype(of)
    large = mx.array([[2**32 + 1, 3, 5, 3], [2**32, 0, 69, 2]], mx.int64).astype(of)
    if of.size == 4:
        large = mx.array([[-1, 3, 5, 3], [-1, 0, 69, 2]], mx.int32).astype(of)
    key = mx.random.key(5)
    expected = mm.sample(
        as_logits(sampling.adjusted(logits, mx.array([[3, 5, 3], [0, 69, 2]]), **PENALTIES["all"]), mx.float32),
        key,
        logprobs="all",
    )
    for given in (tokens, large):
        same(mm.sample(logits, key, tokens=given, logprobs="all", **PENALTIES["all"]), expected)


def test_views(dtype, executor, rng):
    """Of logits, tokens, masks and penalties; tokens that all rows share."""
    whole, key = draw(rng, 9, 134, dtype=dtype), mx.random.key(4)
    history = draw_tokens(rng, whole[:, :67], 40)
    words = draw_mask(rng, draw(rng, 9, 67 * 3))
    numbers = mx.array(rng.uniform(0.1, 1, 18).astype(np.float32))
    for logits in (whole[:, 1:68], whole[:, ::2], whole[1:, 67:], whole.T[:67, :9].T):
        rows = logits.shape[0]
        given = {
            "tokens": history[:rows, -7:],
            "mask": words[:rows, 1:6:2][:, :3],
            "repetition_penalty": numbers[: 2 * rows : 2],
            "frequency_penalty": mx.broadcast_to(numbers[:1], (rows,)),
        }
        copies = {name: mx.array(np.array(v)) for name, v in given.items()}
        plain = mx.array(np.array(logits.astype(mx.float32))).astype(dtype)
        ours = mm.sample(logits, key, logprobs="all", **given)
        same(ours, mm.sample(plain, key, logprobs="all", **copies))
        shared = mm.sample(logits, key, tokens=history[0, -7:], logprobs="all", **PENALTIES["all"])
        of_each = mx.broadcast_to(history[0, -7:], (rows, 7))
        same(shared, mm.sample(plain, key, tokens=of_each, logprobs="all", **PENALTIES["all"]))


def test_special_logits(dtype, executor):
    nan, inf = math.nan, math.inf
    tokens = mx.array([0, 1, 2, 3, 3])
    for row in ([nan, -inf, inf, -0.0, 1, 2], [-inf] * 6, [nan] * 6, [-inf, 5, -inf, nan, -inf, -inf]):
        logits = mx.array([row], dtype=dtype)
        changed = processed(logits, tokens, **PENALTIES["all"])
        for options in OPTIONS.values():
            ours = mm.sample(logits, mx.random.key(0), tokens=tokens, logprobs="all", **PENALTIES["all"], **options)
            same(ours, mm.sample(changed, mx.random.key(0), logprobs="all", **options), f"{row} {options}")


def test_float16_overflows_as_by_mlx_lm(executor):
    logits = mx.array([[60000.0, -60000.0, 1.0, 2.0]], dtype=mx.float16)
    for penalties in ({"repetition_penalty": 2.0}, {"repetition_penalty": 0.5}, {"frequency_penalty": 30000.0}):
        tokens = mx.array([0, 1, 1, 2])
        changed = processed(logits, tokens, **penalties)
        ours = mm.sample(logits, tokens=tokens, temperature=0.0, logprobs="all", **penalties)
        same(ours, mm.sample(changed, temperature=0.0, logprobs="all"))


def test_launches(rng):
    """As many as without: one, or two for a row that several threadgroups share."""
    for options in ({"temperature": 0.0}, {"temperature": 0.7, "top_k": 5}, {"logprobs": "all"}):
        logits = draw(rng, 1, 9001)
        tokens, mask = draw_tokens(rng, logits, 20), draw_mask(rng, logits)
        launched = []
        for given in ({}, {"tokens": tokens, "mask": mask, **PENALTIES["all"]}):
            with mx.stream(mx.cpu), mm.simulator.enabled(gpu="m2-max"):
                mm.stats(reset=True)
                mx.eval(mm.sample(logits, mx.random.key(1), **given, **options))
                launched.append(sum(mm.stats()["sample"]["kernels"].values()))
        assert launched[0] == launched[1], launched


def test_compiled_for_any_shape(executor, rng):
    penalties = PENALTIES["all"]
    step = lambda x, key, tokens, mask: mm.sample(x, key, tokens=tokens, mask=mask, logprobs="all", **penalties)
    compiled = mx.compile(step, shapeless=True)
    for rows, columns, count in ((2, 40, 5), (3, 515, 9), (1, 33, 1)):
        logits, key = draw(rng, rows, columns), mx.random.key(rows)
        tokens, mask = draw_tokens(rng, logits, count), draw_mask(rng, logits)
        same(tuple(compiled(logits, key, tokens, mask)), step(logits, key, tokens, mask))


def test_vmap_and_gradients(dtype, native, rng):
    logits = draw(rng, 3, 40, dtype=dtype)
    tokens, mask = draw_tokens(rng, logits, 6), draw_mask(rng, logits)
    step = lambda x, t, m: mm.sample(x, tokens=t, mask=m, temperature=0.0, **PENALTIES["all"])
    expected = np.array(step(logits, tokens, mask))
    np.testing.assert_array_equal(np.array(mx.vmap(step)(logits, tokens, mask)), expected)
    shared = np.array(mm.sample(logits, tokens=tokens[0], temperature=0.0, **PENALTIES["all"]))
    alone = mx.vmap(lambda x: mm.sample(x, tokens=tokens[0], temperature=0.0, **PENALTIES["all"]))
    np.testing.assert_array_equal(np.array(alone(logits)), shared)
    if dtype != mx.float32:
        return
    likely = lambda x, t, m: mm.sample(x, tokens=t, mask=m, temperature=0.0, logprobs=True, **PENALTIES["all"])[1]
    slope = mx.grad(lambda x: likely(x, tokens, mask).sum())(logits)
    x = sampling.adjusted(logits, tokens, mask, **PENALTIES["all"])
    p = np.exp(x - x.max(-1, keepdims=True))
    inner = np.ones(x.shape)
    for row, seen in enumerate(np.array(tokens)):
        for c in set(seen[(seen >= 0) & (seen < 40)]):
            inner[row, c] = 1.2 if np.array(logits)[row, c] < 0 else 1 / 1.2
    exact = (np.eye(40)[expected] - p / p.sum(-1, keepdims=True)) * inner
    np.testing.assert_allclose(np.array(slope), exact, atol=ROUNDINGS)


@pytest.mark.parametrize("shape", [(0, 40), (2, 0, 40)], ids=str)
def test_no_rows(executor, shape):
    tokens, mask = mx.zeros((*shape[:-1], 3), mx.int32), mx.zeros((*shape[:-1], 2), mx.uint32)
    drawn = mm.sample(mx.zeros(shape), tokens=tokens, mask=mask, **PENALTIES["all"])
    assert drawn.shape == shape[:-1]


def test_what_goes_to_mx(lenient, native, rng):
    logits = mx.zeros((1, 2**20))
    tokens = mx.array([5, 7, 5, -1])
    drawn = mm.sample(logits, tokens=tokens, frequency_penalty=-1.0, temperature=0.0)
    assert drawn.item() == 5
    x = mx.array([[0.0, 5, 1]]).astype(mx.float64)
    mask = mx.array([5], mx.uint32)
    assert mm.sample(x, mask=mask, temperature=0.0, stream=mx.cpu).item() == 2


ZEROS = {"logits": mx.zeros((2, 40)), "tokens": mx.zeros((2, 3), mx.int32)}
BAD = {
    r"mask has dtype bool: expected uint32 or int32": ({"mask": mx.zeros((2, 40), mx.bool_)}, mm.DtypeError),
    r"mask has shape \(2,1\), logits has shape \(2,40\): expected 2 words": (
        {"mask": mx.zeros((2, 1), mx.uint32)},
        ValueError,
    ),
    r"mask has shape \(3,2\)": ({"mask": mx.zeros((3, 2), mx.uint32)}, ValueError),
    r"tokens has dtype float32: expected int32": ({"tokens": mx.zeros((2, 3))}, mm.DtypeError),
    r"tokens has shape \(3,3\), logits has shape \(2,40\)": ({"tokens": mx.zeros((3, 3), mx.int32)}, ValueError),
    r"tokens has shape \(\)": ({"tokens": mx.array(1)}, ValueError),
    r"repetition_penalty is -1: expected a positive number, or 0": ({"repetition_penalty": -1.0}, ValueError),
    r"presence_penalty is inf: expected a finite number": ({"presence_penalty": math.inf}, ValueError),
    r"frequency_penalty is nan": ({"frequency_penalty": math.nan}, ValueError),
    r"frequency_penalty has shape \(3\)": ({"frequency_penalty": mx.zeros(3)}, ValueError),
    r"presence_penalty has dtype int32": ({"presence_penalty": mx.zeros(2, mx.int32)}, mm.DtypeError),
    r"presence_penalty is given, and tokens is None": ({"presence_penalty": 1.0, "tokens": None}, ValueError),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(native, message):
    options, error = BAD[message]
    before = np.array(mx.random.state[0])
    with pytest.raises(error, match=rf"\[sample\] {message}"):
        mm.sample(**{**ZEROS, **options})
    np.testing.assert_array_equal(np.array(mx.random.state[0]), before)
