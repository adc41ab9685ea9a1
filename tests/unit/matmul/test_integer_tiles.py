"""Integer products by AMX: tiles give the bits of the panels of AVX-512 VNNI, and a process may be refused them."""

import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from helpers.matrices import draw, draw_blocks, quantize
from helpers.support import child_environment

import mlx_mittens as mm
from mlx_mittens import specs

CPU = mx.Device(mx.cpu)
SETS = ("avx512vnni", "avx512amx")
ROWS = (24, 37, 128, 300)  # both sets have panels of 24 rows and more
SIZES = ((192, 384), (71, 1280), (7, 2304))


def products(rng):
    """Named results of all that panels multiply, with an outlier, a zero row and a row that integers refuse."""

    def x_of(rows, columns, dtype):
        x = specs.widen(draw(rng, (rows, columns), dtype))
        x[1], x[2, 3], x[3, 5] = 0, 1e3, np.nan
        return mx.array(x).astype(dtype)

    for rows in ROWS:
        for outputs, columns in SIZES:
            case = f"{rows} rows {outputs}x{columns}"
            for bits in (2, 3, 4, 5, 6, 8):
                for group, dtype in ((32, mx.float16), (64, mx.bfloat16), (128, mx.float16)):
                    w = quantize(rng, (outputs, columns), dtype, group, bits)
                    x, form = x_of(rows, columns, dtype), {"group_size": group, "bits": bits, "stream": CPU}
                    yield f"{bits} bits {group} {case}", mm.quantized_matmul(x, *w, **form)
                    yield f"{bits} bits {group} int8 {case}", mm.quantized_matmul(x, *w, activations="int8", **form)
            for mode in ("mxfp4", "nvfp4"):
                w, x = (
                    mx.quantize(draw(rng, (outputs, columns), mx.float16), mode=mode),
                    x_of(rows, columns, mx.float16),
                )
                for form in ({}, {"activations": "int8"}):
                    yield f"{mode} {form} {case}", mm.quantized_matmul(x, *w, mode=mode, stream=CPU, **form)
            w, x = quantize(rng, (outputs, columns), mx.float32, 64, 4), x_of(rows, columns, mx.float32)
            yield f"float32 int8 {case}", mm.quantized_matmul(x, *w, activations="int8", stream=CPU)
        for kind in specs.gguf.KINDS:
            blocks = draw_blocks(rng, 74, 1280 // specs.gguf.KINDS[kind].weights, kind, spread=1)
            bias = draw(rng, (74,), mx.float16)
            yield (
                f"{kind} {rows}",
                mm.block_matmul(x_of(rows, 1280, mx.float16), mx.array(blocks), kind, bias=bias, stream=CPU),
            )
        gate, up = (quantize(rng, (72, 512), mx.bfloat16, 64, 4) for _ in range(2))
        yield f"swiglu {rows}", mm.quantized_swiglu(x_of(rows, 512, mx.bfloat16), gate, up, 64, 4, stream=CPU)
    experts = [mx.stack(each) for each in zip(*(quantize(rng, (40, 256), mx.float16, 64, 4) for _ in range(3)))]
    x, chosen = draw(rng, (200, 1, 1, 256), mx.float16), mx.array(np.arange(400).reshape(200, 2) % 3)
    yield "experts", mm.gather_qmm(x, *experts, rhs_indices=chosen.astype(mx.uint32), stream=CPU)


def run(name, *arguments):
    return subprocess.run(
        [sys.executable, *arguments],
        env={**child_environment(), "MLX_MITTENS_CPU": name},
        capture_output=True,
        text=True,
    )


def test_tiles_give_the_bits_of_panels(tmp_path):
    found = []
    for name in SETS:
        done = run(name, __file__, str(tmp_path / f"{name}.npz"))
        if f"MLX_MITTENS_CPU is '{name}', this machine runs" in done.stderr:
            pytest.skip(f"this machine has no {name}")
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(np.load(tmp_path / f"{name}.npz"))
    panels, tiles = found
    assert panels.files == tiles.files and len(panels.files) > 500
    assert [case for case in panels.files if not np.array_equal(panels[case], tiles[case])] == []


# A signal stack of 8 KiB has no room for tiles: Linux refuses them to a process with such a stack.
SMALL_STACK = """
import ctypes
class Stack(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
memory = ctypes.create_string_buffer(8192)
stack = Stack(ctypes.cast(memory, ctypes.c_void_p), 0, 8192)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(stack), None) == 0
"""
PRODUCT = """
import mlx.core as mx, mlx_mittens as mm
w = mx.quantize(mx.ones((64, 64)))
y = mm.quantized_matmul(mx.ones((40, 64)), *w, activations="int8", stream=mx.cpu)
assert mx.allclose(y, mx.full((40, 64), 64.0), rtol=0.01)
print(mm._ext.cpu_instructions, mm.executors()["native"])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone asks for a permission")
def test_a_process_that_is_refused_tiles_runs_the_set_before():
    allowed, refused = (run("", "-c", begin + PRODUCT) for begin in ("", SMALL_STACK))
    assert allowed.returncode == refused.returncode == 0, allowed.stderr + refused.stderr
    before = "avx512vnni" if allowed.stdout.startswith("avx512amx") else allowed.stdout.split()[0]
    assert refused.stdout.startswith(before + " ") and f"ready: {before}," in refused.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone asks for a permission")
def test_asking_for_tiles_that_are_refused_names_the_others():
    done = run("avx512amx", "-c", SMALL_STACK + PRODUCT)
    assert done.returncode != 0
    assert "MLX_MITTENS_CPU is 'avx512amx', this machine runs '" in done.stderr
    assert "'avx512amx'" not in done.stderr.split("this machine runs", 1)[1]


if __name__ == "__main__":
    results = {}
    for case, y in products(np.random.default_rng(0)):
        results[case] = np.array(y.view(mx.uint32 if y.dtype == mx.float32 else mx.uint16))
    np.savez(sys.argv[1], **results)
