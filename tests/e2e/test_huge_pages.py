"""Weights that tokens read again and again get pages of 2 MB, and stay unchanged."""

import platform
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import mlx_mittens as mm
from mlx_mittens import _ext

MODES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
MOST_CALLS = 10000  # pages are made in a small share of the time
COLUMNS, OUTPUTS = 2048, 8192
KEPT = []  # no weights come to an address where others were


def allowed():
    """Whether this system makes such pages when it is asked."""
    release = tuple(int(part) for part in platform.release().split(".")[:2]) if platform.system() == "Linux" else (0, 0)
    return release >= (6, 1) and MODES.exists() and "[never]" not in MODES.read_text()


def pages_of(call, wanted, most_calls):
    """Pages made until there are those wanted; all calls have the result of the first."""
    before = _ext.cpu_huge_pages_made()
    first = np.array(call(), copy=True)
    for _ in range(most_calls):
        if (made := _ext.cpu_huge_pages_made() - before) >= wanted:
            break
        np.testing.assert_array_equal(np.array(call()), first)
    return made


@pytest.mark.parametrize("form", ["dense", "quantized", "swiglu", "blocks"])
def test_weights_of_a_token_get_them(form):
    w = mx.random.normal((OUTPUTS, COLUMNS), key=mx.random.key(1), stream=mx.cpu).astype(mx.float16, stream=mx.cpu)
    x = mx.random.normal((1, COLUMNS), key=mx.random.key(2), stream=mx.cpu).astype(mx.float16, stream=mx.cpu)
    quantized = mx.quantize(w, stream=mx.cpu)
    blocks = mm.block_quantize(w, "q4_0", stream=mx.cpu)
    mx.eval(w, x, quantized, blocks)
    KEPT.append((w, quantized, blocks))
    calls = {
        "dense": lambda: mm.matmul(x, w, stream=mx.cpu),
        "quantized": lambda: mm.quantized_matmul(x, *quantized, stream=mx.cpu),
        "swiglu": lambda: mm.quantized_swiglu(x, quantized, quantized, stream=mx.cpu),
        "blocks": lambda: mm.block_matmul(x, blocks, "q4_0", stream=mx.cpu),
    }
    bytes_of = {
        "dense": w.nbytes,
        "quantized": quantized[0].nbytes,
        "swiglu": quantized[0].nbytes,
        "blocks": blocks.nbytes,
    }
    if allowed():
        # The first and the last may reach beyond the mapping.
        wanted = bytes_of[form] // (2 << 20) - 1
        assert pages_of(calls[form], wanted, MOST_CALLS) >= wanted
    else:
        assert pages_of(calls[form], 1, 40) == 0


@pytest.mark.parametrize(("rows", "outputs"), [(9, OUTPUTS), (1, 64)])
def test_a_prompt_and_small_weights_ask_for_none(rows, outputs):
    w = mx.quantize(mx.zeros((outputs, COLUMNS), mx.float16, stream=mx.cpu), stream=mx.cpu)
    x = mx.ones((rows, COLUMNS), mx.float16, stream=mx.cpu)
    mx.eval(w, x)
    KEPT.append(w)
    assert pages_of(lambda: mm.quantized_matmul(x, *w, stream=mx.cpu), 1, 40) == 0


def test_weights_read_twice_ask_for_none():
    w = mx.quantize(mx.zeros((OUTPUTS, COLUMNS), mx.float16, stream=mx.cpu), stream=mx.cpu)
    x = mx.ones((1, COLUMNS), mx.float16, stream=mx.cpu)
    mx.eval(w, x)
    KEPT.append(w)
    before = _ext.cpu_huge_pages_made()
    for _ in range(2):
        mx.eval(mm.quantized_matmul(x, *w, stream=mx.cpu))
    assert _ext.cpu_huge_pages_made() == before
