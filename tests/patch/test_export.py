"""Exports of MLX: a function under the patch, or of modules of ours, is saved as mx's own primitives."""

import copy
import functools
import pathlib
import re
import subprocess
import sys
import threading

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from helpers import tiny
from helpers.tolerances import LAYERS, SUMS
from mlx_lm.models.cache import KVCache
from mlx_lm.sample_utils import make_sampler

import mlx_mittens as mm
import mlx_mittens.ops.custom  # which the package itself does not import
from mlx_mittens import _ext, specs
from mlx_mittens.patching import targets

pytestmark = pytest.mark.usefixtures("native")

SWITCHES = list(dict.fromkeys(target.switch for target in targets.TARGETS))


@pytest.fixture(autouse=True)
def undone():
    yield
    mm.unpatch()
    assert not _ext.exporting()


def primitives(function, *inputs) -> set[str]:
    """The names of the primitives that MLX would save."""
    entries = []
    mx.export_function(entries.append, function, *inputs)
    return {entry["name"] for entry in entries if entry["type"] == "primitive"}


def through_file(path, function, *inputs):
    mx.export_function(str(path), function, *inputs)
    return mx.import_function(str(path))(*inputs)


def through_exporter(path, function, *inputs):
    with mx.exporter(file=str(path), fun=function) as exporter:
        exporter(*inputs)
    return mx.import_function(str(path))(*inputs)


def assert_close(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(np.array(a), np.array(b), rtol=LAYERS, atol=SUMS * np.abs(np.array(b)).max())


@pytest.mark.parametrize("export", [through_file, through_exporter])
@pytest.mark.parametrize("bits", [4, None])
@pytest.mark.parametrize("name", ["llama-3.2-1b", "qwen3-0.6b"])
@pytest.mark.parametrize("ours", ["patched", "converted", "both", "strict"])
def test_a_model(rng, tmp_path, lenient, ours, name, bits, export):
    """Norms, rope, attention, products and all that becomes one kernel with another; afterwards it runs as before."""
    model = tiny.build(name, mx.float32, bits)
    tokens = mx.array(rng.integers(1, 300, (1, 7)))
    expected, names = model(tokens), primitives(model, tokens)
    if ours in ("converted", "both"):
        mm.nn.convert(model)
    if ours != "converted":
        mm.patch(strict=ours == "strict")
    before = model(tokens)
    mx.eval(before)
    mm.stats(reset=True)
    found = primitives(model, tokens)
    assert found - {"Concatenate", "Slice", "Split"} <= names, found
    assert_close(export(tmp_path / "model.mlxfn", model, tokens), [expected])
    assert not any(counts["kernels"] for counts in mm.stats(reset=True).values())
    mx.eval(model(tokens))
    counts = mm.stats()
    assert sum(counts["rms_norm"]["kernels"].values()) + sum(counts["add_rms_norm"]["kernels"].values()) > 0
    assert_close([model(tokens)], [expected])


@pytest.mark.parametrize("bits", [4, None])
@pytest.mark.parametrize("ours", ["patched", "converted"])
def test_a_mixture(rng, tmp_path, lenient, ours, bits):
    """The router and the products with chosen experts too."""
    model = tiny.build("gpt-oss-20b", mx.float32, bits)
    tokens = mx.array(rng.integers(1, 300, (1, 7)))
    expected, names = model(tokens), primitives(model, tokens)
    if ours == "converted":
        mm.nn.convert(model)
    mm.patch()
    found = primitives(model, tokens)
    assert found - {"Concatenate", "Slice", "Split"} <= names, found
    assert_close(through_file(tmp_path / "mixture.mlxfn", model, tokens), [expected])
    mm.stats(reset=True)
    mx.eval(model(tokens))
    counts = mm.stats()
    assert counts["gather_qmm" if bits else "gather_mm"]["kernels"] and counts["route_top_k"]["kernels"]


@pytest.mark.parametrize("export", [through_file, through_exporter])
@pytest.mark.parametrize("options", [{"temp": 0.0}, {"temp": 0.7}, {"temp": 0.7, "top_k": 5, "top_p": 0.9}], ids=str)
def test_a_sampler(rng, tmp_path, options, export):
    """It draws by the state that it found when it was exported."""
    logits = mx.array(rng.normal(size=(3, 40)).astype(np.float32))
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    with mm.patched():
        sampler = make_sampler(**options)
        assert not any("Mittens" in name for name in primitives(sampler, logprobs))
        mx.random.seed(5)
        (tokens,) = export(tmp_path / "sampler.mlxfn", sampler, logprobs)
        mx.random.seed(5)
        assert mx.array_equal(tokens, sampler(logprobs))


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("ours", ["patched", "converted"])
def test_a_cache_in_the_function(rng, tmp_path, ours, tokens, lenient):
    model = tiny.build("llama-3.2-1b", mx.float32, 4)
    buffers = [mx.array(rng.normal(size=(1, 2, 256, 64)).astype(np.float32)) for _ in range(4)]

    def step(tokens, *buffers):
        caches = [KVCache(), KVCache()]
        for cache, keys, values in zip(caches, buffers[::2], buffers[1::2], strict=True):
            cache.keys, cache.values, cache.offset = keys, values, 9
        y = model(tokens, cache=caches)
        return y, *(array for cache in caches for array in (cache.keys, cache.values))

    inputs = [mx.array(rng.integers(1, 300, (1, tokens))), *buffers]
    expected = step(*map(mx.array, inputs))
    mx.eval(expected)
    if ours == "patched":
        mm.patch()
    else:
        mm.nn.convert(model)
    assert not any("Mittens" in name for name in primitives(step, *inputs))
    assert_close(through_file(tmp_path / "step.mlxfn", step, *inputs), expected)


@pytest.mark.parametrize("shapeless", [True, False])
def test_a_quantized_model(rng, tmp_path, shapeless):
    """As in MLX's own tests."""
    model = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 128))
    nn.quantize(model)
    x = mx.array(rng.normal(size=(5, 128)).astype(np.float32))
    expected = model(x)
    mx.eval(expected)
    path = str(tmp_path / "quantized.mlxfn")
    for ours in (mm.nn.convert(copy.deepcopy(model)), model):
        with mm.patched():
            mx.export_function(path, ours, x, shapeless=shapeless)
        assert mx.array_equal(mx.import_function(path)(x)[0], expected)


def test_modules_of_ones_own(rng):
    x = mx.array(rng.normal(size=(2, 64)).astype(np.float32))
    shapes = {"RMSNorm": (64,), "LayerNorm": (64,), "Linear": (64, 8), "QuantizedLinear": (64, 8)}
    for name, shape in shapes.items():
        ours, theirs = (getattr(package, name)(*shape) for package in (mm.nn, nn))
        assert primitives(ours, x) == primitives(theirs, x)
    for name in ("Embedding", "QuantizedEmbedding"):
        ours, theirs = (getattr(package, name)(8, 64).as_linear for package in (mm.nn, nn))
        assert primitives(ours, x) == primitives(theirs, x)


def test_compiled_functions_and_gradients(rng, tmp_path):
    x = mx.array(rng.normal(size=(3, 64)).astype(np.float32))
    loss = lambda x: (mx.softmax(mx.fast.rms_norm(x + x, None, 1e-5), axis=-1) ** 2).sum()
    step = mx.compile(mx.grad(loss))
    expected = mx.grad(loss)(x)
    with mm.patched():
        mx.eval(step(x))  # there is a graph of our kernels
        assert_close(through_file(tmp_path / "step.mlxfn", step, x), [expected])


def draw(*shape):
    return mx.random.normal(shape)


DIRECT = {
    "rms_norm": lambda x: mm.rms_norm(x, None, 1e-5),
    "layer_norm": lambda x: mx.grad(lambda x: mm.layer_norm(x, None, None, 1e-5).sum())(x),
    "softmax": lambda x: mm.softmax(x, axis=-1),
    "sample": lambda x: mm.sample(x),
    "gather_mm": lambda x: mm.gather_mm(x, draw(2, 64, 8), rhs_indices=mx.array([[0, 1]])),
    "route_top_k": lambda x: mm.route_top_k(x, 2)[1],
    "gated_delta_update": lambda x: mm.gated_delta_update(*[x[None, None]] * 3, *[draw(1, 1, x.shape[0])] * 2)[0],
    "gated_delta_inputs": lambda x: mm.gated_delta_inputs(
        *[x[None, None]] * 2,
        draw(1, 1, x.shape[0], 1, 8),
        *[draw(1, 1, x.shape[0], 1)] * 2,
        draw(1, 3, 2 * x.size + 8 * x.shape[0]),
        draw(2 * x.size + 8 * x.shape[0], 4),
        *[draw(x.shape[0])] * 2,
    )[0],
    "gated_delta_token": lambda x: mm.gated_delta_token(
        *[x[None]] * 2,
        *[draw(1, x.shape[0], 1, 8)] * 2,
        *[draw(1, x.shape[0], 1)] * 2,
        draw(1, 3, 2 * x.size + 8 * x.shape[0]),
        draw(2 * x.size + 8 * x.shape[0], 4),
        *[draw(x.shape[0])] * 2,
        draw(8),
        draw(1, x.shape[0], 8, x.shape[1]),
    )[0],
    "short_conv_token": lambda x: mm.short_conv_token(
        mx.concatenate([x] * 3, axis=-1), draw(x.shape[0], 2, x.shape[1]), draw(x.shape[1], 3)
    )[0],
    "ssm_inputs": lambda x: mm.ssm_inputs(x[None], draw(1, 3, x.shape[1]), draw(x.shape[1], 4), None, x.shape[1] // 2)[
        0
    ],
    "ssm_token": lambda x: mm.ssm_token(
        mx.concatenate([x[:, :32], x, x[:, :1]], axis=-1),
        *(draw(x.shape[0], 3, x.shape[1]), draw(x.shape[1], 4), None, draw(1), draw(1), draw(1)),
        draw(x.shape[0], 1, 32, 16),
    )[0],
    "ssm_update": lambda x: mm.ssm_update(
        x[None, None],
        draw(x.shape[0]),
        *[draw(1, 1, 1, 8)] * 2,
        draw(x.shape[0]),
        draw(1, 1, x.shape[0]),
        draw(x.shape[0]),
    )[0],
    "add_rms_norm": lambda x: mm.add_rms_norm(x, x, None, 1e-5)[0],
    "gemv": lambda x: mm.gemv(draw(8, 64), x),
    "matmul": lambda x: mm.matmul(x, draw(8, 64)),
    "quantized_matmul": lambda x: mm.quantized_matmul(x, *mx.quantize(draw(8, 64))),
    "quantized_embedding": lambda x: mm.quantized_embedding(x.astype(mx.int32), *mx.quantize(draw(8, 64))),
    "quantized_matmuls": lambda x: mm.quantized_matmuls(x, [mx.quantize(draw(8, 64))] * 2)[0],
    "quantized_swiglu": lambda x: mm.quantized_swiglu(x, mx.quantize(draw(8, 64)), mx.quantize(draw(8, 64))),
    "block_masked_mm": lambda x: mm.block_masked_mm(x, draw(64, 8), mask_rhs=mx.array([[True]])),
    "block_matmul": lambda x: mm.block_matmul(x, mx.zeros((8, 68), mx.uint8), "q8_0"),
    "scaled_dot_product_attention": lambda x: mm.scaled_dot_product_attention(*[x[None, None]] * 3, scale=1.0),
    "cascade_attention": lambda x: mm.cascade_attention(*[x[None, None]] * 5, scale=1.0),
    "paged_attention": lambda x: mm.paged_attention(
        x[None, None], *[mx.zeros((2, 1, 16, 64))] * 2, mx.array([[0, 1]]), mx.array([20]), scale=1.0
    ),
    "paged_append": lambda x: mm.paged_append(
        *[x[None, None, :2]] * 2, *[mx.zeros((2, 1, 16, 64))] * 2, mx.array([[0, 1]]), mx.array([15])
    )[0],
    "index_scores": lambda x: mm.index_scores(x[None, None], x[None], x[None, :, :1]),
    "take_tokens": lambda x: mm.take_tokens(x[None, None], x[None, None], mx.array([[[1, 0]]]))[0],
    "rope_append": lambda x: mm.rope_append(
        mx.stack([x] * 3)[None, :, :2], *[mx.zeros((1, 1, 4, 64))] * 2, 64, base=1e4, offset=0
    )[0],
    "quantized_rope_append": lambda x: mm.quantized_rope_append(
        mx.stack([x] * 3)[None, :, :2], *[mx.quantize(mx.zeros((1, 1, 4, 64)))] * 2, 64, base=1e4, offset=0, bits=4
    )[0],
    "norm_add_norm": lambda x: mm.norm_add_norm(x, x, None, None, 1e-5)[0],
    "qk_norm": lambda x: mm.qk_norm(*[x[None, None]] * 2, None, None, 1e-5)[0],
    "softcap": lambda x: mm.softcap(x, 30.0),
    "block_quantize": lambda x: mm.block_quantize(x, "q8_0"),
    "block_dequantize": lambda x: mm.block_dequantize(mx.view(x, mx.uint8)[:, :34], "q8_0"),
    "gather_qmm": lambda x: mm.gather_qmm(x, *mx.quantize(draw(2, 8, 64)), rhs_indices=mx.array([[0, 1]])),
    "gather_swiglu": lambda x: mm.gather_swiglu(x, *[mx.quantize(draw(2, 8, 64))] * 2, rhs_indices=mx.array([[0, 1]])),
    "gather_sum": lambda x: mm.gather_sum(x[None], *mx.quantize(draw(2, 8, 64)), mx.array([[0, 1]]), mx.ones((1, 2))),
    "mixture": lambda x: mm.mixture(
        x,
        x[:, :2],
        1,
        *[mx.quantize(draw(2, 64, 64))] * 3,
        *[mx.quantize(draw(64, 64))] * 3,
        mx.zeros((len(x), 1)),
    ),
    "quantized_scaled_dot_product_attention": lambda x: mm.quantized_scaled_dot_product_attention(
        x[None, None], *[mx.quantize(x[None, None], bits=8)] * 2, 1.0
    ),
}


def test_every_op_is_called_directly():
    assert set(DIRECT) == {op.name for op in specs.OPS}


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("op", DIRECT)
def test_an_op_called_directly_says_so(lenient, tmp_path, op, patched):
    if patched:
        mm.patch()
    says = rf"\[export\] mlx_mittens\.{op} cannot be exported: .*mlx_mittens\.patch\(\)"
    for file in (str(tmp_path / "direct.mlxfn"), lambda entry: None):
        with pytest.raises(ValueError, match=says):
            mx.export_function(file, DIRECT[op], mx.ones((2, 64)))
    mm.stats(reset=True)
    mx.eval(mx.softmax(mx.ones((2, 64)), axis=-1))
    assert bool(mm.stats()) == patched


def test_names_of_primitives_are_those_of_functions():
    """Whatever primitive MLX comes upon, the message names a function that there is."""
    sources = pathlib.Path(__file__).parents[2] / "csrc"
    names = {name for file in sources.rglob("*.cpp") for name in re.findall(r'"Mittens(\w+)"', file.read_text())}
    assert {"RmsNorm", "CacheStep", "Launch"} <= names
    for name in names:
        what = _ext.what_makes(name)
        if what != "an op of mlx_mittens":
            package, *path = what.split(".")
            assert package == "mlx_mittens" and callable(functools.reduce(getattr, path, mm)), (name, what)
    assert _ext.what_makes("CacheStep") == "mlx_mittens.rope_append"
    assert _ext.what_makes("GatherMmVjp") == "mlx_mittens.gather_mm"
    assert _ext.what_makes("RmsNormVjp") == "an op of mlx_mittens"  # of rms_norm or of add_rms_norm


def test_other_errors_of_an_export_stay_mlx_s(tmp_path):
    with mm.patched(), pytest.raises(ZeroDivisionError):
        mx.export_function(str(tmp_path / "f.mlxfn"), lambda x: 1 / 0, mx.ones(3))
    for bad in ((3, mx.ones(3)), (lambda x: x, 3), (lambda x: 3, mx.ones(3))):
        errors = []
        for context in (mm.patched(), mm.patched(**dict.fromkeys(SWITCHES, False))):
            with context, pytest.raises((TypeError, ValueError)) as raised:
                mx.export_function(str(tmp_path / "f.mlxfn"), *bad)
            errors.append((raised.type, str(raised.value).partition("Invoked")[0]))
        assert errors[0] == errors[1]


def test_other_threads_keep_their_kernels(rng):
    x = mx.array(rng.normal(size=(4, 64)).astype(np.float32))
    traced, counted = threading.Event(), threading.Event()

    def function(x):
        traced.set()
        assert counted.wait(60)
        return mx.softmax(x, axis=-1)

    names = []
    with mm.patched():
        thread = threading.Thread(target=lambda: names.append(primitives(function, x)))
        thread.start()
        assert traced.wait(60)
        mm.stats(reset=True)
        mx.eval(mx.softmax(x, axis=-1))
        counts = mm.stats()
        counted.set()
        thread.join()
    assert list(counts) == ["softmax"] and names == [{"Softmax"}]


def test_mx_s_functions_are_replaced_while_that_is_needed():
    """By the patch until it is undone, by modules for good; the import alone replaces nothing."""
    code = (
        "import mlx.core as mx\n"
        "theirs = mx.export_function, mx.exporter\n"
        "now = lambda: tuple(a is b for a, b in zip((mx.export_function, mx.exporter), theirs))\n"
        "import mlx_mittens as mm, mlx.nn as nn\n"
        "assert now() == (True, True)\n"
        "mm.patch(); mm.patch(); assert now() == (False, False)\n"
        "mm.unpatch(); assert now() == (True, True)\n"
        "with mm.patched(): assert now() == (False, False)\n"
        "assert now() == (True, True)\n"
        "mm.nn.convert(nn.Linear(4, 4)) if {} else mm.nn.Linear(4, 4)\n"
        "assert now() == (False, False)\n"
        "mm.patch(); mm.unpatch(); assert now() == (False, False)\n"
        "assert mx.export_function.__doc__ == theirs[0].__doc__\n"
    )
    for converts in (True, False):
        subprocess.run([sys.executable, "-c", code.format(converts)], check=True)


def test_kernels_of_the_simulator(rng):
    """mx.fast.metal_kernel is MLX's own while it exports."""
    source = "uint i = thread_position_in_grid.x; y[i] = 2 * x[i];"

    def doubled(kernel, x):
        return kernel(
            inputs=[x], output_shapes=[x.shape], output_dtypes=[x.dtype], grid=(8, 1, 1), threadgroup=(8, 1, 1)
        )[0]

    with mm.simulator.enabled(), mm.patched():
        theirs = mx.fast.metal_kernel("doubled", ["x"], ["y"], source)
        assert primitives(lambda x: doubled(theirs, x), mx.ones(8)) == {"CustomKernel"}
        ours = mm.simulator.metal_kernel("doubled", ["x"], ["y"], source)
        with pytest.raises(ValueError, match=r"\[export\] mlx_mittens\.simulator\.metal_kernel cannot be exported"):
            primitives(lambda x: doubled(ours, x), mx.ones(8))
