"""Models of mlx-lm on our kernels: their results, and all the ways in which mlx-lm runs them."""

import copy

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from helpers import tiny
from helpers.tolerances import LAYERS, SUM, SUMS
from mlx.utils import tree_flatten, tree_map
from mlx_lm.generate import BatchGenerator, generate_step, speculative_generate_step
from mlx_lm.models import gpt_oss
from mlx_lm.models.cache import (
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from mlx_lm.tuner.trainer import default_loss, grad_checkpoint
from mlx_lm.tuner.utils import linear_to_lora_layers

import mlx_mittens as mm

FORMATS = {"4-bit": 4, "8-bit": 8, "dense": None}

pytestmark = pytest.mark.usefixtures("lenient")


@pytest.fixture(params=["4-bit", "dense"])
def model(request, rng):
    mx.random.seed(int(rng.integers(2**31)))
    return tiny.build("llama-3.2-1b", mx.float32, FORMATS[request.param])


@pytest.fixture
def prompt(rng):
    return rng.integers(1, 300, 21).tolist()


class Experts:
    """The experts that a model takes: those it finds best the first time, the same ones whenever they are replayed.

    Of two experts that are nearly tied rounding takes one or the other, which says nothing of how exact a kernel is.
    """

    def __init__(self, monkeypatch):
        self.taken, self.best, self.replayed = [], gpt_oss.mlx_topk, None
        monkeypatch.setattr(gpt_oss, "mlx_topk", self.choose)

    def choose(self, scores, k, axis):
        if self.replayed is None:
            values, indices = self.best(scores, k, axis)
            self.taken.append(indices)
            return values, indices
        indices = next(self.replayed)
        return mx.take_along_axis(scores, indices, axis), indices

    def replay(self):
        self.replayed = iter(self.taken)


def product(model):
    return "quantized_matmul" if any(isinstance(m, nn.QuantizedLinear) for _, m in model.named_modules()) else "gemv"


@pytest.mark.parametrize("weights", FORMATS)
@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_outputs_agree_to_the_rounding_of_the_type(rng, device, dtype, monkeypatch, name, weights):
    if device == "cpu" and name == "gpt-oss-20b" and weights == "dense" and dtype != mx.float32:
        with pytest.raises(RuntimeError, match="float32"):  # of mx, on a CPU
            mx.eval(mx.gather_mm(mx.ones((1, 4, 4), dtype), mx.ones((1, 4, 4), dtype), mx.array([0]), mx.array([0])))
        return
    mx.random.seed(int(rng.integers(2**31)))
    model = tiny.build(name, dtype, FORMATS[weights])
    prompt, following = mx.array(rng.integers(1, 300, (2, 19))), mx.array(rng.integers(1, 300, (2, 1)))

    experts = Experts(monkeypatch)

    def logits():
        caches = make_prompt_cache(model)
        result = [model(prompt, cache=caches), model(following, cache=caches)]
        mx.eval(result)
        return result

    narrow = model.parameters()
    model.update(tree_map(lambda a: a.astype(mx.float32) if a.dtype == dtype else a, narrow))
    exact = [np.array(a) for a in logits()]
    model.update(narrow)
    experts.replay()
    theirs = logits()
    experts.replay()
    with mm.patched(router=False):  # whose choice is replayed
        ours = logits()
    for a, b, c in zip(ours, theirs, exact, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype == dtype
        error, twin = (np.sqrt(np.mean((np.array(y.astype(mx.float32)) - c) ** 2)) for y in (a, b))
        assert error <= max(2 * twin, 2 * SUM), f"error {error}, of mx {twin}"


def test_greedy_tokens_and_what_ran(model, prompt):
    theirs = tiny.tokens(model, prompt, 40)
    with mm.patched():
        mm.stats(reset=True)
        assert tiny.tokens(model, prompt, 40) == theirs
    # The loop runs one ahead. Of the prompt only the append is computed in the last layer, nothing after it.
    assert tiny.kernels("rms_norm") == 41 + 1  # of the embeddings; the others are one with the sum before them
    assert tiny.kernels("add_rms_norm") == 41 * 4 + 2
    assert tiny.kernels("rope_append") == 42 * 2
    assert tiny.kernels(product(model)) + 2 * tiny.kernels("quantized_swiglu") == 41 * 15 + 10


def test_no_patch_afterwards(model, prompt):
    with mm.patched():
        tiny.tokens(model, prompt, 3)
    mm.stats(reset=True)
    tiny.tokens(model, prompt, 3)
    assert not mm.stats()


def test_a_prompt_cache_saved_and_trimmed(model, prompt, tmp_path):
    def generate():
        caches = make_prompt_cache(model)
        tiny.tokens(model, prompt, 5, prompt_cache=caches)
        save_prompt_cache(str(tmp_path / "cache.safetensors"), caches)
        loaded = load_prompt_cache(str(tmp_path / "cache.safetensors"))
        trim_prompt_cache(loaded, 3)
        return tiny.tokens(model, prompt[:4], 20, prompt_cache=loaded)

    theirs = generate()
    with mm.patched():
        assert generate() == theirs


def test_a_rotating_cache(model, prompt):
    def generate():
        caches = [RotatingKVCache(max_size=16, keep=4) for _ in model.layers]
        return tiny.tokens(model, prompt, 40, prompt_cache=caches, prefill_step_size=8)

    theirs = generate()
    with mm.patched():
        assert generate() == theirs


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_cache(model, prompt, bits):
    def generate():
        return tiny.tokens(model, prompt, 30, kv_bits=bits, kv_group_size=64, quantized_kv_start=8)

    theirs = generate()
    with mm.patched():
        assert generate() == theirs


def test_a_batch_of_prompts(model, rng):
    prompts = [rng.integers(1, 300, n).tolist() for n in (3, 17, 9)]

    def generate():
        batch = BatchGenerator(model, stop_tokens=[])
        identities = batch.insert(prompts, [12, 20, 16])
        results = {identity: [] for identity in identities}
        while responses := batch.next_generated():
            for response in responses:
                results[response.uid].append(response.token)
        batch.close()
        return [results[identity] for identity in identities]

    theirs = generate()
    assert [len(tokens) for tokens in theirs] == [12, 20, 16]
    with mm.patched():
        assert generate() == theirs


@pytest.mark.parametrize("drafted", [2, 8])
def test_speculative_decoding(model, prompt, drafted, rng):
    draft = copy.deepcopy(model)
    draft.model.norm.weight = draft.model.norm.weight + mx.array(rng.normal(size=128).astype(np.float32))
    alone = tiny.tokens(model, prompt, 24)
    with mm.patched():
        steps = speculative_generate_step(mx.array(prompt), model, draft, num_draft_tokens=drafted, max_tokens=24)
        assert [token for token, _, _ in steps] == alone


@pytest.mark.parametrize("dtype, bits", [(mx.float16, 8), (mx.float16, None), (mx.bfloat16, None)], ids=str)
def test_exact_drafts_are_verified_bit_for_bit(dtype, bits, prompt, rng, monkeypatch):
    """Whatever is proposed, the log probabilities are as with one token after the other, also where a buffer ends."""
    monkeypatch.setattr(KVCache, "step", 16)
    model = tiny.build("llama-3.2-1b", dtype, bits, hidden_size=256, intermediate_size=576)
    draft = copy.deepcopy(model)
    noise = mx.array(rng.normal(size=256).astype(np.float32)).astype(dtype)
    draft.model.norm.weight = draft.model.norm.weight + noise / 24
    with mm.patched(exact=True):
        alone = list(generate_step(mx.array(prompt), model, max_tokens=40))
        for drafted in (2, 5, 8):
            steps = list(
                speculative_generate_step(mx.array(prompt), model, draft, num_draft_tokens=drafted, max_tokens=40)
            )
            accepted = sum(from_draft for _, _, from_draft in steps)
            assert 0 < accepted < 40
            for (token, logprobs), (plain, expected) in zip(
                [step[:2] for step in steps], [(int(a), b) for a, b in alone], strict=True
            ):
                assert token == plain
                assert mx.array_equal(logprobs, expected).item()


@pytest.mark.parametrize("converted", [False, True], ids=["patched", "converted"])
@pytest.mark.parametrize("kind", ["plain", "quantized", "rotating"])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16], ids=str)
def test_exact_tokens_of_one_call_are_those_of_many(dtype, kind, converted, rng, monkeypatch):
    """From an empty cache on, over several ends of its buffers."""
    for cache in (KVCache, QuantizedKVCache, RotatingKVCache):
        monkeypatch.setattr(cache, "step", 16)
    make = {"plain": KVCache, "quantized": lambda: QuantizedKVCache(32, 8), "rotating": lambda: RotatingKVCache(64)}
    model = tiny.build("qwen3-0.6b", dtype, None)
    if converted:
        mm.nn.convert(model)
    tokens = mx.array(rng.integers(1, 300, size=(1, 51)).astype(np.int32))

    def logits(chunks):
        caches = [make[kind]() for _ in model.layers]
        results = []
        for part in mx.split(tokens, chunks, axis=1):
            results.append(model(part, cache=caches))
            mx.eval(results[-1])
        return mx.concatenate(results, axis=1)

    with mm.patched(exact=True):
        alone = logits(list(range(1, 51)))
        for chunks in ([1, 4, 13, 15, 20, 29, 33, 34, 42, 47], [7, 8, 9, 17, 25, 31, 36, 48]):
            assert mx.array_equal(logits(chunks), alone).item()


@pytest.mark.parametrize("gpu", ["m2-max", "h200"])
@pytest.mark.parametrize(
    "name, dtype, bits",
    [("llama-3.2-1b", mx.float16, 8), ("qwen3-0.6b", mx.bfloat16, None), ("qwen3-30b-a3b", mx.float16, 4)],
    ids=str,
)
def test_exact_tokens_on_gpus(gpu, name, dtype, bits, rng):
    """In the kernels of GPUs, a mixture of experts too: of a draft's tokens and of one token after the other."""
    with mx.stream(mx.cpu):
        model = tiny.build(name, dtype, bits)
    tokens = mx.array(rng.integers(1, 300, size=(1, 16)).astype(np.int32))

    def logits(chunks):
        caches = [KVCache() for _ in model.layers]
        results = []
        for part in mx.split(tokens, chunks, axis=1):
            results.append(model(part, cache=caches))
            mx.eval(results[-1])
        return mx.concatenate(results, axis=1)

    with mm.patched(exact=True), mm.simulator.enabled(gpu=gpu):
        assert mx.array_equal(logits([1, 3, 8]), logits(list(range(1, 16)))).item()


def test_a_compiled_step(model, prompt):
    tokens = mx.array([prompt])
    expected = model(tokens)
    with mm.patched():
        step = mx.compile(lambda tokens: model(tokens))
        mx.eval(step(tokens))
        mm.stats(reset=True)
        result = step(tokens)
        mx.eval(result)
    assert tiny.kernels("rms_norm") == 5
    np.testing.assert_allclose(np.array(result), np.array(expected), rtol=LAYERS, atol=LAYERS)


def test_threads_generate_at_once(model, rng):
    from concurrent.futures import ThreadPoolExecutor

    prompts = [rng.integers(1, 300, 12).tolist() for _ in range(4)]
    theirs = [tiny.tokens(model, prompt, 12) for prompt in prompts]
    with mm.patched(), ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda prompt: tiny.tokens(model, prompt, 12), prompts)) == theirs


@pytest.mark.parametrize("checkpointed", [False, True])
def test_training_lora_layers(model, rng, checkpointed):
    linear_to_lora_layers(model, 2, {"rank": 4, "scale": 10.0, "dropout": 0.0})
    model.freeze()
    for _, module in model.named_modules():
        module.unfreeze(keys=["lora_a", "lora_b"], recurse=False, strict=False)
        if "lora_b" in module:  # zeros at first, which would leave the other without a gradient
            module.lora_b = 0.05 * mx.array(rng.normal(size=module.lora_b.shape).astype(np.float32))
    assert model.trainable_parameters()
    batch, lengths = mx.array(rng.integers(1, 300, (2, 17))), mx.array([[0, 16], [0, 12]])
    start = copy.deepcopy(dict(tree_flatten(model.trainable_parameters())))

    def train():
        model.update(tree_map(lambda a: a, model.parameters()))
        model.load_weights(list(start.items()), strict=False)
        optimizer = optim.SGD(learning_rate=0.1)
        step = nn.value_and_grad(model, default_loss)
        losses = []
        for _ in range(3):
            (loss, _), gradients = step(model, batch, lengths)
            optimizer.update(model, gradients)
            mx.eval(model.parameters(), loss)
            losses.append(loss.item())
        return losses, {name: np.array(a) for name, a in tree_flatten(gradients)}

    if checkpointed:
        original = type(model.layers[0]).__call__
        grad_checkpoint(model.layers[0])
    try:
        losses, gradients = train()
        with mm.patched():
            mm.stats(reset=True)
            ours, our_gradients = train()
    finally:
        if checkpointed:
            type(model.layers[0]).__call__ = original
    assert mm.stats()[product(model)]["kernels"] and mm.stats()["rms_norm_vjp"]["kernels"]
    assert losses[2] != losses[0]
    np.testing.assert_allclose(ours, losses, rtol=SUMS)
    largest = max(np.abs(gradient).max() for gradient in gradients.values())
    for name, gradient in gradients.items():
        scale = np.abs(gradient).max()
        assert scale > 0, name
        scale = max(scale, SUMS * largest)  # less is rounding of terms on the gradient's way
        np.testing.assert_allclose(our_gradients[name], gradient, atol=2 * LAYERS * scale, err_msg=name)


def test_memory_stays_flat(rng):
    """Bytes that MLX holds do not grow with the tokens; a rotating cache holds as much at 600 as at 100."""
    model = tiny.build("llama-3.2-1b", mx.float16, 4)
    caches = [RotatingKVCache(max_size=64, keep=4) for _ in model.layers]
    active = []
    with mm.patched():
        for _ in range(6):
            tiny.tokens(model, [1, 2, 3], 100, prompt_cache=caches)
            mx.clear_cache()
            active.append(mx.get_active_memory())
    assert max(active[1:]) - min(active[1:]) < 1 << 16, active
