"""An op without native code on the CPU: it runs mx's operations, in an evaluation that is on its way."""

import mlx.core as mx
import numpy as np
import pytest
from helpers.support import assert_same_bits, peak_memory
from helpers.tolerances import SUM, assert_near, units

import mlx_mittens as mm
from mlx_mittens import _ext, specs
from mlx_mittens.cli import doctor
from mlx_mittens.specs import Case

pytestmark = pytest.mark.usefixtures("native")


# Ops that the gradients of an op run. Every other case runs the op alone.
GRADIENTS = {
    "rms_norm": {"rms_norm_vjp"},
    "layer_norm": {"layer_norm_vjp"},
    "softmax": {"softmax", "softmax_vjp"},
    "add_rms_norm": {"add_rms_norm", "rms_norm_vjp"},
    "norm_add_norm": {"norm_add_norm", "rms_norm_vjp"},
    "qk_norm": {"rms_norm_vjp"},
    "softcap": {"softcap_vjp"},
    "scaled_dot_product_attention": {"scaled_dot_product_attention", "scaled_dot_product_attention_vjp"},
}

# Ops of ours in a composition, which run their native code there.
INSIDE = {
    "quantized_swiglu": {"quantized_matmul"},
    "block_matmul": {"block_dequantize"},
    "gather_swiglu": {"gather_qmm"},
    "gather_sum": {"gather_qmm"},
}

# Ops with kernels on GPUs alone: on the CPU a call is to these ops in its place, and makes no primitive of its own.
PARTS = {
    "quantized_matmuls": {"quantized_matmul"},
    "mixture": {"gather_qmm", "gather_sum", "route_top_k"},
}

# No operation of mx makes blocks of GGUF or reads them: their composition is the op itself, with its native code.
OF_THEMSELVES = {
    "block_quantize": lambda: mm.block_quantize(mx.ones((2, 32)), "q4_0"),
    "block_dequantize": lambda: mm.block_dequantize(mx.zeros((2, 18), mx.uint8), "q4_0"),
}


# Ops without native code: on a CPU they are always composed.
COMPOSED_ALONE = {"block_masked_mm", "index_scores"}


def ran(executor: str) -> set[str]:
    """The ops that ran a kernel on an executor, as "native composed", since counting was reset."""
    return {op for op, counts in mm.stats().items() if any(kernel.startswith(executor) for kernel in counts["kernels"])}


@pytest.fixture
def composed():
    """Ops run their compositions; gives which of them did so since it was last called."""
    mm.stats(reset=True)
    _ext.prefer_composed(True)

    def ops() -> set[str]:
        names = ran("native composed")
        mm.stats(reset=True)
        return names

    yield ops
    _ext.prefer_composed(False)


def beside_native(function, *arrays):
    """A function's results with compositions, then with native code."""
    ours = function(*arrays)
    mx.eval(ours)
    _ext.prefer_composed(False)
    native = function(*arrays)
    mx.eval(native)
    _ext.prefer_composed(True)
    return ours, native


def few(op: specs.Op) -> list[Case]:
    """The smallest of a row's shapes, and of those for gradients: rows of one column have none but rounding.

    Normed products, and the convolution in one, are several ops; unit/matmul/test_normed_products.py and
    unit/recurrence/test_short_conv_product.py have their compositions.
    """
    fused = {"is_normed", "columns"}
    cases = [case for case in op.checks() if case.gpu == "apple" and not any(map(case.options.get, fused))]
    cases.sort(key=lambda case: np.prod(case.shape))
    return [case for case in cases if not case.vjp][:6] + [case for case in cases if case.vjp and case.shape[-1] > 1][
        :4
    ]


@pytest.mark.parametrize(
    "op", [op for op in specs.OPS if op.name not in {*OF_THEMSELVES, *COMPOSED_ALONE}], ids=lambda op: op.name
)
def test_every_composition_is_right(op, dtype, composed, rng):
    """It gives the results of native code, of the same types: derivatives and vmap rest on it too."""
    for case in few(op):
        arrays, cotangents = op.draw(rng, case, dtype), op.cotangents(rng, case, dtype)
        mm.stats(reset=True)
        ours = specs.run(op, op.ours, case, arrays, cotangents)
        mx.eval(ours)
        alone = GRADIENTS[op.name] if case.vjp else PARTS.get(op.name, {op.name})
        inside = INSIDE.get(op.name, set())
        assert ran("native composed") == alone and ran("native") == alone | inside, f"{op.name} {case.name}"

        _ext.prefer_composed(False)
        mm.stats(reset=True)
        native = specs.run(op, op.ours, case, arrays, cotangents)
        mx.eval(native)
        assert ran("native") == alone and not ran("native composed"), f"{op.name} {case.name}"
        _ext.prefer_composed(True)
        for a, b in zip(ours, native, strict=True):
            assert a.dtype == b.dtype
            assert_near(a, b, f"{op.name} {case.name}", max(units(8, dtype), SUM))


@pytest.mark.parametrize("name", OF_THEMSELVES)
def test_what_is_composed_of_itself_runs_native_code_inside(composed, name):
    mx.eval(OF_THEMSELVES[name]())
    counts = mm.stats()[name]["kernels"]
    assert counts.pop("native composed") == 1 and list(counts.values()) == [1]


@pytest.mark.parametrize("name", OF_THEMSELVES)
def test_a_composition_that_does_not_end_is_named(composed, name):
    """As in an op which calls itself and has no native code."""
    _ext.prefer_composed(True, nested=True)
    primitive = "Mittens" + "".join(word.capitalize() for word in name.split("_"))
    with pytest.raises(RuntimeError, match=rf"\[{primitive}\] composed\(\) calls the op itself, which has no native"):
        mx.eval(OF_THEMSELVES[name]())
    _ext.prefer_composed(True)
    mx.eval(OF_THEMSELVES[name]())  # the depth is counted anew
    assert composed() == {name}


def test_compositions_may_be_nested(composed, rng):
    """A composition inside another one."""
    op = specs.get("quantized_swiglu")
    case = few(op)[0]
    arrays = op.draw(rng, case, mx.float32)
    _ext.prefer_composed(True, nested=True)
    (ours,), (native,) = beside_native(lambda: specs.run(op, op.ours, case, arrays))
    assert composed() == {"quantized_swiglu", "quantized_matmul"}
    assert_near(ours, native, case.name, max(units(8, mx.float32), SUM))


def test_memory_is_freed_on_the_way(composed, rng):
    """Attention by a composition takes no more memory than the same operations in a graph: scores once, not twice."""
    q = mx.array(rng.standard_normal((1, 4, 512, 64)).astype(np.float32))

    ours = peak_memory(lambda: mm.scaled_dot_product_attention(q, q, q, scale=0.125))
    assert composed() == {"scaled_dot_product_attention"}
    scores = lambda: mx.softmax((q * 0.125) @ q.swapaxes(-1, -2), axis=-1, precise=True)
    assert ours <= peak_memory(lambda: scores() @ q) + 1024  # scalars


def test_on_a_stream_of_its_own(composed, rng):
    """Not the default one; another stream's operations before it and after it."""
    x = mx.array(rng.standard_normal((64, 512)).astype(np.float32))
    own = mx.new_stream(mx.cpu)
    y = x
    for i in range(10):
        y = mm.rms_norm(y * 2, None, 1e-5, stream=own if i % 2 else mx.cpu)
        y = mm.softmax(y, axis=-1, stream=own) * 100
    mx.eval(y)
    assert composed() == {"rms_norm", "softmax"}
    for _ in range(10):
        x = mx.softmax(mx.fast.rms_norm(x * 2, None, 1e-5), axis=-1) * 100
    assert_near(y, x, "two streams", SUM)


def test_in_a_compiled_function(composed, rng):
    x = mx.array(rng.standard_normal((8, 64)).astype(np.float32))
    function = mx.compile(lambda x: mm.softmax(mm.layer_norm(mx.exp(x) + 1, None, None, 1e-5), axis=-1) * 3)
    for _ in range(2):  # the graph that is kept, again
        ours, native = beside_native(function, x)
        assert composed() == {"layer_norm", "softmax"}
        assert_near(ours, native, "compiled", SUM)


@pytest.mark.parametrize("axis", [0, 1])
def test_in_vmap(composed, rng, axis):
    """Over an op, and over an op that a composition of another axis is in."""
    x = mx.array(rng.standard_normal((4, 5, 64)).astype(np.float32))
    function = mx.vmap(lambda x: mm.softmax(mm.rms_norm(x, None, 1e-5), axis=-1), in_axes=axis)
    ours, native = beside_native(function, x)
    assert_near(ours, native, "vmap", SUM)
    assert_near(ours, mx.softmax(mx.fast.rms_norm(x, None, 1e-5), axis=-1).swapaxes(0, axis), "mx", SUM)


def test_evaluated_inside_of_a_gradient(composed, rng):
    """Arrays evaluated there keep their graph, and stay valid for the gradient."""
    x = mx.array(rng.standard_normal((8, 64)).astype(np.float32))

    def loss(x):
        y = mm.rms_norm(x * 2, None, 1e-5)
        mx.eval(y)
        z = mm.softmax(y * 3, axis=-1)
        mx.eval(z)
        return (z * y).sum()

    (value, gradient), (native_value, native_gradient) = beside_native(mx.value_and_grad(loss), x)
    assert composed() == {"rms_norm", "softmax", "rms_norm_vjp", "softmax_vjp"}
    assert_near(value, native_value, "value", SUM)
    assert_near(gradient, native_gradient, "gradient", SUM)


def test_operations_wait_for_those_that_they_read(composed, rng):
    """A chain of ops, ours and mx's. Each reads a result that the one before has not computed yet."""
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
    """Also buffers that an op might take over."""
    x = mx.array(rng.standard_normal((8, 64)).astype(np.float32))
    kept = x * 1
    y, total = mm.add_rms_norm(x, x, None, 1e-5)
    mx.eval(y, total)
    assert_same_bits(x, kept, "x")
    assert_same_bits(total, x + x, "the sum")


def test_the_workspace_of_split_rows_is_there(composed, rng):
    x = mx.array(rng.standard_normal((1, 90001)).astype(np.float32))
    wide = specs.widen(x)
    right = wide / np.sqrt(np.mean(wide * wide) + 1e-5)  # mx's sum of this many squares is off by more than SUM
    assert_near(mm.rms_norm(x, None, 1e-5), right, "a split row", SUM)
    assert composed() == {"rms_norm"}


def test_norms_of_a_number_that_outweighs_its_row(composed):
    """All other squares are alike, so their sum rounds as a sum of equal numbers does."""
    x = mx.array(np.append(np.full(4095, 0.3), 1e4).astype(np.float32))
    for wide, norm in (
        (specs.widen(x), lambda: mm.rms_norm(x, None, 1e-5)),
        (specs.widen(x) - specs.widen(x).mean(), lambda: mm.layer_norm(x, None, None, 1e-5)),
    ):
        assert_near(norm(), wide / np.sqrt(np.mean(wide * wide) + 1e-5), "a norm", units(8, mx.float32))
    assert composed() == {"rms_norm", "layer_norm"}


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


def test_doctor_says_what_is_too_large_to_simulate(composed, rng):
    op = specs.get("softmax")
    mm.stats(reset=True)
    found = doctor.examine(op, Case("large", (513, 512)), "float16", rng)
    too_large = "cases of more than 262144 elements are too large to simulate"
    assert found.passed and found.detail == f"has no native code, and its kernels did not run: {too_large}"
    assert not ran("simulator")
    assert not doctor.examine(op, Case("as large as may be", (512, 512)), "float16", rng).detail
    assert ran("simulator") == {"softmax"}


def test_doctor_finds_a_wrong_kernel_that_native_code_does_not_hide(composed, monkeypatch, rng):
    original = doctor.simulator.enabled

    def with_a_wrong_result(**options):
        monkeypatch.setattr(specs, "check", lambda *a, **k: specs.Check(1.0, 0.0, False, "output: wrong"))
        return original(**options)

    monkeypatch.setattr(doctor.simulator, "enabled", with_a_wrong_result)
    found = doctor.examine(specs.get("softmax"), Case("small", (3, 40)), "float16", rng)
    assert not found.passed and found.detail == "output: wrong"
