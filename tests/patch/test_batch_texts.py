"""A request's text in any batch is its text alone: windows, sinks, mixtures and hybrids, caches of several bits."""

import mlx.core as mx
import numpy as np
import pytest
from helpers import pages, tiny

import mlx_mittens as mm
from mlx_mittens.patching import quantized_batches

pytest.importorskip("mlx_lm")

from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

MODELS = ["llama-3.2-1b", "gemma-3-1b", "gpt-oss-20b", "qwen3-30b-a3b", "qwen3-next-80b-a3b"]
RECURRENT = ["lfm2-1.2b", "mamba2-2.7b"]
BITS = pytest.mark.parametrize("bits", [None, 8, 4], ids=["half", "8 bits", "4 bits"])
TOKENS = 10
LENGTHS = (9, 1, 33, 14)  # windows are of 8 tokens
ARRIVALS = ([0, 0, 0, 0], [0, 0, 3, 5])  # in steps of the batch


def answers(model, prompts, bits, arrivals=(0,)):
    """Tokens of each request and their log probabilities, from one batch that requests join and leave."""
    generator = BatchGenerator(model, stop_tokens=[], prefill_step_size=8)
    found, uids, responses, step = {}, {}, [], 0
    while step <= max(arrivals) or responses:
        for i, prompt in enumerate(prompts):
            if arrivals[i] == step:
                caches = make_prompt_cache(model) if bits is None else quantized_batches.new_caches(model, 64, bits)
                (uids[i],) = generator.insert([prompt], [TOKENS], caches=[caches])
        responses = generator.next_generated()
        for response in responses:
            logprobs = np.array(response.logprobs.astype(mx.float32))
            found.setdefault(response.uid, []).append((response.token, logprobs.tobytes()))
        step += 1
    generator.close()
    return [found[uids[i]] for i in range(len(prompts))]


def texts(answered):
    return [[token for token, _ in answer] for answer in answered]


@BITS
@pytest.mark.parametrize("name", MODELS)
def test_token_for_token(rng, native, name, bits):
    """Of requests that come at once and one after another, with prompts in chunks and windows that are full."""
    model = tiny.build_varied(name, mx.float32, 4)
    prompts = [rng.integers(1, 300, n).tolist() for n in LENGTHS]
    with mm.patched():
        if name == "gpt-oss-20b" and bits:
            with pytest.raises(ValueError, match="does not support attention sinks"):
                answers(model, prompts[:1], bits)
            return
        alone = texts(answers(model, [prompt], bits)[0] for prompt in prompts)
        for arrivals in ARRIVALS:
            assert texts(answers(model, prompts, bits, arrivals)) == alone
    assert len({tuple(text) for text in alone}) == len(prompts) and {len(text) for text in alone} == {TOKENS}


@BITS
@pytest.mark.parametrize("weights", [None, 4], ids=["dense", "quantized"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "gpt-oss-20b"])
def test_bit_for_bit(rng, native, name, weights, bits):
    """The same of float16 with exact=True, where log probabilities have the same bits, also behind full windows."""
    assert_bits_are_those_alone(rng, name, mx.float16, weights, bits)


@pytest.mark.parametrize("weights", [None, 4], ids=["dense", "quantized"])
@pytest.mark.parametrize("name", ["gpt-oss-20b", *RECURRENT])
def test_bit_for_bit_of_half_caches(rng, native, name, weights):
    """The same of models whose attention has sinks, which mlx-lm refuses with packed keys, and of short states."""
    assert_bits_are_those_alone(rng, name, mx.float16 if name != "mamba2-2.7b" else mx.bfloat16, weights, None)


@pytest.mark.parametrize("name", ["deepseek_v2", "minicpm3", "gemma3n"])
def test_bit_for_bit_of_layers_with_a_token_of_their_own(rng, native, lenient, name):
    """The same of models whose token alone the patch computes in steps of its own, unless exact=True is given."""
    assert_model_has_the_bits_alone(rng, pages.MODELS["build"](name, mx.float16), None)


def assert_bits_are_those_alone(rng, name, dtype, weights, bits):
    assert_model_has_the_bits_alone(rng, tiny.build_varied(name, dtype, weights), bits)


def assert_model_has_the_bits_alone(rng, model, bits):
    prompts = [rng.integers(1, 300, n).tolist() for n in LENGTHS]
    with mm.patched(exact=True):
        alone = [answers(model, [prompt], bits)[0] for prompt in prompts]
        for arrivals in ARRIVALS:
            assert answers(model, prompts, bits, arrivals) == alone
    assert len({tuple(text) for text in texts(alone)}) == len(prompts)
