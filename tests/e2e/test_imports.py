"""What an import brings: the testing tools neither ops nor patch, the package all of it once it is asked."""

import subprocess
import sys

import pytest

# What a suite of somebody's own kernels has no use for.
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
    """And with it what is measured and switched off on this machine."""
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
