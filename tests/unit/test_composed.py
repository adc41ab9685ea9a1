"""What an op without native code runs on the CPU: mx's operations, in an evaluation that is on its way."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.support import assert_same_bits
from helpers.tolerances import SUM, assert_near, units

import mlx_mittens as mm
from mlx_mittens import _ext, specs
from mlx_mittens.cli import doctor
from mlx_mittens.specs import Case

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture
def composed():
    """Ops run their compositions; gives which of them did so since it was last called."""
    mm.stats(reset=True)
    _ext.prefer_composed(True)
    yield lambda: {op for op, counts in mm.stats(reset=True).items() if "native composed" in counts["kernels"]}
    _ext.prefer_composed(False)


def few(op: specs.Op) -> list[Case]:
    """The smallest of a row's shapes."""
    return sorted((case for case in op.tests if case.gpu == "apple"), key=lambda case: np.prod(case.shape))[:6]


@pytest.mark.parametrize("op", specs.OPS, ids=lambda op: op.name)
def test_every_composition_is_right(op, dtype, composed, rng):
    """It gives what native code gives, of the same types: derivatives and vmap rest on it too.

    GGUF's blocks are what no operation of mx makes: their ops are composed of themselves, and run native code then.
    """
    for case in few(op):
        arrays, cotangents = op.draw(rng, case, dtype), op.cotangents(rng, case, dtype)
        with mx.stream(mx.cpu):
            ours = specs.run(op, op.ours, case, arrays, cotangents)
            mx.eval(ours)
        assert composed() or case.vjp, f"{op.name} {case.name}"
        _ext.prefer_composed(False)
        native = specs.run(op, op.ours, case, arrays, cotangents)
        mx.eval(native)
        _ext.prefer_composed(True)
        mm.stats(reset=True)
        for a, b in zip(ours, native, strict=True):
            assert a.dtype == b.dtype
            assert_near(a, b, f"{op.name} {case.name}", max(units(8, dtype), SUM))


def test_operations_wait_for_those_that_they_read(composed, rng):
    """A chain of ops, ours and mx's, each of which reads what the one before has not computed yet."""
    x = mx.array(rng.standard_normal((64, 512)).astype(np.float32))
    chain = lambda x: mm.softmax(mm.rms_norm(x * 2, None, 1e-5) + mm.layer_norm(x, None, None, 1e-5), axis=-1)
    y = x
    for _ in range(20):
        y = chain(y) * 100
    mx.eval(y)
    assert composed() == {"rms_norm", "layer_norm", "softmax"}
    _ext.prefer_composed(False)
    z = x
    for _ in range(20):
        z = chain(z) * 100
    assert_near(y, z, "chain")


def test_inputs_stay_as_they_are(composed, rng):
    """Also those that an op might take over."""
    x = mx.array(rng.standard_normal((8, 64)).astype(np.float32))
    kept = x * 1
    y, total = mm.add_rms_norm(x, x, None, 1e-5)
    mx.eval(y, total)
    assert_same_bits(x, kept, "x")
    assert_same_bits(total, x + x, "the sum")


def test_the_workspace_of_split_rows_is_there(composed, rng):
    x = mx.array(rng.standard_normal((1, 90001)).astype(np.float32))
    assert_near(mm.rms_norm(x, None, 1e-5), mx.fast.rms_norm(x, None, 1e-5), "a split row", SUM)
    assert composed() == {"rms_norm"}


def test_a_buffer_of_a_cache_is_appended_to(composed, rng):
    heads = mx.array(rng.standard_normal((1, 4, 2, 64)).astype(np.float32))
    keys, values = mx.zeros((1, 1, 8, 64)), mx.zeros((1, 1, 8, 64))
    mx.eval(keys, values)
    for start in (0, 2):
        _, keys, values = mm.rope_append(heads, keys, values, 64, base=1e4, offset=start)
        mx.eval(keys, values)
    assert_same_bits(values[:, :, :2], heads[:, 3:], "the first tokens")
    assert_same_bits(values[:, :, 2:4], heads[:, 3:], "the next tokens")
    assert not mx.any(values[:, :, 4:]).item()


def test_doctor_simulates_what_has_no_native_code(composed, monkeypatch, rng):
    """Or says that the kernels of an op did not run: mx beside mx is always right."""
    op, case = specs.get("rms_norm"), Case("small", (3, 40))
    mm.stats(reset=True)
    assert doctor.examine(op, case, "float32", rng).passed
    assert any(kernel.startswith("simulator rms_norm_simd") for kernel in mm.stats()["rms_norm"]["kernels"])

    monkeypatch.setenv("MLX_MITTENS_CLANG", "/no/such/clang")
    monkeypatch.setattr(doctor.frontend, "compiler_problem", lambda: "no clang here")
    found = doctor.examine(op, case, "float32", rng)
    assert found.passed and found.detail == "has no native code, and its kernels did not run: no clang here"

    _ext.prefer_composed(False)
    mm.stats(reset=True)
    assert not doctor.examine(op, case, "float32", rng).detail
    assert not any(kernel.startswith("simulator") for kernel in mm.stats()["rms_norm"]["kernels"])


def test_doctor_finds_a_wrong_kernel_that_native_code_does_not_hide(composed, monkeypatch, rng):
    original = doctor.simulator.enabled

    def with_a_wrong_result(**options):
        monkeypatch.setattr(specs, "check", lambda *a, **k: specs.Check(1.0, 0.0, False, "output: wrong"))
        return original(**options)

    monkeypatch.setattr(doctor.simulator, "enabled", with_a_wrong_result)
    found = doctor.examine(specs.get("softmax"), Case("small", (3, 40)), "float16", rng)
    assert not found.passed and found.detail == "output: wrong"
