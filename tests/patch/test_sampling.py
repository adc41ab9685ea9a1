"""mlx-lm's samplers, patched."""

import importlib

import mlx.core as mx
import numpy as np
import pytest
from helpers import tiny
from helpers.support import launched_on_apple
from helpers.tolerances import LAYERS, units
from mlx_lm import sample_utils
from mlx_lm.generate import batch_generate, generate_step
from mlx_lm.sample_utils import make_sampler

import mlx_mittens as mm
from mlx_mittens import specs

pytestmark = pytest.mark.usefixtures("lenient", "native")

OPTIONS = {
    "greedy": {},
    "temperature": {"temp": 0.8},
    "chat": {"temp": 0.7, "top_p": 0.95, "top_k": 40, "min_p": 0.01},
}
OTHERS = (
    *("rms_norm", "layer_norm", "softmax", "quantized_matmul", "scaled_dot_product_attention", "linear"),
    *("quantized_scaled_dot_product_attention", "cache", "swiglu", "softcap", "attention_layer"),
)
ALONE = dict.fromkeys(OTHERS, False)


@pytest.fixture(autouse=True)
def uncompiled():
    """mx.compile compiles nothing: on a CPU each of mlx-lm's filters would take seconds."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def reference(temp: float = 0.0, top_p: float = 0.0, top_k: int = 0, min_p: float = 0.0):
    """mlx-lm's filters, and a draw as mx draws from several rows."""

    def sampler(logprobs: mx.array) -> mx.array:
        if not temp:
            return mx.argmax(logprobs, axis=-1)
        x = sample_utils.apply_top_p(logprobs, top_p) if top_p else logprobs
        x = sample_utils.apply_min_p(x, min_p) if min_p else x
        x = sample_utils.apply_top_k(x, top_k) if top_k else x
        return mx.argmax(x * (1 / temp) + mx.random.gumbel(x.shape), axis=-1)

    return sampler


@pytest.mark.parametrize("what", OPTIONS)
def test_the_same_text(what):
    """By one seed, greedily and by temperature."""
    model = tiny.build("qwen3-0.6b", mx.float32)

    def text(make) -> list[int]:
        mx.random.seed(5)
        steps = generate_step(mx.array([3, 1, 4, 1, 5]), model, max_tokens=24, sampler=make(**OPTIONS[what]))
        return [token for token, _ in steps]

    expected = text(reference)
    mm.stats(reset=True)
    with mm.patched(**ALONE):
        assert text(sample_utils.make_sampler) == expected
    ran = tiny.kernels("sample")
    assert ran >= 24
    text(sample_utils.make_sampler)
    assert tiny.kernels("sample") == ran, "unpatched it runs on mx"


def test_the_default_sampler():
    """The sampler that generate_step falls back to."""
    model = tiny.build("llama-3.2-1b", mx.float16)
    expected = tiny.tokens(model, [1, 2, 3], 12)
    mm.stats(reset=True)
    with mm.patched(strict=True, **ALONE):
        assert tiny.tokens(model, [1, 2, 3], 12) == expected
    assert tiny.kernels("sample") >= 12


def test_modules_that_imported_it_by_name():
    generate = importlib.import_module("mlx_lm.generate")
    original = generate.make_sampler
    with mm.patched():
        assert generate.make_sampler is sample_utils.make_sampler is not original
        assert generate.greedy_sampler is sample_utils.greedy_sampler
    assert generate.make_sampler is sample_utils.make_sampler is original


def test_what_the_op_lacks_is_mlx_lms_own(rng):
    logprobs = mx.array(rng.standard_normal((2, 50)).astype(np.float32))
    for options in ({"temp": 0.5, "xtc_probability": 0.5}, {"temp": 0.5, "min_p": 0.1, "min_tokens_to_keep": 3}):
        mx.random.seed(1)
        expected = np.array(make_sampler(**options)(logprobs))
        mm.stats(reset=True)
        with mm.patched(strict=True):
            sampler = sample_utils.make_sampler(**options)
        mx.random.seed(1)
        np.testing.assert_array_equal(np.array(sampler(logprobs)), expected)
        assert "sample" not in mm.stats()


def test_a_sampler_of_the_same_options_is_the_same():
    """mlx-lm's batches draw in one call where all requests share it; it may be the key of a dictionary."""
    with mm.patched():
        a, b, c = (sample_utils.make_sampler(0.7, top_k=k) for k in (5, 5, 6))
    assert a is b and {a: 1, c: 2}[a] == 1 and a != c


def test_errors_are_mlx_lms_own():
    with mm.patched():
        for options, message in (({"top_k": 60}, "top_k"), ({"min_p": 2.0}, "min_p")):
            with pytest.raises(ValueError, match=message):
                sample_utils.make_sampler(temp=1.0, **options)(mx.zeros((1, 50)))


def test_a_batch(tmp_path):
    from mlx_lm import load

    model, tokenizer = load(str(tiny.save(tmp_path / "tiny", "qwen3-0.6b", mx.float32)))
    prompts = [[1, 2, 3], [4, 5, 6, 7], [8]]

    def texts() -> list[str]:
        return batch_generate(model, tokenizer, prompts, max_tokens=8).texts

    expected = texts()
    mm.stats(reset=True)
    with mm.patched(**ALONE):
        assert texts() == expected
    assert tiny.kernels("sample") > 0


# Of mlx-lm's ways to the logarithmic probabilities: one sequence, and several.
SUMS = {"one": {}, "rows": {"axis": -1}}


@pytest.mark.parametrize("options", [{}, {"temp": 0.7}, {"temp": 0.8, "top_k": 9, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("way", SUMS)
def test_logprobs_are_computed_with_the_tokens(dtype, rng, way, options):
    """In two launches; where something has asked for them before, they are mx's."""
    rows = 1 if way == "one" else 3
    logits = mx.array(rng.standard_normal((rows, 9000)).astype(np.float32)).astype(dtype)
    wide = specs.widen(logits)
    exact = wide - np.log(np.exp(wide).sum(-1, keepdims=True))
    mx.eval(logits)
    with mm.patched():
        sampler = sample_utils.make_sampler(**options)
        for asked in (False, True):
            logprobs = logits - mx.logsumexp(logits, keepdims=True, **SUMS[way])
            if asked:
                mx.eval(logprobs)
            tokens = sampler(logprobs)
            launched = launched_on_apple(lambda tokens=tokens, logprobs=logprobs: (tokens, logprobs.squeeze()))
            ours = [name.rpartition("_")[0] for name in launched]
            assert ("sample_logprobs" in ours) == (not asked)
            assert asked or ours == ["sample", "sample_logprobs"], launched
            np.testing.assert_allclose(specs.widen(logprobs), exact, rtol=max(LAYERS, units(2, dtype)))
            if not options:
                drawn = np.take_along_axis(wide, np.array(tokens)[..., None].astype(int), -1)[..., 0]
                assert asked or (drawn == wide.max(-1)).all()


@pytest.mark.parametrize("asks", [False, True], ids=["for tokens", "for probabilities"])
def test_a_generation_computes_them_once(asks):
    """mlx-lm evaluates them for each token, whoever wants them."""
    model = tiny.build("qwen3-0.6b", mx.float16)
    expected = list(generate_step(mx.array([3, 1, 4]), model, max_tokens=6))
    with mm.patched(**ALONE):
        mm.stats(reset=True)
        found = list(generate_step(mx.array([3, 1, 4]), model, max_tokens=6))
    assert tiny.kernels("sample") >= 6
    assert [token for token, _ in found] == [token for token, _ in expected]
    if asks:
        for (_, ours), (_, theirs) in zip(found, expected, strict=True):
            assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
            np.testing.assert_allclose(specs.widen(ours), specs.widen(theirs), rtol=units(2, mx.float16))


PROCESSORS = {
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 0.7},
    "frequency": {"frequency_penalty": 0.4},
    "all": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.25},
    "sizes": {"repetition_penalty": 1.2, "repetition_context_size": 3, "frequency_penalty": 0.5},
    "everything": {"repetition_penalty": 1.2, "repetition_context_size": 0, "presence_penalty": -0.5},
    "bias": {"logit_bias": {3: 2.0, 5: -9.0}, "presence_penalty": 0.5},
}


@pytest.mark.parametrize("what", PROCESSORS)
@pytest.mark.parametrize("rows", [1, 3])
def test_logits_processors_change_the_same_logits(dtype, executor, rng, what, rows):
    """Bit for bit, with a sampler behind them or without."""
    logits = mx.array(3 * rng.standard_normal((rows, 700)).astype(np.float32)).astype(dtype)
    tokens = mx.array(rng.integers(0, 9, 40).astype(np.int32)).astype(mx.int64)

    def processed(make) -> mx.array:
        x = logits + 0
        for processor in make(**PROCESSORS[what]):
            x = processor(tokens, x)
        return x

    with mx.stream(mx.cpu):
        expected = processed(sample_utils.make_logits_processors)
    with mm.patched(**ALONE):
        np.testing.assert_array_equal(
            specs.widen(processed(sample_utils.make_logits_processors)), specs.widen(expected)
        )
        found = processed(sample_utils.make_logits_processors)
        logprobs = found - mx.logsumexp(found, axis=-1, keepdims=True)
        drawn = sample_utils.make_sampler(0.0)(logprobs)
        best, likely = mm.sample(expected, temperature=0.0, logprobs="all")
        np.testing.assert_array_equal(np.array(drawn), np.array(best))
        np.testing.assert_array_equal(specs.widen(logprobs), specs.widen(likely))


@pytest.mark.parametrize("options", [{}, {"temp": 0.8, "top_k": 9, "top_p": 0.9}], ids=str)
def test_logits_processors_take_no_launch(rng, options):
    logits = mx.array(rng.standard_normal((1, 9000)).astype(np.float32))
    tokens = mx.array([3, 4, 3, 5])
    mx.eval(logits, tokens)
    with mm.patched():
        sampler = sample_utils.make_sampler(**options)
        x = logits
        for processor in sample_utils.make_logits_processors(**PROCESSORS["all"]):
            x = processor(tokens, x)
        logprobs = x - mx.logsumexp(x, keepdims=True)
        drawn = sampler(logprobs)
        launched = launched_on_apple(lambda: (drawn, logprobs.squeeze()))
        assert [name.rpartition("_")[0] for name in launched] == ["sample_adjusted", "sample_logprobs"], launched


@pytest.mark.parametrize("what", PROCESSORS)
def test_the_same_text_with_logits_processors(what):
    model = tiny.build("qwen3-0.6b", mx.float32)

    def text() -> list[int]:
        processors = sample_utils.make_logits_processors(**PROCESSORS[what])
        steps = generate_step(mx.array([3, 1, 4, 1, 5]), model, max_tokens=24, logits_processors=processors)
        return [token for token, _ in steps]

    expected = text()
    mm.stats(reset=True)
    with mm.patched(**ALONE):
        assert text() == expected
    assert tiny.kernels("sample") >= 24


def test_a_batch_with_logits_processors(tmp_path):
    from mlx_lm import load

    model, tokenizer = load(str(tiny.save(tmp_path / "tiny", "qwen3-0.6b", mx.float32)))
    prompts = [[1, 2, 3], [4, 5, 6, 7], [8]]

    def texts() -> list[str]:
        processors = sample_utils.make_logits_processors(**PROCESSORS["all"])
        return batch_generate(model, tokenizer, prompts, max_tokens=8, logits_processors=processors).texts

    expected = texts()
    with mm.patched(**ALONE):
        assert texts() == expected


ROWS = {
    "alike": [PROCESSORS["all"]] * 3,
    "of their own": [PROCESSORS["all"], PROCESSORS["frequency"], {}],
    "of few tokens": [PROCESSORS["presence"], {}, PROCESSORS["all"]],
}


@pytest.mark.parametrize("options", [{}, {"temp": 0.8, "top_k": 9, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("what", ROWS)
def test_rows_of_a_batch_are_penalized_in_the_launches_of_the_draw(dtype, rng, what, options):
    """As mlx-lm's batches do it, a row after the other: bit for bit the results of each row alone."""
    logits = mx.array(3 * rng.standard_normal((3, 9000)).astype(np.float32)).astype(dtype)
    tokens = [mx.array(rng.integers(0, 9, n).astype(np.int32)) for n in (40, 7, 3)]
    mx.eval(logits, tokens)

    def processed() -> mx.array:
        rows = []
        for row, given in enumerate(ROWS[what]):
            x = logits[row : row + 1]
            for processor in sample_utils.make_logits_processors(**given):
                x = processor(tokens[row], x)
            rows.append(x)
        return mx.concatenate(rows, axis=0)

    def drawn_of(sampler) -> tuple[mx.array, mx.array]:
        x = processed()
        logprobs = x - mx.logsumexp(x, axis=-1, keepdims=True)
        return sampler(logprobs), logprobs

    expected = mm.sample(processed(), temperature=0.0, logprobs="all")
    with mm.patched():
        sampler = sample_utils.make_sampler(**options)
        drawn, logprobs = drawn_of(sampler)
        again = drawn_of(sampler)
        launched = launched_on_apple(lambda: (again[0], again[1] + 0))
    ours = [name.rpartition("_")[0] for name in launched if name.startswith("sample")]
    assert ours == ["sample_adjusted", "sample_logprobs"], launched
    np.testing.assert_array_equal(specs.widen(logprobs), specs.widen(expected[1]))
    if not options:
        np.testing.assert_array_equal(np.array(drawn), np.array(expected[0]))


def test_logits_processors_that_are_not_known_are_mlx_lms_own():
    with mm.patched(), pytest.raises(ValueError, match="penalty must be a non-negative float"):
        sample_utils.make_logits_processors(repetition_penalty=-1.0)
    with mm.patched():
        (processor,) = sample_utils.make_logits_processors(presence_penalty=1.0)
        assert processor(mx.array([], mx.int32), mx.zeros((1, 4))).tolist() == [[0.0] * 4]
        assert processor(mx.array([1, 2]), mx.zeros((1, 4))).tolist() == [[0.0, -1.0, -1.0, 0.0]]
