"""What the attention kernels move and multiply, counted by the simulator, against the least that their tiles need."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_mittens as mm

TILE = 8
SIMDGROUPS = 4


def arrays(rng, heads, key_heads, queries, keys, width, dtype=mx.float16):
    shapes = [(1, heads, queries, width), (1, key_heads, keys, width), (1, key_heads, keys, width)]
    drawn = [mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype) for shape in shapes]
    mx.eval(drawn)
    return drawn


def attend(arrays, **options):
    return lambda: mm.scaled_dot_product_attention(*arrays, scale=0.1, **options)


def prompt(counted, arrays, **options):
    """Of the kernel that reads keys and values; what splits leave may be put together by another."""
    return counted(attend(arrays, **options))[0]


@pytest.mark.parametrize(
    "width, rows, dtype", [(64, 16, mx.float32), (128, 8, mx.float32), (80, 8, mx.float16), (256, 8, mx.float16)]
)
def test_prefill_does_the_least_its_tiles_need(rng, counted, width, rows, dtype):
    """Each simdgroup reads every key and value once for its rows, and no product is computed twice."""
    heads, queries, keys = 2, 128, 160
    counts = prompt(counted, arrays(rng, heads, 1, queries, keys, width, dtype))
    assert counts["matrix_operations"] == 2 * heads * (queries // TILE) * (keys // TILE) * (width // TILE)
    row = dtype.size * width
    assert counts["device_bytes_loaded"] <= 1.01 * heads * row * (queries // rows * 2 * keys + queries)
    assert counts["device_bytes_stored"] == heads * queries * row
    assert counts["threadgroup_barriers"] == 0 and counts["threadgroup_bytes"] == 0


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype, rows", [(mx.float16, 16), (mx.float32, 8)])
def test_a_prompt_by_tiles_reads_each_key_once_for_its_rows(rng, counted, width, dtype, rows):
    """The simdgroups of a threadgroup share out the keys. Each reads the queries (in float32 one reads them for all),
    and no product is computed twice."""
    heads, queries, keys = 2, 128, 160
    drawn = arrays(rng, heads, 1, queries, keys, width, dtype)
    counts = counted(attend(drawn), gpu="nvidia")[0]
    assert counts["matrix_operations"] == 2 * heads * (queries // TILE) * (keys // TILE) * (width // TILE)
    readers = 1 if dtype == mx.float32 else counts["threads"] // 32 // (heads * queries // rows)
    row = dtype.size * width
    assert counts["device_bytes_loaded"] <= 1.01 * heads * row * (queries // rows * 2 * keys + readers * queries)
    assert counts["bank_conflicts"] == 0


@pytest.mark.parametrize("width, tokens", [(64, 2048), (128, 1024)])
def test_a_causal_prompt_costs_half(rng, counted, width, tokens):
    drawn = arrays(rng, 1, 1, tokens, tokens, width)
    causal, full = prompt(counted, drawn, mask="causal"), prompt(counted, drawn)
    for name in ("device_bytes_loaded", "matrix_operations"):
        assert causal[name] <= 0.56 * full[name]


@pytest.mark.parametrize("width, rows, block", [(128, 16, 8), (80, 8, 16)])
def test_keys_outside_the_window_are_not_read(rng, counted, width, rows, block):
    window, queries, keys = 64, 512, 1024
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


def test_a_row_that_sees_nothing_brings_back_what_was_skipped(rng, counted):
    """It has the mean of all values."""
    drawn = arrays(rng, 1, 1, 64, 512, 128)
    seen = np.zeros((64, 512), bool)
    seen[1:, 96:160] = True
    counts, full = prompt(counted, drawn, mask=mx.array(seen)), prompt(counted, drawn)
    blocks = 64 // 16
    assert counts["matrix_operations"] == full["matrix_operations"] // blocks * (1 + blocks / 8)


@pytest.mark.parametrize(
    "what, queries, width",
    [("key", 64, 96), *((what, *shape) for what in ("key", "value") for shape in ((64, 128), (1, 64), (1, 128)))],
)
@pytest.mark.parametrize("heads", [2, 8])
def test_nan_that_all_rows_see_costs_little(rng, counted, heads, queries, width, what):
    """What is NaN whatever else a row sees is not summed up to the end."""
    q, k, v = arrays(rng, heads, 1, queries, 256, width)
    clean = counted(attend((q, k, v), mask="causal"))
    if what == "key":
        k[:, :, 0] = float("nan")
    else:
        v[:, :, 0] = float("nan")
    spoilt = counted(attend((q, k, v), mask="causal"))
    least, bytes_loaded = (sum(counts["device_bytes_loaded"] for counts in each) for each in (clean, spoilt))
    assert bytes_loaded <= (1.01 if what == "key" else 2.5) * least


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
    readers = (
        SIMDGROUPS if ratio > 2 and width <= 128 else 1
    )  # where products are of matrices, each has its own queries
    assert 0 <= queries <= threadgroups * readers * ratio * width * 2
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
    # A lane has 8 elements, in products of matrices 16, which share a scale and a bias with those of others.
    scales = key_heads * keys * 2 * (width // (16 if ratio > 1 else 8)) * 4
    queries = counts["device_bytes_loaded"] - words - scales
    assert 0 <= queries <= counts["threads"] // 32 * ratio * width * 2


# A matrix of 8 keys is loaded by half lines, of which the next load has the other half: twice as many for the keys.
@pytest.mark.parametrize("ratio, most", [(1, 1.05), (4, 1.5)])
def test_lanes_share_lines(rng, counted, ratio, most):
    """What a simdgroup loads of keys and values at once fills the lines that it touches."""
    counts = counted(attend(arrays(rng, ratio, 1, 1, 1024, 128)))[0]
    assert counts["device_lines"] <= most * counts["device_lines_fewest"]
