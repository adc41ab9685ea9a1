"""Models on a machine where mx is faster at everything: a calibration leaves no call of theirs to our kernels."""

import contextlib

import mlx.core as mx
import pytest
from helpers import tiny

import mlx_mittens as mm
from mlx_mittens import _ext
from mlx_mittens.calibration import grid

pytestmark = pytest.mark.usefixtures("native", "lenient")

MODELS = [*tiny.FAMILIES, "qwen3-30b-a3b", "qwen3-next-80b-a3b"]
REASON = "a problem that mx computes faster, as measured on this machine"


@pytest.fixture
def faster_mx():
    _ext.calibration_force((True, "", 0))
    yield
    _ext.calibration_force(None)


def on_kernels():
    return {op: counts["kernels"] for op, counts in measured().items() if counts["kernels"]}


def measured():
    """Runs of ops that a calibration measures: others are one launch for many of mx's on every machine."""
    return {op: counts for op, counts in mm.stats().items() if op not in grid.ASK_NOTHING}


def generate(model, prompt, **options):
    mm.stats(reset=True)
    return tiny.tokens(model, prompt, 6, **options)


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("name", MODELS)
def test_no_kernel_runs(name, bits, rng, faster_mx):
    model, prompt = tiny.build(name, mx.float32, bits), rng.integers(1, 300, 9).tolist()
    theirs = generate(model, prompt)
    with mm.patched():
        assert generate(model, prompt) == theirs and not on_kernels()
        assert all(REASON in counts["mx"] for counts in measured().values())
    mm.nn.convert(model)
    assert generate(model, prompt) == theirs and not on_kernels()


@pytest.mark.parametrize("convert", [False, True], ids=["patched", "converted"])
def test_a_quantized_cache(convert, rng, faster_mx):
    model, prompt = tiny.build("llama-3.2-1b", mx.float32), rng.integers(1, 300, 9).tolist()
    options = {"kv_bits": 8, "kv_group_size": 64, "quantized_kv_start": 4}
    theirs = generate(model, prompt, **options)
    if convert:
        mm.nn.convert(model)
        assert generate(model, prompt, **options) == theirs
    else:
        with mm.patched():
            assert generate(model, prompt, **options) == theirs
    assert set(on_kernels()) <= {"quantized_rope_append"}  # which is not measured
    assert "quantized_scaled_dot_product_attention" in mm.stats()


def test_a_strict_patch_asks_for_the_kernels(rng, faster_mx):
    model, prompt = tiny.build("qwen3-0.6b", mx.float32, 4), rng.integers(1, 300, 9).tolist()
    with mm.patched(strict=True):
        generate(model, prompt)
    assert {"rope_append", "scaled_dot_product_attention", "quantized_matmul"} <= on_kernels().keys()
    assert not any(REASON in counts["mx"] for counts in mm.stats().values())


@pytest.fixture
def rows_of():
    """Has a calibration give some ops' calls to mx, for all calls that a function makes."""

    def make(ops, function):
        _ext.calibration_record(True)
        function()
        asked = _ext.calibration_record(False)
        rows = {(op, dtype, format, tuple(sizes)) for op, dtype, format, sizes, *_ in asked if op in ops}
        _ext.calibration_load("cpu", [(*row, True, "", 0) for row in rows])

    yield make
    _ext.calibration_load("cpu", [])


@pytest.mark.parametrize("to_mx", [None, "rope_append", "scaled_dot_product_attention"])
@pytest.mark.parametrize("convert", [False, True], ids=["patched", "converted"])
@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-0.6b"])
def test_a_layer_counts_one_append_and_one_attention_for_a_token(name, convert, to_mx, rng, rows_of):
    """Also where one of the two is mx's, and with norms of heads."""
    model, prompt = tiny.build(name, mx.float32), rng.integers(1, 300, 9).tolist()
    if convert:
        mm.nn.convert(model)

    def run(count):
        with contextlib.nullcontext() if convert else mm.patched():
            mm.stats(reset=True)
            tiny.tokens(model, prompt, count)
        return {op: (sum(ran["kernels"].values()), sum(ran["mx"].values())) for op, ran in mm.stats().items()}

    rows_of([to_mx], lambda: run(9))
    few, many = run(5), run(9)
    for op in ("rope_append", "scaled_dot_product_attention"):
        more = tuple(b - a for a, b in zip(few[op], many[op]))
        assert more == ((0, 4 * len(model.layers)) if op == to_mx else (4 * len(model.layers), 0)), op
