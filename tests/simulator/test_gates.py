# ruff: noqa: E501  (a line a kernel)
"""Libraries that ask for Metal before they launch a kernel, and their test suites, in the simulator."""

import subprocess
import sys
import textwrap
from importlib.metadata import entry_points

import mlx.core as mx
import numpy as np
import pytest

import mlx_mittens as mm

ARGUMENTS = {"output_shapes": [(64,)], "output_dtypes": [mx.float32], "grid": (64, 1, 1), "threadgroup": (32, 1, 1)}

LIBRARY = """
import mlx.core as mx

def make(factor):
    if not mx.metal.is_available():
        return None
    source = f"uint i = thread_position_in_grid.x; y[i] = {factor} * x[i];"
    return mx.fast.metal_kernel(name="times", input_names=["x"], output_names=["y"], source=source)

_kernel = make(2)
_other = make(3) if mx.metal.is_available() else None
_third = mx.fast.metal_kernel(name="copy", input_names=["x"], output_names=["y"], source="y[0] = x[0];") if mx.metal.is_available() else None

def twice(x):
    if mx.default_device() != mx.gpu or not mx.metal.is_available():
        return 2 * x
    sizes = {"grid": (x.size, 1, 1), "threadgroup": (32, 1, 1)}
    return _kernel(inputs=[x], output_shapes=[x.shape], output_dtypes=[x.dtype], stream=mx.gpu, **sizes)[0]
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    (tmp_path / "gated_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(tmp_path))
    import gated_library

    yield gated_library
    del sys.modules["gated_library"]


@pytest.mark.skipif(mx.metal.is_available(), reason="the gates are open here")
class TestGates:
    def test_a_gated_kernel_runs(self, library):
        assert library._kernel is None
        x = mx.arange(64.0)
        with mm.simulator.enabled():
            before = mm.simulator.launched()
            mx.eval(library.twice(x))
            assert mm.simulator.launched() == before, "without the pretence the library computes on the CPU"
        gpu = mx.gpu
        with mm.simulator.enabled(pretend_metal=True):
            with mm.simulator.enabled(seed=3, pretend_metal=True):
                y = library.twice(x)
                mx.eval(y)
            assert mx.metal.is_available() and mx.default_device() == mx.gpu
            assert "applegpu" in mx.device_info()["architecture"] and library._other is not None
            assert library._third is not None
        assert mm.simulator.launched() == before + 1
        np.testing.assert_array_equal(np.array(y), 2 * np.arange(64.0))
        assert (
            not mx.metal.is_available()
            and mx.gpu is gpu
            and library._kernel is library._other is library._third is None
        )


def test_equal_writes_are_noted_or_faults():
    kernel = mm.simulator.metal_kernel("same", ["x"], ["y"], "y[0] = threads_per_threadgroup.x;")
    arguments = {**ARGUMENTS, "output_shapes": [(1,)]}
    mm.simulator.notes()
    with mm.simulator.enabled():
        y = kernel(inputs=[mx.zeros((1,))], **arguments)[0]
        assert y.item() == 32
    (note,) = mm.simulator.notes()
    assert 'several threads write one value (same.metal:1) to buffer "y"' in note
    with mm.simulator.enabled(equal_writes="fault"), mm.simulator.enabled(equal_writes="fault"):
        with pytest.raises(mm.simulator.Fault, match="a race"):
            mx.eval(kernel(inputs=[mx.zeros((1,))], **arguments))
    with pytest.raises(ValueError, match="equal_writes is 'maybe'"), mm.simulator.enabled(equal_writes="maybe"):
        pass


def test_unequal_writes_stay_faults():
    kernel = mm.simulator.metal_kernel("differ", ["x"], ["y"], "y[0] = thread_position_in_grid.x / 2;")
    with mm.simulator.enabled(), pytest.raises(mm.simulator.Fault, match="differ.metal:1.*a race"):
        mx.eval(kernel(inputs=[mx.zeros((1,))], **{**ARGUMENTS, "output_shapes": [(1,)]}))


# Sound kernels whose reads of threadgroup memory a compiler likes to move in front of their branch.
GUARDED = {
    "a slot of one thread": "threadgroup float s[1]; if (t == 0) s[0] = x[5]; float v = x[t]; if (t == 0) v += s[0]; y[t] = v;",
    "a slot that is cleared": "threadgroup float s[1]; float sum = 0; if (t == 0) s[0] = 0; BARRIER for (int r = 0; r < 3; ++r) {"
    " if (t == uint(r)) s[0] = 1; BARRIER float v = 0; if (t == 0) v = s[0]; sum += v; if (t == 0) s[0] = 0; BARRIER } y[t] = sum;",
    "a slot that a flag guards": "threadgroup float s[32]; bool on = x[0] > 1; if (on) { s[t] = 1; BARRIER } float v = 1; if (on) v += s[0]; y[t] = v;",
}  # fmt: skip


@pytest.mark.parametrize("name", GUARDED)
@pytest.mark.parametrize("seed", [0, 1])
def test_accesses_are_those_of_the_source(name, seed):
    body = "uint t = thread_position_in_threadgroup.x; " + GUARDED[name].replace(
        "BARRIER", "threadgroup_barrier(mem_flags::mem_threadgroup);"
    )
    kernel = mm.simulator.metal_kernel("guarded", ["x"], ["y"], body)
    arguments = {"output_shapes": [(32,)], "output_dtypes": [mx.float32], "grid": (32, 1, 1), "threadgroup": (32, 1, 1)}
    with mm.simulator.enabled(seed=seed):
        mx.eval(kernel(inputs=[mx.arange(32.0)], **arguments))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((" my-kernel", ["x"], ["y"], ""), "name is ' my-kernel': expected letters"),
        (("k", ["x y"], ["y"], ""), "input_names has 'x y'"),
        (("k", ["x"], ["2y"], ""), "output_names has '2y'"),
    ],
)
def test_names_that_metal_does_not_have(arguments, message):
    with pytest.raises(ValueError, match=message):
        mm.simulator.metal_kernel(*arguments)


class TestPlugin:
    def run(self, folder, text, *arguments):
        (folder / "gated_library.py").write_text(LIBRARY)
        (folder / "test_suite.py").write_text(textwrap.dedent(text))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        if not any(point.value == "mlx_mittens_pytest" for point in entry_points(group="pytest11")):
            command += ["-p", "mlx_mittens_pytest"]  # installed before it had the plugin
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    def test_a_suite_runs_its_kernels(self, tmp_path):
        text = """
        import mlx.core as mx, gated_library
        def test_twice():
            assert mx.array_equal(gated_library.twice(mx.arange(64.0)), 2 * mx.arange(64.0))
        """
        status, out = self.run(tmp_path, text, "--metal-simulator", "--metal-seeds", "2")
        assert status == 0 and "2 passed" in out and "metal simulator: 2 launches" in out, out

    def test_a_suite_that_ran_no_kernel_fails(self, tmp_path):
        status, out = self.run(tmp_path, "def test_nothing(): pass", "--metal-simulator")
        assert status == 1 and "1 passed" in out and "no kernel ran" in out, out
        assert self.run(tmp_path, "def test_nothing(): pass")[0] == 0

    def test_options_without_the_simulator_are_said_to_do_nothing(self, tmp_path):
        status, out = self.run(tmp_path, "def test_nothing(): pass", "--metal-seeds", "4")
        assert status == 0 and "--metal-seeds does nothing without --metal-simulator" in out, out
        out = self.run(tmp_path, "def test_nothing(): pass", "--metal-fuse", "--metal-subnormals", "flush")[1]
        assert "--metal-subnormals and --metal-fuse do nothing without --metal-simulator" in out, out
        assert "--metal" not in self.run(tmp_path, "def test_nothing(): pass")[1]

    def test_arithmetic_of_a_suite(self, tmp_path):
        text = """
        import mlx.core as mx
        def test_arithmetic():
            source = "y[0] = x[0] * x[1] - 1.0f; y[1] = x[2] * x[3];"
            kernel = mx.fast.metal_kernel(name="k", input_names=["x"], output_names=["y"], source=source)
            sizes = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "output_shapes": [(2,)]}
            x = mx.array([1 + 2.0**-23, 1 - 2.0**-23, 2.0**-126, 0.5])
            y = kernel(inputs=[x], output_dtypes=[mx.float32], **sizes)[0]
            assert y.tolist() == [-(2.0**-46), 0]
        """
        options = ["--metal-simulator", "--metal-fuse", "--metal-subnormals", "flush"]
        assert self.run(tmp_path, text, *options)[0] == 0
        assert self.run(tmp_path, text, *options[:2])[0] == self.run(tmp_path, text, options[0], *options[2:])[0] == 1

    def test_workers_of_xdist_tell_what_they_ran(self, tmp_path):
        text = """
        import mlx.core as mx, gated_library
        def test_twice():
            assert mx.array_equal(gated_library.twice(mx.arange(64.0)), 2 * mx.arange(64.0))
        def test_equal_writes():
            kernel = mx.fast.metal_kernel(name="same", input_names=["x"], output_names=["y"], source="y[0] = 1;")
            sizes = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1), "output_shapes": [(1,)]}
            mx.eval(kernel(inputs=[mx.zeros(1)], output_dtypes=[mx.float32], **sizes))
        """
        status, out = self.run(tmp_path, text, "--metal-simulator", "-n", "2")
        assert status == 0 and "2 passed" in out and "metal simulator: 2 launches" in out, out
        assert "note: [custom_kernel_same" in out and "no kernel ran" not in out, out

    def test_workers_of_xdist_that_ran_no_kernel_fail(self, tmp_path):
        text = "def test_nothing(): pass\ndef test_more(): pass\n"
        status, out = self.run(tmp_path, text, "--metal-simulator", "-n", "2")
        assert status == 1 and "2 passed" in out and "no kernel ran" in out, out
