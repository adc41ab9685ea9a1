"""Prompts where there are NVIDIA's tensor cores: float32 by our kernels, and calls that go to mx there."""

import mlx.core as mx
import pytest
from helpers.attention import MASKS, exact_of, inputs, mask_of, run
from helpers.tolerances import assert_attention_right

import mlx_mittens as mm
from mlx_mittens.specs import dequantized
from mlx_mittens.specs.attention import twin_mask


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("queries, keys", [(17, 17), (40, 33), (33, 70), (18, 300)])
def test_float32(rng, nvidia_kernels, width, mask, queries, keys):
    shape = (2, 4, 2, queries, keys, width)
    q, k, v = inputs(rng, shape, mx.float32)
    given = mask_of(rng, mask, shape, mx.float32)
    y = run(lambda: mm.scaled_dot_product_attention(q, k, v, scale=width**-0.5, mask=given))
    assert_attention_right(y, None, exact_of(q, k, v, width**-0.5, given), mx.float32)
    assert nvidia_kernels()[0] == f"attention_decode8_{width}_{width}_float32"


@pytest.mark.parametrize("window", [1, 9, 64])
def test_float32_in_a_window(rng, nvidia_kernels, window):
    q, k, v = inputs(rng, (1, 2, 1, 50, 90, 64), mx.float32)
    y = run(lambda: mm.scaled_dot_product_attention(q, k, v, scale=0.1, window=window))
    assert_attention_right(y, None, exact_of(q, k, v, 0.1, None, None, window), mx.float32)
    assert nvidia_kernels()[0] == "attention_decode8_64_64_float32"


def test_blocks_that_a_mask_hides_are_skipped(rng, counted, native):
    """In float32 too, and where a row sees nothing at all."""
    q, k, v = inputs(rng, (1, 1, 1, 24, 1024, 64), mx.float32)
    seen = mx.zeros((24, 1024), mx.bool_)
    seen[:, 512:544] = True

    def bytes_loaded(mask):
        launches = counted(lambda: mm.scaled_dot_product_attention(q, k, v, scale=0.1, mask=mask), gpu="nvidia")
        return sum(counts["device_bytes_loaded"] for counts in launches)

    every = bytes_loaded(mx.ones((24, 1024), mx.bool_))
    assert bytes_loaded(seen) < 0.2 * every
    seen[5] = False
    assert bytes_loaded(seen) < 0.2 * every
    with mm.simulator.enabled(gpu="nvidia"):
        y = run(lambda: mm.scaled_dot_product_attention(q, k, v, scale=0.1, mask=seen))
    assert_attention_right(y, None, exact_of(q, k, v, 0.1, seen), mx.float32)


@pytest.mark.parametrize(
    "dtype, queries, keys, width, options, kernel",
    [
        (mx.float16, 16, 40, 64, {}, True),
        (mx.float16, 17, 40, 64, {}, False),
        (mx.bfloat16, 33, 1030, 64, {"mask": "causal"}, False),
        (mx.float16, 20, 1030, 64, {"mask": "causal"}, True),
        (mx.float16, 40, 200, 128, {"window": 50}, True),
        (mx.float16, 40, 199, 128, {"window": 50}, False),
        (mx.float32, 128, 130, 128, {}, True),
        (mx.float32, 129, 130, 128, {"mask": "causal"}, False),
        (mx.float32, 129, 130, 64, {"mask": "causal"}, True),
        (mx.float32, 129, 130, 64, {}, False),
    ],
)
def test_what_goes_to_mx(rng, lenient, nvidia_kernels, dtype, queries, keys, width, options, kernel):
    q, k, v = inputs(rng, (1, 2, 1, queries, keys, width), dtype)
    mm.stats(reset=True)
    y = run(lambda: mm.scaled_dot_product_attention(q, k, v, scale=width**-0.5, **options))
    reason = {"many queries where there are tensor cores": 1}
    assert mm.stats()["scaled_dot_product_attention"]["mx"] == ({} if kernel else reason)
    assert bool(nvidia_kernels()) == kernel
    mask = twin_mask(options.get("mask"), options.get("window"), queries, keys)
    twin = mx.fast.scaled_dot_product_attention(q, k, v, scale=width**-0.5, mask=mask)
    assert_attention_right(
        y, twin, exact_of(q, k, v, width**-0.5, options.get("mask"), None, options.get("window")), dtype
    )


@pytest.mark.parametrize(
    "keys, heads, window, kernel", [(2047, 1, None, 1), (2048, 1, None, 0), (2048, 2, None, 1), (2100, 1, 60, 1)]
)
def test_one_long_row_of_float32_goes_to_mx(rng, lenient, nvidia_kernels, keys, heads, window, kernel):
    q, k, v = inputs(rng, (1, heads, 1, 1, keys, 64), mx.float32)
    y = run(lambda: mm.scaled_dot_product_attention(q, k, v, scale=0.125, window=window))
    assert bool(nvidia_kernels()) == kernel
    assert_attention_right(y, None, exact_of(q, k, v, 0.125, None, None, window), mx.float32)


@pytest.mark.parametrize("bits, dtype", [(4, mx.float16), (8, mx.bfloat16)])
@pytest.mark.parametrize("queries, options", [(33, {"mask": "causal"}), (40, {"window": 30}), (32, {})])
def test_packed_keys_are_unpacked_for_mx(rng, lenient, nvidia_kernels, bits, dtype, queries, options):
    """Where its kernels win over keys that are not packed; the cache has room for more."""
    q, k, v = inputs(rng, (2, 4, 2, queries, 70, 64), dtype, outliers=False)
    caches = [
        [a[:, :, :70] for a in mx.quantize(mx.pad(a, [(0, 0), (0, 0), (0, 26), (0, 0)]), 32, bits)] for a in (k, v)
    ]
    y = run(
        lambda: mm.quantized_scaled_dot_product_attention(
            q, *caches, 0.125, group_size=32, bits=bits, **{"mask": None, **options}
        )
    )
    unpack = f"attention_unpack_{bits}bit_{str(dtype).rpartition('.')[2]}"
    assert (nvidia_kernels() == [unpack] * 2) == (queries > 32)
    exact = exact_of(
        q, *(dequantized(*cache, 32, bits) for cache in caches), 0.125, options.get("mask"), None, options.get("window")
    )
    mask = twin_mask(options.get("mask"), options.get("window"), queries, 70)
    k, v = (mx.dequantize(*cache, 32, bits) for cache in caches)
    twin = mx.fast.scaled_dot_product_attention(q, k, v, scale=0.125, mask=mask)
    assert_attention_right(y, twin, exact, dtype)


def test_force_fused_keeps_the_kernel(rng, lenient, nvidia_kernels):
    """In float32 mx may have none there."""
    q, k, v = inputs(rng, (1, 2, 1, 140, 150, 128), mx.float32)
    run(lambda: mm.scaled_dot_product_attention(q, k, v, scale=0.1, force_fused=True))
    assert nvidia_kernels()


def test_no_keys(rng, lenient, nvidia_kernels):
    q, k, v = inputs(rng, (1, 2, 1, 40, 0, 64), mx.float16)
    y = run(lambda: mm.scaled_dot_product_attention(q, k, v, scale=0.1))
    assert y.shape == q.shape and not mx.any(y)


@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
def test_apple_gpus_take_all(rng, lenient, native, dtype):
    q, k, v = inputs(rng, (1, 1, 1, 140, 150, 64), dtype)
    mm.stats(reset=True)
    with mm.simulator.enabled():
        run(lambda: mm.scaled_dot_product_attention(q, k, v, scale=0.1))
    assert mm.stats()["scaled_dot_product_attention"]["mx"] == {}
