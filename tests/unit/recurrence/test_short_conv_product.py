"""A token of a short convolution whose projection reads a norm: both are one launch on Apple GPUs."""

import mlx.core as mx
import numpy as np
import pytest
from helpers import tiny
from helpers.matrices import draw, quantize
from helpers.tolerances import LAYERS, assert_near, of_layer
from mlx_lm.models.cache import make_prompt_cache

import mlx_mittens as mm
from mlx_mittens import _ext

K, CHANNELS, EPS = 64, 20, 1e-5
FORMAT = (32, 4, "affine")


def arrays_of(rng, dtype=mx.float32, taps=3, channels=CHANNELS, batch=1):
    """A row, a square matrix, a projection, the state, the weight and the bias of the convolution."""
    arrays = [
        draw(rng, (batch, K), dtype, outliers=False),
        quantize(rng, (K, K), dtype, 32, 4),
        quantize(rng, (3 * channels, K), dtype, 32, 4),
        *(draw(rng, shape, dtype) for shape in ((batch, taps - 1, channels), (channels, taps), (channels,))),
    ]
    mx.eval(arrays)
    return arrays


@pytest.fixture
def uncompiled():
    """Without mx.compile, which takes minutes for C++ on a CPU."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def norm_of(x, square):
    product = mm.quantized_matmul(x, *square, group_size=32, bits=4)
    return mm.add_rms_norm(product, x, mx.ones(K, x.dtype), EPS)


def fused(x, square, projection, state, weight, bias=None):
    row, total = norm_of(x, square)
    return _ext.short_conv_token_of_norm(row, projection, *FORMAT, state, weight, bias), total


def apart(x, square, projection, state, weight, bias=None):
    row, total = norm_of(x, square)
    projected = mm.quantized_matmul(row, *projection, group_size=32, bits=4)
    return mm.short_conv_token(projected, state, weight, bias), total


@pytest.mark.parametrize("taps", [1, 2, 3, 5])
@pytest.mark.parametrize("has_bias", [False, True])
def test_one_launch_gives_what_two_give(rng, dtype, taps, has_bias):
    arrays = arrays_of(rng, dtype, taps)
    arrays = arrays if has_bias else arrays[:-1]
    name = {mx.float32: "float32", mx.float16: "float16", mx.bfloat16: "bfloat16"}[dtype]
    with mm.simulator.enabled(gpu="m2-max"):
        mm.stats(reset=True)
        ours, total = fused(*arrays)
        mx.eval(ours, total)
        kernels = {kernel.split()[-1]: n for one in mm.stats().values() for kernel, n in one["kernels"].items()}
        assert kernels == {f"quantized_matmul_sum_4bit_{name}": 1, f"short_conv_token_product_4bit_{name}": 1}
        theirs, beside = apart(*arrays)
        mx.eval(theirs, beside)
    for what, a, b in zip(("y", "state", "sum"), (*ours, total), (*theirs, beside), strict=True):
        assert a.dtype == dtype
        assert_near(a, b, what, LAYERS if dtype == mx.float32 else 2 * of_layer(dtype))


def test_a_state_is_updated_in_place(rng):
    """Where nothing else needs it: then the memory is the same, else the state stays unchanged."""
    arrays = arrays_of(rng)
    before = np.array(arrays[3])
    with mm.simulator.enabled(gpu="m2-max"):
        (_, kept), _ = fused(*arrays)
        mx.eval(kept)
        np.testing.assert_array_equal(np.array(arrays[3]), before)
        x, square, projection, state, *rest = arrays
        del arrays
        (_, after), _ = fused(x, square, projection, state, *rest)
        del state
        mx.eval(after)
    np.testing.assert_array_equal(np.array(after), np.array(kept))


def test_what_is_computed_apart(rng):
    """A norm that another reads, types that differ, several rows, a convolution that mx is to compute, other GPUs."""
    x, square, projection, state, weight, _ = arrays_of(rng)
    call = lambda row, state=state: _ext.short_conv_token_of_norm(row, projection, *FORMAT, state, weight)
    with mm.simulator.enabled(gpu="m2-max"):
        assert call(x) is None
        row, _ = norm_of(x, square)
        other = row + 1
        assert call(row) is None
        mx.eval(other)
        assert call(norm_of(x, square)[0], state.astype(mx.float16)) is None
        assert call(norm_of(mx.concatenate([x, x]), square)[0]) is None
        assert call(norm_of(x, square)[0]) is not None
    for gpu in ("nvidia",):
        with mm.simulator.enabled(gpu=gpu):
            assert call(norm_of(x, square)[0]) is None
    assert call(norm_of(x, square)[0]) is None


def test_gradients_are_those_of_two_calls(rng, native):
    arrays = arrays_of(rng)

    def total(call, state, weight):
        (y, after), _ = call(*arrays[:3], state, weight)
        return (y * y).sum() + (after * after).sum()

    with mm.simulator.enabled(gpu="m2-max"):
        ours, theirs = (
            mx.grad(lambda *a, call=call: total(call, *a), argnums=(0, 1))(*arrays[3:5]) for call in (fused, apart)
        )
        mx.eval(ours, theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert_near(a, b, "gradient", LAYERS)


@pytest.mark.parametrize(
    ("i", "shape", "text"),
    [
        (3, (1, 2, CHANNELS + 1), rf"conv_state has shape .*: expected \(1,2,{CHANNELS}\)"),
        (4, (CHANNELS + 1, 3), "the projection has 60 outputs: expected 63"),
        (5, (3,), rf"conv_bias has shape \(3\): expected \({CHANNELS}\)"),
    ],
)
def test_bad_shapes(rng, i, shape, text):
    arrays = arrays_of(rng)
    arrays[i] = mx.zeros(shape)
    with mm.simulator.enabled(gpu="m2-max"), pytest.raises(ValueError, match=rf"\[short_conv_token\] {text}"):
        fused(*arrays)


@pytest.mark.parametrize("converts", [False, True], ids=["patched", "converted"])
def test_tokens_of_lfm2(rng, lenient, uncompiled, converts):
    """The second layer's convolution has a product before it, the first one's has none."""
    model = tiny.build("lfm2-1.2b", mx.float32, bits=4, num_hidden_layers=3, full_attn_idxs=[1])
    prompt, tokens = mx.array(rng.integers(0, 320, (1, 5))), mx.array(rng.integers(0, 320, (1, 6)))

    def logits():
        cache, found = make_prompt_cache(model), []
        for part in (prompt, *(tokens[:, i : i + 1] for i in range(6))):
            found.append(model(part, cache=cache)[:, -1])
            mx.eval(found[-1], [one.state for one in cache])
        return mx.stack(found), cache[2][0]

    expected, state = logits()
    if converts:
        mm.nn.convert(model)
        with mm.simulator.enabled(gpu="m2-max"):
            mm.stats(reset=True)
            found, own = logits()
    else:
        with mm.simulator.enabled(gpu="m2-max"), mm.patched():
            mm.stats(reset=True)
            found, own = logits()
    assert tiny.kernels("short_conv_product") == 6
    assert_near(found, expected, "logits", LAYERS)
    assert_near(own, state, "state", LAYERS)
