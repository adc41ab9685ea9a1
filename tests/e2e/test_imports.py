"""Modules that an import brings: the testing tools neither ops nor patch, the package all of it once it is asked."""

import subprocess
import sys

import pytest

# Modules that a test suite of a user's own kernels does not need.
HEAVY = ("ops", "nn", "patching", "calibration", "specs", "bench", "cli")

LOADED = f"""
import sys
def loaded():
    return [name for name in {HEAVY!r} if any(m == f"mlx_mittens.{{name}}" for m in sys.modules)] + [
        name for name in ("mlx_lm", "transformers") if name in sys.modules]
"""


def run(code, *arguments):
    done = subprocess.run([sys.executable, "-c", LOADED + code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


KERNEL = """
import mlx.core as mx
import mlx_mittens.simulator
from mlx_mittens import simulator

with simulator.enabled(seed=1):
    kernel = mx.fast.metal_kernel("one", ["x"], ["y"], "uint i = thread_position_in_grid.x; y[i] = x[i] + 1;")
    sizes = {"grid": (32, 1, 1), "threadgroup": (32, 1, 1), "output_shapes": [(32,)], "output_dtypes": [mx.float32]}
    assert kernel(inputs=[mx.zeros(32)], **sizes)[0].sum().item() == 32
assert loaded() == [], loaded()
"""


def test_the_simulator_brings_neither_ops_nor_patch():
    run(KERNEL)


def test_the_plugin_brings_neither_ops_nor_patch(tmp_path):
    (tmp_path / "test_one.py").write_text(
        f"{LOADED}\ndef test_one():\n    {KERNEL.strip().replace(chr(10), chr(10) + '    ')}\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--metal-simulator", "test_one.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


# Modules that take longer to import than all that compute: none of them has a part in a call on a CPU.
SLOW = ("numpy", "importlib.metadata", "subprocess", "concurrent.futures", "json", "argparse", "asyncio", "tempfile")
SLOW_HERE = ("simulator", "frontend.build", "apple", "gpus", "specs", "bench", "cli", "support", "info")

UNSEEN = f"""
import sys
def seen(*also):
    slow = [*{SLOW!r}, *(f"mlx_mittens.{{name}}" for name in {SLOW_HERE!r}), *also]
    return [name for name in slow if name in sys.modules]
"""


@pytest.mark.parametrize(
    ("code", "also"),
    [
        ("import mlx_mittens", ("mlx_mittens.ops", "mlx_mittens.calibration", "mlx.nn")),
        (
            "import mlx_mittens as mm; mm.softmax(mm._mx.ones((2, 8)))",
            ("mlx_mittens.patching", "mlx_mittens.nn", "mlx.nn"),
        ),
        ("from mlx_mittens.ops.norm import rms_norm", ("mlx_mittens.patching", "mlx_mittens.nn", "mlx.nn")),
        ("import mlx_mittens as mm; mm.patch(); mm.unpatch()", ("mlx_lm", "mlx_mittens.nn")),
        ("import mlx_mittens as mm\nwith mm.strict(): pass", ("mlx_mittens.patching", "mlx.nn")),
    ],
)
def test_what_is_not_asked_for_stays_out(code, also):
    run(f"{UNSEEN}\n{code}\nassert not seen(*{also!r}), seen(*{also!r})")


def test_help_imports_no_command():
    """And the help of a command only its own."""
    heavy = ("numpy", "importlib.metadata", "mlx.nn", "mlx_mittens.ops", "mlx_mittens.specs", "mlx_mittens.cli.doctor")
    said = run(
        "import mlx_mittens_cli\n"
        "sys.argv[1:] = ['--help']\n"
        "try: mlx_mittens_cli.main()\n"
        f"except SystemExit: print([name for name in {heavy!r} if name in sys.modules])\n"
    )
    assert "mlx-mittens doctor" in said and said.endswith("\n[]\n")
    said = run(
        "import mlx_mittens_cli\n"
        "sys.argv[1:] = ['cache', '--help']\n"
        "try: mlx_mittens_cli.main()\n"
        "except SystemExit: print('numpy' in sys.modules, 'mlx_mittens.cli.bench' in sys.modules)\n"
    )
    assert "usage: mlx-mittens cache" in said and said.endswith("False False\n")


def test_each_name_is_where_it_is_sought():
    """All that the package offers is an op, a submodule, or in the table of names."""
    run(
        "import mlx_mittens as mm\n"
        "from mlx_mittens import _everything\n"
        "modules = {'frontend', 'nn', 'simulator', 'stats'}\n"
        "assert set(_everything.__all__) == {*mm.ops.__all__, *mm._HOMES, *modules}\n"
        "assert all(getattr(mm, name) is getattr(_everything, name) for name in _everything.__all__)\n"
    )


@pytest.mark.parametrize(
    "first",
    [
        "import mlx_mittens as mm; mm.softmax",
        "import mlx_mittens as mm; mm.nn.convert",
        "import mlx_mittens as mm; dir(mm)",
        "from mlx_mittens import *",
        "from mlx_mittens.ops.norm import rms_norm",
        "from mlx_mittens.patching.targets import TARGETS",
    ],
)
def test_what_is_asked_for_brings_all(first, monkeypatch):
    """And with it this machine's calibrations and switches."""
    monkeypatch.setenv("MLX_MITTENS_DISABLE", "softmax")
    said = run(
        f"{first}\nassert 'ops' in loaded(), loaded()\nfrom mlx_mittens import build_info as b; print(b().disabled)"
    )
    assert said == "('softmax',)\n"


def test_every_name_is_there():
    run(
        "import mlx_mittens as mm\n"
        "assert callable(mm.stats) and mm.__version__\n"
        "missing = [name for name in mm.__all__ if not hasattr(mm, name)]\n"
        "assert not missing and set(mm.__all__) <= set(dir(mm)), missing\n"
    )


@pytest.mark.parametrize("name", ["softmx", "_softmax"])
def test_a_name_that_is_not_there(name):
    code = f"import mlx_mittens as mm\ntry: mm.{name}\nexcept AttributeError as error: print(error)"
    assert run(code) == f"module 'mlx_mittens' has no attribute '{name}'\n"
