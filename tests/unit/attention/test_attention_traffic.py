"""Bytes and products of the attention kernels, counted by the simulator, against the least that their tiles need."""

from functools import partial

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


def prompt(counted, arrays, **options):
    """Of the kernel that reads keys and values; another may join the results of splits."""
    return counted(attend(arrays, **options))[0]


@pytest.mark.parametrize("gpu", ["apple", "nvidia"])
@pytest.mark.parametrize(
    "width, dtype", [(64, mx.float32), (128, mx.float32), (128, mx.float16), (80, mx.float16), (256, mx.float16)]
)
def test_prompts_do_the_least_their_tiles_need(rng, counted, width, dtype, gpu):
    """Each simdgroup reads every key and value once for its rows, and no product is computed twice."""
    heads, queries, keys = 2, 128, 160
    counts = counted(attend(arrays(rng, heads, 1, queries, keys, width, dtype)), gpu=gpu)[0]
    ahead = gpu == "nvidia" and width in (64, 128)
    rows = 2 * TILE if ahead and dtype != mx.float32 else TILE  # of a simdgroup, or of all that share keys
    assert counts["matrix_operations"] == 2 * heads * (queries // TILE) * (keys // TILE) * (width // TILE)
    row = dtype.size * width
    assert counts["device_bytes_loaded"] <= 1.01 * heads * row * (queries // rows * 2 * keys + queries)
    assert counts["device_bytes_stored"] == heads * queries * row
    assert ahead or counts["threadgroup_barriers"] == counts["bank_conflicts"] == 0


@pytest.mark.parametrize("width, tokens", [(64, 1024), (128, 1024)])
def test_a_causal_prompt_costs_half(rng, counted, width, tokens):
    drawn = arrays(rng, 1, 1, tokens, tokens, width)
    causal, full = prompt(counted, drawn, mask="causal"), prompt(counted, drawn)
    for name in ("device_bytes_loaded", "matrix_operations"):
        assert causal[name] <= 0.56 * full[name]


@pytest.mark.parametrize("width, block", [(128, 8), (64, 16)])
def test_keys_outside_the_window_are_not_read(rng, counted, width, block):
    window, queries, keys, rows = 64, 512, 1024, 8
    counts = prompt(counted, arrays(rng, 1, 1, queries, keys, width), window=window)
    blocks = (window + rows - 1 + 2 * (block - 1)) // block  # that a simdgroup's rows can touch
    assert counts["matrix_operations"] <= 2 * (queries // TILE) * blocks * (block // TILE) * (width // TILE)


@pytest.mark.parametrize("width", [128, 80])
def test_blocks_of_a_mask_that_hide_all_are_skipped(rng, counted, width):
    drawn = arrays(rng, 1, 1, 64, 512, width)
    seen = np.zeros((64, 512), bool)
    seen[:, 96:160] = True
    counts, full = prompt(counted, drawn, mask=mx.array(seen)), prompt(counted, drawn)
    assert counts["matrix_operations"] * 8 == full["matrix_operations"]


def test_a_row_that_sees_nothing_costs_nothing(rng, counted):
    drawn = arrays(rng, 1, 1, 64, 512, 128)
    seen = np.zeros((64, 512), bool)
    seen[1:, 96:160] = True
    counts, full = prompt(counted, drawn, mask=mx.array(seen)), prompt(counted, drawn)
    assert counts["matrix_operations"] * 8 == full["matrix_operations"]


@pytest.mark.parametrize(
    "what, queries, width",
    [("key", 64, 96), *((what, *shape) for what in ("key", "value") for shape in ((64, 128), (1, 64), (1, 128)))],
)
@pytest.mark.parametrize("heads", [2, 8])
def test_nan_that_all_rows_see_costs_little(rng, counted, heads, queries, width, what):
    """A row that is NaN in any case is not summed up to the end."""
    q, k, v = arrays(rng, heads, 1, queries, 256, width)
    clean = counted(attend((q, k, v), mask="causal"))
    if what == "key":
        k[:, :, 0] = float("nan")
    else:
        v[:, :, 0] = float("nan")
    spoilt = counted(attend((q, k, v), mask="causal"))
    least, bytes_loaded = (sum(counts["device_bytes_loaded"] for counts in each) for each in (clean, spoilt))
    assert bytes_loaded <= (1.01 if what == "key" else 2.5) * least


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("ratio", [1, 2, 4, 8, 16])
def test_decode_reads_each_key_and_value_once(rng, counted, ratio, width):
    """For 8 heads of a group together; only their sums go through memory again."""
    key_heads, keys = 2, 1024
    heads, blocks = key_heads * ratio, -(-ratio // TILE)
    first, second = counted(attend(arrays(rng, heads, key_heads, 1, keys, width)))
    cache = key_heads * keys * 2 * width * 2
    threadgroups = first["threads"] // 128
    queries = first["device_bytes_loaded"] - blocks * cache
    assert queries == threadgroups * ratio // blocks * width * 2
    assert second["device_bytes_stored"] == heads * width * 2
    assert first["device_bytes_stored"] == threadgroups * ratio // blocks * (width + 2) * 4


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
    # A lane's run of 16 elements, of 4-bit keys 32, has a scale and a bias.
    runs = width // (32 if bits == 4 else 16) + width // 16
    queries = counts["device_bytes_loaded"] - words - key_heads * keys * runs * 4
    assert queries == counts["threads"] // 128 * ratio * width * 2


@pytest.mark.parametrize("ratio", [1, 4])
def test_lanes_share_lines(rng, counted, ratio):
    """A simdgroup's load of values fills the lines that it touches. Eight keys are loaded by half lines, and the next
    load has the other halves."""
    counts = counted(attend(arrays(rng, ratio, 1, 1, 1024, 128)))[0]
    assert counts["device_lines"] <= 1.5 * counts["device_lines_fewest"]


@pytest.mark.parametrize("bits, queries", [(8, 1), (0, 24)])
def test_rows_of_a_batch_read_their_own_keys_alone(rng, counted, bits, queries):
    """As many bytes as each row's keys have, and not as many as the longest row's."""
    lengths, keys, width = (40, 512, 120, 256), 512, 64
    q, k, v = (
        mx.array(rng.standard_normal((4, heads, tokens, width)).astype(np.float32)).astype(mx.float16)
        for heads, tokens in ((2, queries), (1, keys), (1, keys))
    )
    starts = mx.array([keys - length for length in lengths])
    attend = partial(mm.scaled_dot_product_attention, scale=0.1)
    if bits:
        k, v = (mx.quantize(a, 64, bits) for a in (k, v))
        attend = partial(mm.quantized_scaled_dot_product_attention, scale=0.1, group_size=64, bits=bits)
    mx.eval(q, k, v, starts)
    counts = counted(lambda: attend(q, k, v, mask="causal", starts=starts))[0]
    full = counted(lambda: attend(q, k, v, mask="causal"))[0]
    assert counts["device_bytes_loaded"] <= 1.15 * sum(lengths) / (4 * keys) * full["device_bytes_loaded"]
    assert counts["matrix_operations"] <= 1.15 * sum(lengths) / (4 * keys) * full["matrix_operations"]
