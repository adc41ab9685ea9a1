"""A token's last norm, which the product of the head takes in on Apple GPUs."""

import mlx.core as mx
import pytest
from helpers import tiny
from helpers.tolerances import LAYERS, assert_near, of_layer

import mlx_mittens as mm

ROWS = 24576  # fewer are no head


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("converts", [False, True], ids=["patched", "converted"])
def test_the_head_takes_the_last_norm(rng, dtype, tied, converts):
    model = tiny.build("llama-3.2-1b", dtype, bits=4, vocab_size=ROWS, tie_word_embeddings=tied)
    prompt, token = mx.array(rng.integers(0, ROWS, (1, 5))), mx.array(rng.integers(0, ROWS, (1, 1)))
    expected, _ = tiny.token_and_launches(model, prompt, token)
    if converts:
        mm.nn.convert(model)
    patched = None if converts else mm.patched()
    found, counts = tiny.token_and_launches(model, prompt, token, patched, mm.simulator.enabled(gpu="m2-max"))
    assert "add_rms_norm" not in counts and counts["quantized_matmul_sum"] == 4
    assert_near(found, expected, "logits", LAYERS if dtype == mx.float32 else 2 * of_layer(dtype))


def test_others_that_read_the_last_norm_have_it_computed(rng):
    model = tiny.build("llama-3.2-1b", mx.float32, bits=4, vocab_size=ROWS)
    token = mx.array(rng.integers(0, ROWS, (1, 1)))
    expected = model.model(token)
    expected = expected, model.model.embed_tokens.as_linear(expected)
    mx.eval(expected)
    with mm.patched(), mm.simulator.enabled(gpu="m2-max"):
        hidden = model.model(token)
        found = model.model.embed_tokens.as_linear(hidden)
        mx.eval(hidden, found)
    for a, b in zip((hidden, found), expected, strict=True):
        assert_near(a, b, "head", LAYERS)
