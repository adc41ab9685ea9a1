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
    """What generate_step falls back to."""
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


def test_a_sampler_is_hashed_by_who_it_is():
    """As mlx-lm's functions are: it may be the key of a dictionary."""
    with mm.patched():
        a, b = (sample_utils.make_sampler(0.7, top_k=5) for _ in range(2))
    assert {a: 1, b: 2}[a] == 1 and a != b


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
