"""`mm.supports` predicts the counts of stats() after the call: for every op of the table, and its gradients."""

import math
import os
import subprocess
import sys

import mlx.core as mx
import pytest
from helpers.support import as_list

import mlx_mittens as mm
from mlx_mittens import _ext, gpus, specs, support, switches


def stand_in(array):
    return None if array is None else _ext.stand_in(array.shape, array.dtype)


def assert_says_what_runs(op, case, dtype, rng):
    arrays, cotangents = op.draw(rng, case, dtype), op.cotangents(rng, case, dtype)
    mx.eval([a for a in [*arrays, *cotangents] if a is not None])
    like, like_cotangents = [stand_in(a) for a in arrays], [stand_in(a) for a in cotangents]
    said = support.answer(op.name, lambda: specs.run(op, op.ours, case, like, like_cotangents))
    mm.stats(reset=True)
    results = specs.run(op, op.ours, case, arrays, cotangents)
    del arrays, cotangents  # of buffers that someone needs the op makes copies
    mx.eval(results)
    counts = mm.stats(reset=True)
    assert said.counts == counts, (op.name, case.name, dtype)
    assert (
        said.how == "kernel"
        or not counts
        or said.reason
        or any("native composed" in c["kernels"] for c in counts.values())
    )


@pytest.fixture
def fresh():
    mm.stats(reset=True)
    yield
    mm.stats(reset=True)


@pytest.mark.parametrize("name", [op.name for op in specs.OPS])
def test_native(name, native, lenient, fresh, rng):
    op = specs.get(name)
    for case in op.checks():
        dtypes = list(op.dtypes(case))
        assert_says_what_runs(op, case, specs.DTYPES[dtypes[int(rng.integers(len(dtypes)))]], rng)


def smallest(op):
    """For results and for gradients the case that has the fewest elements."""
    for vjp in (False, True):
        cases = [case for case in op.checks() if case.vjp == vjp and not case.gpu_only]
        if cases:
            yield min(cases, key=lambda case: sum(math.prod(shape) for shape in op.shapes(case)))


@pytest.mark.parametrize("gpu", ["m1", "m5", "h200"])
@pytest.mark.parametrize("name", [op.name for op in specs.OPS])
def test_simulated(name, gpu, native, lenient, fresh, rng):
    op = specs.get(name)
    with mm.simulator.enabled(gpu=gpu):
        for case in smallest(op):
            if (case.gpu == "nvidia") == (gpus.named(gpu).vendor == "nvidia"):
                assert_says_what_runs(op, case, specs.DTYPES[next(iter(op.dtypes(case)))], rng)


def test_plans_of_large_shapes(native, lenient):
    """Which nothing here could run."""
    with mm.simulator.enabled(gpu="m2-max"):
        many = mm.supports("softmax", shapes=[(1 << 14, 1 << 17)], dtype=mx.float16, axis=-1)
        assert many.counts == {"softmax": {"kernels": {"simulator softmax_looped_float16": 1}, "mx": {}}}
        cache = [(1, 8, 1 << 20, 128)] * 2
        said = mm.supports("scaled_dot_product_attention", shapes=[(1, 32, 1, 128), *cache], dtype=mx.bfloat16, scale=1)
        assert said and any("attention_combine" in kernel for kernel in said.counts[said.op]["kernels"])


def test_left_to_mx(native, lenient):
    said = mm.supports("softmax", shapes=[(4, 8)], dtype=mx.complex64, axis=-1)
    assert (said.how, said.reason, bool(said)) == ("mx", "complex64", False)
    assert said.counts == {"softmax": {"kernels": {}, "mx": {"complex64": 1}}}


def test_strict_mode_is_no_error(native):
    assert mm.supports("softmax", shapes=[(4, 8)], dtype=mx.complex64, axis=-1).reason == "complex64"


def test_composed_of_other_ops(native, lenient):
    """A weight of a wider type makes two ops of one."""
    shapes = [(4, 8), (4, 8), ((8,), mx.float32), None]
    said = mm.supports("norm_add_norm", shapes=shapes, dtype=mx.float16, eps=1e-5)
    assert set(said.counts) == {"rms_norm", "add_rms_norm"} and said


def test_arguments(native, lenient):
    w, scales, biases = mx.quantize(mx.ones((64, 128), mx.float16), bits=4)
    sizes = [(w.shape, w.dtype), (scales.shape, scales.dtype), (biases.shape, biases.dtype)]
    said = mm.supports("quantized_matmul", shapes=[(1, 128), *sizes], dtype=mx.float16, bits=4)
    assert said == mm.supports("quantized_matmul", shapes=[mx.ones((1, 128), mx.float16), w, scales, biases], bits=4)
    assert said and said.counts["quantized_matmul"]["kernels"] == {f"native {_ext.cpu_instructions}": 1}
    assert mm.supports("quantized_swiglu", shapes=[(1, 128), sizes, sizes], dtype=mx.float16, bits=4)
    assert mm.supports("rms_norm", shapes=[(2, 8)], weight=mx.ones(8), eps=1e-5, device=mx.cpu)


def test_gradients(native, lenient):
    said = mm.supports("softmax", shapes=[(4, 8)], gradients=True, axis=-1)
    assert said and set(said.counts) == {"softmax", "softmax_vjp"}


def test_nothing_is_counted_or_drawn(native, lenient, fresh):
    mx.random.seed(3)
    before = mx.random.uniform().item()
    mx.random.seed(3)
    assert mm.supports("sample", shapes=[(2, 100)])
    assert not mm.supports("softmax", shapes=[(4, 8)], dtype=mx.complex64)
    assert mx.random.uniform().item() == before
    assert mm.stats() == {}


def test_wrong_arguments(native):
    with pytest.raises(ValueError, match=r"no op named 'softmx'; did you mean softmax\?"):
        mm.supports("softmx", shapes=[(4, 8)])
    with pytest.raises(ValueError, match=r"\[softmax\] axis 3 is out of range"):
        mm.supports("softmax", shapes=[(4, 8)], axis=3)
    with pytest.raises(ValueError, match="shapes has 4: expected a shape"):
        mm.supports("softmax", shapes=[4])
    with pytest.raises(TypeError):
        mm.supports("softmax", shapes=[(4, 8)], axes=1)


# Ops that are switched off


@pytest.fixture
def disabled():
    yield switches.disable
    switches.disable([])
    mm.unpatch()


@pytest.mark.parametrize("name", [op.name for op in specs.OPS if op.name not in switches.WITHOUT_TWIN])
def test_switched_off(name, native, lenient, fresh, disabled, rng):
    """The op goes to mx, with the reason that stats() and supports() have, and gives mx's result."""
    op = specs.get(name)
    case = next(iter(smallest(op)))
    arrays = op.draw(rng, case, mx.float32)
    disabled([name])
    like = [stand_in(a) for a in arrays]
    said = support.answer(name, lambda: specs.run(op, op.ours, case, like))
    results = as_list(specs.run(op, op.ours, case, arrays))
    mx.eval(results)
    counts = mm.stats()
    assert said.reason == "an op that MLX_MITTENS_DISABLE names" and said.how != "kernel"
    assert counts[name] == {"kernels": {}, "mx": {said.reason: 1}}
    for mine, twin in zip(results, as_list(specs.run(op, op.twin, case, arrays)), strict=True):
        assert mine.shape == twin.shape


def test_switched_off_and_strict(native, disabled):
    disabled(["softmax"])
    with pytest.raises(RuntimeError, match=r"\[softmax\] strict mode: .* an op that MLX_MITTENS_DISABLE names"):
        mm.softmax(mx.ones((2, 8)), axis=-1)


def test_switched_off_exact_attention(native, lenient, disabled):
    disabled(["scaled_dot_product_attention"])
    shapes = [(1, 2, 4, 64), (1, 2, 8, 64), (1, 2, 8, 64)]
    said = mm.supports("scaled_dot_product_attention", shapes=shapes, scale=1.0, exact=True)
    assert said.reason == "an op that MLX_MITTENS_DISABLE names"


def test_switches_of_the_patch(native, lenient, fresh, disabled):
    disabled(["softmax", "linear"])
    softmax, linear = mx.softmax, mx.fast.rms_norm
    mm.patch(softmax=True)
    assert mx.softmax is softmax and mx.fast.rms_norm is not linear
    mm.unpatch()


def test_of_the_environment():
    script = "import mlx_mittens as mm; print(mm.build_info().disabled)"
    environment = {**os.environ, "MLX_MITTENS_DISABLE": "softmax, linear"}
    run = lambda: subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert run().stdout == "('softmax', 'linear')\n"
    environment["MLX_MITTENS_DISABLE"] = "softmx"
    assert "MLX_MITTENS_DISABLE names 'softmx'; did you mean softmax?: expected, with commas" in run().stderr


def test_build_info(native):
    info = mm.build_info()
    assert info.version == mm.__version__ and info.mlx in info.mlx_releases
    assert info.cpu == _ext.cpu_instructions and info.executors == mm.executors()
    assert f"cpu{' ' * 2}" in str(info).replace("cpu  ", "cpu  ") and "calibration: cpu" in str(info)
