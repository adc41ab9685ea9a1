"""What the attention kernels move and multiply, counted by the simulator, against the least that their tiles need."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_mittens as mm

TILE = 8


def arrays(rng, heads, key_heads, queries, keys, width, dtype=mx.float16):
    shapes = [(1, heads, queries, width), (1, key_heads, keys, width), (1, key_heads, keys, width)]
    drawn = [mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype) for shape in shapes]
    mx.eval(drawn)
    return drawn


def attend(arrays, **options):
    return lambda: mm.scaled_dot_product_attention(*arrays, scale=0.1, **options)


def prefill(counted, arrays, **options):
    (counts,) = counted(attend(arrays, **options))
    return counts


@pytest.mark.parametrize("width, rows", [(64, 16), (128, 8), (80, 8), (256, 8)])
def test_prefill_does_the_least_its_tiles_need(rng, counted, width, rows):
    """Each simdgroup reads every key and value once for its rows, and no product is computed twice."""
    heads, queries, keys = 2, 128, 160
    counts = prefill(counted, arrays(rng, heads, 1, queries, keys, width))
    assert counts["matrix_operations"] == 2 * heads * (queries // TILE) * (keys // TILE) * (width // TILE)
    row = 2 * width
    assert counts["device_bytes_loaded"] <= 1.01 * heads * row * (queries // rows * 2 * keys + queries)
    assert counts["device_bytes_stored"] == heads * queries * row
    assert counts["threadgroup_barriers"] == 0 and counts["threadgroup_bytes"] == 0


@pytest.mark.parametrize("width, tokens", [(64, 2048), (128, 1024)])
def test_a_causal_prompt_costs_half(rng, counted, width, tokens):
    drawn = arrays(rng, 1, 1, tokens, tokens, width)
    causal, full = prefill(counted, drawn, mask="causal"), prefill(counted, drawn)
    for name in ("device_bytes_loaded", "matrix_operations"):
        assert causal[name] <= 0.56 * full[name]


def test_keys_outside_the_window_are_not_read(rng, counted):
    window, keys, rows, block = 64, 1024, 8, 32
    counts = prefill(counted, arrays(rng, 1, 1, 512, keys, 128), window=window)
    blocks = (window + rows - 1 + 2 * (block - 1)) // block  # that a simdgroup's rows can touch
    assert counts["matrix_operations"] <= 2 * (512 // rows) * blocks * (block // TILE) * (128 // TILE)


def test_blocks_of_a_mask_that_hide_all_are_skipped(rng, counted):
    drawn = arrays(rng, 1, 1, 64, 512, 128)
    seen = np.zeros((64, 512), bool)
    seen[:, 96:160] = True
    counts, full = prefill(counted, drawn, mask=mx.array(seen)), prefill(counted, drawn)
    assert counts["matrix_operations"] * 8 == full["matrix_operations"]


# 16 heads of 256 elements are shared by two threadgroups: their sums do not fit the registers of one.
@pytest.mark.parametrize(
    "ratio, width", [(ratio, width) for ratio in (1, 2, 4, 8, 16) for width in (64, 128, 256) if ratio * width <= 2048]
)
def test_decode_reads_each_key_and_value_once(rng, counted, ratio, width):
    """For all heads of a group together; only what they add up to goes through memory again."""
    key_heads, keys = 2, 1024
    heads = key_heads * ratio
    first, second = counted(attend(arrays(rng, heads, key_heads, 1, keys, width)))
    cache = key_heads * keys * 2 * width * 2
    queries = first["device_bytes_loaded"] - cache
    threadgroups = first["threads"] // 128
    assert 0 <= queries <= threadgroups * ratio * width * 2
    assert second["device_bytes_stored"] == heads * width * 2
    assert first["device_bytes_stored"] == threadgroups * ratio * (width + 2) * 4


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("ratio", [1, 4, 8])
def test_packed_decode_reads_the_cache_once(rng, counted, ratio, bits):
    key_heads, keys, width, group = 2, 512, 128, 64
    q, k, v = arrays(rng, key_heads * ratio, key_heads, 1, keys, width)
    packed = [mx.quantize(a, group_size=group, bits=bits) for a in (k, v)]
    mx.eval(packed)
    counts = counted(
        lambda: mm.quantized_scaled_dot_product_attention(q, *packed, 0.1, None, group_size=group, bits=bits)
    )[0]
    words = sum(part[0].nbytes for part in packed)
    # A lane has 8 elements, which share a scale and a bias with those of 7 others.
    scales = key_heads * keys * 2 * (width // 8) * 4
    queries = counts["device_bytes_loaded"] - words - scales
    assert 0 <= queries <= counts["threads"] // 128 * ratio * width * 2


def test_lanes_share_lines(rng, counted):
    """What a simdgroup loads of keys and values at once fills the lines that it touches."""
    counts = counted(attend(arrays(rng, 4, 1, 1, 1024, 128)))[0]
    if counts["device_lines_fewest"]:
        assert counts["device_lines"] <= 1.05 * counts["device_lines_fewest"]
