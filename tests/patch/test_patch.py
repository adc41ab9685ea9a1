"""The patch: complete, undone without a trace, and exact about the functions that it replaces."""

import importlib
import subprocess
import sys
import threading
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from helpers.tolerances import LAYERS, ROUNDINGS, SUM, SUMS, assert_near, of_roundings, units
from mlx_lm.models import gated_delta, qwen3_next

import mlx_mittens as mm
from mlx_mittens import _ext
from mlx_mittens.patching import patches, targets
from mlx_mittens.patching.target import Target, importing

SWITCHES = list(dict.fromkeys(target.switch for target in targets.TARGETS))


def current() -> dict[str, object]:
    """The function at each target now."""
    return {target.name: getattr(*target.owner()) for target in targets.TARGETS if target.is_loaded()}


@pytest.fixture(autouse=True)
def undone():
    """Every test leaves mx as it was."""
    before = current()
    yield
    mm.unpatch()
    after = current()  # of modules imported meanwhile, too
    assert {name: after[name] for name in before} == before
    assert not any(isinstance(function, _ext.FunctionWrapper) for function in after.values())


def calls(rng):
    """One call of each target that is always there, by its switch."""

    def draw(*shape):
        return mx.array(rng.normal(size=shape).astype(np.float32))

    x, weight, bias = draw(3, 64), draw(64), draw(64)
    q, k = draw(1, 4, 5, 64), draw(1, 2, 9, 64)
    linear, embedding = nn.Linear(64, 10), nn.Embedding(10, 64)
    w = mx.quantize(draw(12, 64), group_size=32, bits=4)
    return {
        "rms_norm": lambda: mx.fast.rms_norm(x, weight, 1e-5),
        "layer_norm": lambda: mx.fast.layer_norm(x, weight, bias, 1e-5),
        "softmax": lambda: mx.softmax(x, axis=-1),
        "quantized_matmul": lambda: mx.quantized_matmul(x, *w, transpose=True, group_size=32, bits=4),
        "scaled_dot_product_attention": lambda: mx.fast.scaled_dot_product_attention(q, k, k, scale=0.1),
        "linear": lambda: linear(x) @ embedding.weight + embedding.as_linear(x) @ embedding.weight,
    }


OPS = {"linear": "gemv"}


@pytest.mark.parametrize("switch", list(calls(np.random.default_rng(0))))
def test_each_switch_reaches_its_kernels_and_no_other(rng, switch):
    functions = calls(rng)
    expected = functions[switch]()
    mx.eval(expected)
    mm.stats(reset=True)
    with mm.patched(**{name: name == switch for name in SWITCHES}):
        results = {name: function() for name, function in functions.items()}
        mx.eval(results)
    assert list(mm.stats()) == [OPS.get(switch, switch)]
    assert all(counts["kernels"] and not counts["mx"] for counts in mm.stats().values())
    np.testing.assert_allclose(np.array(results[switch]), np.array(expected), rtol=SUMS, atol=SUMS)


def test_patching_twice_and_undoing_once():
    before = current()
    mm.patch()
    first = current()
    assert all(first[name] is not before[name] for name in before)
    mm.patch()
    assert current() == first
    mm.patch(softmax=False)
    assert mx.softmax is before["mlx.core.softmax"] and mx.fast.rms_norm is first["mlx.core.fast.rms_norm"]
    mm.unpatch()
    assert current() == before
    mm.unpatch()
    assert current() == before


def test_blocks_nest_and_end_in_any_order():
    before = current()
    mm.patch(linear=False)
    outer, inner = mm.patched(softmax=False), mm.patched()
    outer.__enter__()
    assert mx.softmax is before["mlx.core.softmax"] and nn.Linear.__call__ is not before["mlx.nn.Linear.__call__"]
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert mx.softmax is not before["mlx.core.softmax"]
    mm.unpatch()
    assert mx.softmax is not before["mlx.core.softmax"]
    inner.__exit__(None, None, None)
    assert current() == before


def test_a_block_ends_with_an_error_inside():
    before = current()
    with pytest.raises(ZeroDivisionError), mm.patched():
        raise ZeroDivisionError
    assert current() == before


def test_an_unknown_switch_is_named():
    with pytest.raises(TypeError, match=r"no switch named 'soft_max': expected rms_norm, .*softmax.*or activations"):
        mm.patch(soft_max=False)


def test_a_stand_in_that_someone_holds_calls_the_original_later(rng):
    x = mx.array(rng.normal(size=(2, 8)).astype(np.float32))
    with mm.patched():
        held = mx.softmax
    mm.stats(reset=True)
    mx.eval(held(x))
    assert not mm.stats()


def test_a_patch_that_lies_on_ours_stays(rng, monkeypatch):
    x = mx.array(rng.normal(size=(2, 8)).astype(np.float32))
    real = mx.softmax
    with mm.patched():
        ours = mx.softmax
        monkeypatch.setattr(mx, "softmax", lambda *args, **kwargs: ours(*args, **kwargs) + 1)
        theirs = mx.softmax
    assert mx.softmax is theirs
    with mm.patched():  # theirs goes on to the first stand-in, which only knows mx by now
        mx.eval(mx.softmax(x))
    assert mx.softmax is theirs
    np.testing.assert_allclose(np.array(mx.softmax(x)), np.array(real(x) + 1), rtol=ROUNDINGS)
    monkeypatch.undo()
    mx.softmax = real


def test_what_no_kernel_covers_reaches_the_original_untouched(lenient, monkeypatch):
    seen = []

    def original(*args, **kwargs):
        seen.append((args, kwargs))
        return "theirs"

    monkeypatch.setattr(mx, "softmax", original)
    x = mx.ones((2, 3), mx.complex64)
    mm.stats(reset=True)
    with mm.patched():
        assert mx.softmax(x, axis=1, precise=True) == "theirs"
        assert mx.softmax([1, 2], whatever=3) == "theirs"
    assert seen == [((x,), {"axis": 1, "precise": True}), (([1, 2],), {"whatever": 3})]
    assert mm.stats()["softmax"]["mx"] == {"complex64": 1, "arguments of other types": 1}
    monkeypatch.undo()


def test_bad_arguments_raise_what_mx_raises(lenient):
    x, weight = mx.ones((2, 8)), mx.ones((7,))
    w = mx.quantize(mx.ones((8, 64)))
    bad = [
        lambda: mx.fast.rms_norm(x, weight, 1e-5),
        lambda: mx.fast.rms_norm(x, mx.ones((8,))),
        lambda: mx.fast.layer_norm(mx.array(1.0), None, None, 1e-5),
        lambda: mx.softmax(x, axis=2),
        lambda: mx.softmax("x"),
        lambda: mx.quantized_matmul(x, *w),
        lambda: mx.quantized_matmul(mx.ones((2, 64)), *w, mode="other"),
        lambda: nn.Linear(7, 3)(x),
    ]
    for call in bad:
        errors = []
        for context in (mm.patched(softmax=True), mm.patched(**dict.fromkeys(SWITCHES, False))):
            with context, pytest.raises(Exception) as raised:
                call()
            errors.append((raised.type, str(raised.value)))
        assert errors[0] == errors[1]


def test_strict_makes_leaving_to_mx_an_error(lenient):
    x = mx.ones((2, 3), mx.complex64)
    with mm.patched(strict=True):
        with pytest.raises(RuntimeError, match=r"\[softmax\] strict patch: .* covers complex64"):
            mx.softmax(x)
        with pytest.raises(IndexError, match="axis"):
            mx.softmax(x, axis=7)
        mm.patch()  # settings of the block hold
        with pytest.raises(RuntimeError):
            mx.softmax(x)
    mx.eval(mx.softmax(x))


def test_results_stay_lazy_and_inputs_alone(rng):
    x = mx.array(rng.normal(size=(4, 64)).astype(np.float32))
    mm.stats(reset=True)
    with mm.patched():
        y = mx.softmax(mx.fast.rms_norm(x, None, 1e-5), axis=-1)
        assert not mm.stats()
    mx.eval(y)
    assert set(mm.stats()) == {"rms_norm", "softmax"}


def test_compiled_graphs_and_gradients_run_on_ours(rng):
    x = mx.array(rng.normal(size=(4, 64)).astype(np.float32))
    layer = nn.QuantizedLinear(64, 64, group_size=32, bits=8)

    def loss(x):
        return (mx.softmax(layer(mx.fast.rms_norm(x, None, 1e-5)), axis=-1) ** 2).sum()

    expected, gradient = mx.value_and_grad(loss)(x)
    mx.eval(expected, gradient)
    mm.stats(reset=True)
    with mm.patched():
        step = mx.compile(mx.value_and_grad(loss))
        mx.eval(step(x))
        ours, our_gradient = step(x)
        mx.eval(ours, our_gradient)
    counts = mm.stats()
    assert all(sum(counts[op]["kernels"].values()) == 2 for op in ("rms_norm", "softmax"))
    assert sum(counts["quantized_matmul"]["kernels"].values()) == 4  # forwards and back
    np.testing.assert_allclose(ours.item(), expected.item(), rtol=SUM)
    np.testing.assert_allclose(np.array(our_gradient), np.array(gradient), rtol=LAYERS, atol=ROUNDINGS)


def test_a_compiled_graph_stays_on_the_kernels_that_it_was_traced_with(rng):
    """Also once the patch is undone, until it is traced anew; so does one of mx's when the patch comes."""
    x = mx.array(rng.normal(size=(4, 64)).astype(np.float32))
    expected = np.array(mx.softmax(x, axis=-1))
    step = mx.compile(lambda x: mx.softmax(x, axis=-1))

    def ran(x):
        mm.stats(reset=True)
        y = step(x)
        mx.eval(y)
        np.testing.assert_allclose(np.array(y), expected[: x.shape[0]], rtol=SUM)
        return "softmax" in mm.stats()

    with mm.patched():
        assert ran(x)
    assert ran(x)
    assert not ran(x[:3])  # another shape
    with mm.patched():
        assert not ran(x[:3]) and ran(x)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_layer_is_one_kernel(rng, dtype, bits, bias):
    layer = nn.QuantizedLinear(64, 48, bias=bias, group_size=32, bits=bits)
    if bias:
        layer.bias = mx.array(rng.normal(size=48))
    layer.set_dtype(dtype)
    layer.unfreeze(keys=["bias"], strict=False)
    x = mx.array(rng.normal(size=(2, 3, 64))).astype(dtype)

    def loss(x):
        return (layer(x).astype(mx.float32) ** 2).sum()

    def gradients():
        of_bias = [nn.value_and_grad(layer, loss)(x)[1]["bias"]] if bias else []
        return [mx.grad(loss)(x), *of_bias]

    expected, their_gradients = layer(x), gradients()
    mx.eval(expected, their_gradients)
    mm.stats(reset=True)
    with mm.patched(strict=True):
        y = layer(x)
        mx.eval(y)
        counts = mm.stats(reset=True)
        our_gradients = gradients()
    assert list(counts) == ["quantized_matmul"] and list(counts["quantized_matmul"]["kernels"].values()) == [1]
    assert y.dtype == dtype
    assert_near(y, expected, "y", of_roundings(dtype))
    for a, b in zip(our_gradients, their_gradients, strict=True):
        assert_near(a, b, "gradient", units(16, dtype))


@pytest.mark.parametrize("bits, group_size, mode", [(1, 64, "affine")])
def test_a_quantized_layer_that_no_kernel_covers_is_counted_once(lenient, rng, bits, group_size, mode):
    layer = nn.QuantizedLinear(64, 48, group_size=group_size, bits=bits, mode=mode)
    x = mx.array(rng.normal(size=(3, 64)).astype(np.float32))
    expected = layer(x)
    mm.stats(reset=True)
    with mm.patched():
        assert mx.array_equal(layer(x), expected).item()
    (counts,) = mm.stats().values()
    assert not counts["kernels"] and list(counts["mx"].values()) == [1]
    with mm.patched(strict=True), pytest.raises(RuntimeError, match=r"\[quantized_matmul\] strict patch: "):
        layer(x)
    with mm.strict(), mm.patched(), pytest.raises(RuntimeError, match=r"\[quantized_matmul\] strict mode: "):
        layer(x)


def test_a_function_that_others_import_by_name_is_patched_there(monkeypatch, tmp_path):
    package = tmp_path / "shared_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "home.py").write_text("def act(x):\n    return 'theirs'\n")
    for name in ("early", "late"):
        (package / f"{name}.py").write_text("from .home import act\n")
    (package / "other.py").write_text("def act(x):\n    return 'its own'\n")
    monkeypatch.syspath_prepend(tmp_path)
    target = Target("act", "act", "shared_package.home", "act", lambda x: "ours", ("x",), optional=True, shared=True)
    monkeypatch.setattr(patches, "TARGETS", [*(s for s in targets.TARGETS if not s.optional), target])
    early, other = (importlib.import_module(f"shared_package.{name}") for name in ("early", "other"))
    mm.patch()
    late = importlib.import_module("shared_package.late")
    assert [module.act(1) for module in (early, late, other)] == ["ours", "ours", "its own"]
    mm.unpatch()
    home = importlib.import_module("shared_package.home")
    assert [module.act(1) for module in (home, early, late, other)] == ["theirs", "theirs", "theirs", "its own"]
    assert early.act is late.act is home.act
    monkeypatch.undo()


@pytest.mark.parametrize("dtype", [mx.float32, mx.complex64], ids=str)
def test_layers_of_norms_and_positions_give_what_they_gave(lenient, rng, dtype):
    from mlx_lm.models.rope_utils import Llama3RoPE

    x = mx.array(rng.normal(size=(2, 3, 5, 64)).astype(np.float32))
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    calls = {
        "norm": lambda: nn.RMSNorm(64, eps=1e-3)(x.astype(dtype)),
        "positions": lambda: nn.RoPE(64, base=1e3, scale=0.5)(x, offset=7),
        "positions from 0": lambda: nn.RoPE(32)(x),
        "traditional": lambda: nn.RoPE(64, traditional=True)(x, 3),
        "positions in an array": lambda: nn.RoPE(64)(x, offset=mx.array([3, 9])),
        "frequencies": lambda: Llama3RoPE(64, scaling_config=scaling)(x, offset=2),
    }
    for what, call in calls.items():
        try:
            expected = call()
        except ValueError:
            with mm.patched(), pytest.raises(ValueError):
                call()
            continue
        with mm.patched():
            y = call()
        assert y.dtype == expected.dtype
        assert_near(y, expected, what, SUM)


def test_a_layer_without_its_arrays_fails_as_mx_does(lenient):
    quantized, dense, norm = nn.QuantizedLinear(64, 8, group_size=32), nn.Linear(64, 8), nn.RMSNorm(64)
    del quantized["scales"], dense["weight"], norm["weight"]
    with mm.patched():
        for layer, missing in ((quantized, "scales"), (dense, "weight"), (norm, "weight")):
            with pytest.raises((KeyError, AttributeError), match=missing):
                layer(mx.ones((1, 64)))


def test_signatures_and_docs_are_those_of_mx():
    doc, name = mx.softmax.__doc__, mx.softmax.__name__
    with mm.patched():
        assert (mx.softmax.__doc__, mx.softmax.__name__) == (doc, name)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda target: {"path": "fast.rms_norms"},
            r"mlx\.core\.fast\.rms_norms is not there .* mlx 0.*rms_norm=False",
        ),
        (lambda target: {"module": "mlx.nowhere"}, r"mlx\.nowhere\.fast\.rms_norm is not there"),
    ],
)
def test_a_moved_target_is_an_error_and_nothing_is_patched(monkeypatch, change, message):
    before = current()
    moved = [replace(target, **change(target)) if target.switch == "rms_norm" else target for target in targets.TARGETS]
    monkeypatch.setattr(patches, "TARGETS", moved)
    for act in (mm.patch, mm.patched().__enter__):
        with pytest.raises(mm.PatchError, match=message):
            act()
    monkeypatch.undo()
    assert current() == before
    mm.unpatch()


def test_other_arguments_of_a_target_are_an_error(monkeypatch):
    monkeypatch.setattr(nn.Linear, "__call__", lambda self, x, scale: x)
    with pytest.raises(
        mm.PatchError, match=r"mlx\.nn\.Linear\.__call__ takes \(self, x, scale\): expected \(self, x\)"
    ):
        mm.patch()
    monkeypatch.undo()


def test_threads_patch_and_call_at_once(rng):
    before = current()
    x = mx.array(rng.normal(size=(4, 64)).astype(np.float32))
    expected = np.array(mx.softmax(x, axis=-1))
    errors = []

    def work(i):
        try:
            with mx.stream(mx.new_stream(mx.cpu)):
                for _ in range(100):
                    with mm.patched(softmax=i % 2 == 0):
                        y = mx.softmax(x, axis=-1)
                        mx.eval(y)
                    np.testing.assert_allclose(np.array(y), expected, rtol=SUM)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert current() == before


def test_a_package_imported_later_is_patched_then(monkeypatch, tmp_path):
    (tmp_path / "late_package.py").write_text("def attend(x, scale):\n    return 'theirs'\n\nREADY = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    target = Target("late", "late", "late_package", "attend", lambda x, scale: "ours", ("x", "scale"), optional=True)
    monkeypatch.setattr(patches, "TARGETS", [*(s for s in targets.TARGETS if not s.optional), target])
    finders = list(sys.meta_path)
    try:
        mm.patch()
        package = importlib.import_module("late_package")
        assert package.attend(1, 2) == "ours" and package.READY
        assert type(package.__loader__).__name__ == "SourceFileLoader"
        assert sys.meta_path == finders
        mm.unpatch()
        assert package.attend(1, 2) == "theirs"
    finally:
        mm.unpatch()
        sys.modules.pop("late_package", None)
    monkeypatch.undo()


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_mlx_lm_is_patched_when_it_is_imported():
    run_python(
        "import sys, mlx_mittens as mm; mm.patch(); assert 'mlx_lm' not in sys.modules\n"
        "from mlx_lm.models import base, llama\n"
        "assert hasattr(base.quantized_scaled_dot_product_attention, '__wrapped__')\n"
        "mm.unpatch(); assert not hasattr(base.quantized_scaled_dot_product_attention, '__wrapped__')\n"
    )


def test_a_target_of_mlx_lm_that_moved_is_named():
    printed = run_python(
        "import mlx_mittens as mm; from mlx_lm.models import base; del base.quantized_scaled_dot_product_attention\n"
        "try: mm.patch()\n"
        "except mm.PatchError as error: print(error)\n"
        "mm.patch(quantized_scaled_dot_product_attention=False)\n"
    )
    assert "mlx_lm.models.base.quantized_scaled_dot_product_attention is not there" in printed
    assert "installed is mlx-lm 0." in printed


def test_packages_that_import_each_other_are_patched(monkeypatch, tmp_path):
    """Each when it is all there, though the other's end of import comes while it is not."""
    (tmp_path / "outer_package.py").write_text("import inner_package\n\ndef attend(x):\n    return 'theirs'\n")
    (tmp_path / "inner_package.py").write_text("def append(x):\n    return 'theirs'\n")
    monkeypatch.syspath_prepend(tmp_path)
    late = [
        Target("late", "late", name, path, lambda x: "ours", ("x",), optional=True)
        for name, path in (("outer_package", "attend"), ("inner_package", "append"))
    ]
    monkeypatch.setattr(patches, "TARGETS", [*(s for s in targets.TARGETS if not s.optional), *late])
    try:
        mm.patch()
        outer, inner = importlib.import_module("outer_package"), importlib.import_module("inner_package")
        assert (outer.attend(1), inner.append(1)) == ("ours", "ours") and not importing
        mm.unpatch()
        assert (outer.attend(1), inner.append(1)) == ("theirs", "theirs")
    finally:
        mm.unpatch()
        for name in ("outer_package", "inner_package"):
            sys.modules.pop(name, None)
    monkeypatch.undo()


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16])
def test_a_cache_holds_the_same(rng, dtype):
    """Growth, a full cache, trimming, and heads of another type, step by step beside the original."""
    from mlx_lm.models.cache import KVCache

    ours, theirs = KVCache(), KVCache()
    draw = lambda count, width: mx.array(rng.standard_normal((2, 3, count, width)).astype(np.float32))
    for step, count in enumerate([5, 1, 1, 249, 1, 300, 1, 7, 205, 1]):
        keys, values = draw(count, 8).astype(dtype if step else mx.float32), draw(count, 4)
        with mm.patched(strict=True):
            results = ours.update_and_fetch(keys, values)
        for a, b in zip(results, theirs.update_and_fetch(keys, values), strict=True):
            assert a.dtype == b.dtype and mx.array_equal(a, b).item(), step
        for a, b in zip(ours.state, theirs.state, strict=True):
            assert a == b if isinstance(a, int) else mx.array_equal(a, b).item(), step
        if step == 6:
            assert ours.trim(30) == theirs.trim(30) == 30


def test_a_subclass_of_the_cache_returns_what_it_likes():
    from mlx_lm.models.cache import KVCache

    if not hasattr(KVCache, "keys_and_values"):
        pytest.skip("mlx-lm before 0.32 calls no method that a subclass could replace")

    class Other(KVCache):
        def keys_and_values(self):
            return "another way"

    new = mx.ones((2, 3, 2, 8))
    with mm.patched(strict=True):
        other = Other()
        assert [other.update_and_fetch(new, new) for _ in range(2)] == ["another way"] * 2
        assert other.offset == 4


def test_a_package_that_is_never_imported_costs_nothing(monkeypatch):
    target = Target("late", "late", "no_such_package", "attend", lambda: None, optional=True)
    monkeypatch.setattr(patches, "TARGETS", [*(s for s in targets.TARGETS if not s.optional), target])
    finders = list(sys.meta_path)
    mm.patch()
    assert sys.meta_path[1:] == finders
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_package")
    mm.unpatch()
    assert sys.meta_path == finders
    monkeypatch.undo()


def test_what_a_patch_adds_to_a_call_that_goes_to_mx(lenient):
    """No function of Python runs that mx's own call would not run."""
    x = mx.ones((1, 8), mx.complex64)

    def entered():
        events = []
        sys.setprofile(lambda frame, event, argument: events.append((event, frame.f_code.co_name)))
        try:
            mx.softmax(x, axis=-1)
        finally:
            sys.setprofile(None)
        return [event for event in events if event[0] == "call"]

    mm.patch(softmax=False)
    plain = entered()
    mm.patch()
    assert entered() == plain


IMPORTS = """
import importlib
import mlx_mittens as mm
from mlx_mittens.patching import targets

mm.patch()
import mlx_lm.models.ssm

def refuse(name):
    raise AssertionError(f"{name} is imported again")

importlib.import_module = refuse
of_ssm = [target for target in targets.TARGETS if target.module == "mlx_lm.models.ssm"]
assert of_ssm and all(target.owner() for target in of_ssm)
"""


def test_a_module_that_was_imported_under_the_patch_is_not_imported_again():
    """import_module waits for a thread that is about to end its import of it, which waits for the patch."""
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)


@pytest.mark.parametrize("width", [64, 128])
def test_queries_and_keys_of_a_gated_delta_are_normalized_by_one_kernel(rng, dtype, executor, width):
    heads = mx.array(rng.standard_normal((2, 3, 6 * width)).astype(np.float32)).astype(dtype)
    q, k = (part.reshape(2, 3, -1, width) for part in mx.split(heads, [4 * width], axis=-1))
    scale = {"inv_scale": width**-0.5, "eps": 1e-6}
    expected = gated_delta.normalize_qk(q, k, **scale)
    mx.eval(expected)
    mm.stats(reset=True)
    with mm.patched(strict=True):
        results = qwen3_next.normalize_qk(q, k, **scale)
        mx.eval(results)
    assert {op: sum(counts["kernels"].values()) for op, counts in mm.stats().items()} == {"qk_norm": 1}
    for name, a, b in zip("qk", results, expected, strict=True):
        assert a.dtype == b.dtype
        assert_near(a, b, name, of_roundings(dtype))
    slope = lambda f: mx.grad(lambda q: sum((part**3).sum() for part in f(q, k.astype(mx.float32), **scale)))(q32)
    q32 = q.astype(mx.float32)
    expected = slope(gated_delta.normalize_qk)
    mx.eval(expected)
    with mm.patched():
        assert_near(slope(gated_delta.normalize_qk), expected, "gradient", SUMS)
