"""Every step of the ladder, in the simulator, over sizes around the edges of tiles."""

import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

import mlx_mittens as mm

LADDER = Path(__file__).parent / "ladder"
sys.path.insert(0, str(LADDER))

from step1_copy import copy  # noqa: E402
from step2_add import add  # noqa: E402
from step3_row_softmax import row_softmax  # noqa: E402
from step4_gemm import gemm  # noqa: E402
from step5_attention import attention  # noqa: E402

DTYPES = [(mx.float32, 1e-5), (mx.float16, 2e-3), (mx.bfloat16, 2e-2)]


@pytest.fixture(params=[1, 7])
def simulated(request):
    with mm.simulator.enabled(seed=request.param):
        yield


def near(y, exact, tolerance):
    y, exact = y.astype(mx.float32), exact.astype(mx.float32)
    assert y.shape == exact.shape
    assert mx.abs(y - exact).max().item() <= tolerance * max(mx.abs(exact).max().item(), 1)


@pytest.mark.parametrize("dtype, tolerance", DTYPES)
@pytest.mark.parametrize("rows, columns", [(1, 1), (16, 32), (17, 33), (40, 100)])
def test_copy_and_add(simulated, dtype, tolerance, rows, columns):
    a, b = (mx.random.normal((rows, columns)).astype(dtype) for _ in range(2))
    assert mx.array_equal(copy(a), a)
    near(add(a, b), a + b, tolerance)


@pytest.mark.parametrize("dtype, tolerance", DTYPES)
@pytest.mark.parametrize("rows, columns", [(1, 1), (8, 32), (9, 31), (20, 200)])
def test_row_softmax(simulated, dtype, tolerance, rows, columns):
    x = (mx.random.normal((rows, columns)) * 10).astype(dtype)
    near(row_softmax(x), mx.softmax(x, axis=-1, precise=True), tolerance)


@pytest.mark.parametrize("dtype, tolerance", DTYPES)
@pytest.mark.parametrize("rows, inner, columns", [(1, 1, 1), (32, 8, 32), (33, 50, 70), (7, 9, 100)])
def test_gemm(simulated, dtype, tolerance, rows, inner, columns):
    a, b = mx.random.normal((rows, inner)).astype(dtype), mx.random.normal((inner, columns)).astype(dtype)
    near(gemm(a, b), a.astype(mx.float32) @ b.astype(mx.float32), tolerance)


@pytest.mark.parametrize("dtype, tolerance", DTYPES)
@pytest.mark.parametrize("heads, tokens, width", [(1, 1, 8), (2, 8, 64), (3, 45, 64), (1, 100, 24)])
def test_attention(simulated, dtype, tolerance, heads, tokens, width):
    q, k, v = (mx.random.normal((heads, tokens, width)).astype(dtype) for _ in range(3))
    wide = [a.astype(mx.float32)[None] for a in (q, k, v)]
    exact = mx.fast.scaled_dot_product_attention(*wide, scale=width**-0.5, mask="causal")[0]
    near(attention(q, k, v), exact, tolerance)


@pytest.mark.parametrize("step", sorted(path.name for path in LADDER.glob("step*.py")))
def test_each_runs_by_one_call(step):
    ran = subprocess.run([sys.executable, str(LADDER / step)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert float(ran.stdout.split("largest error")[1]) < 1e-4
