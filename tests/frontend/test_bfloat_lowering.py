"""bfloat in 16-bit integers: results of LLVM's text after the lowering, on this processor."""

import ctypes
import subprocess

import ml_dtypes
import numpy as np
import pytest

from mlx_mittens.frontend import compiler
from mlx_mittens.frontend.lower import bfloat_lowering

pytestmark = pytest.mark.skipif(bool(compiler.compiler_problem()), reason=compiler.compiler_problem())

TEXT = """
typedef __bf16 bf16;
typedef __bf16 bf16x2 __attribute__((ext_vector_type(2)));
typedef float floatx2 __attribute__((ext_vector_type(2)));
extern "C" {
void add(const bf16* x, const bf16* y, bf16* out) { *out = *x + *y; }
void subtract(const bf16* x, const bf16* y, bf16* out) { *out = *x - *y; }
void multiply(const bf16* x, const bf16* y, bf16* out) { *out = *x * *y; }
void divide(const bf16* x, const bf16* y, bf16* out) { *out = *x / *y; }
void negate(const bf16* x, const bf16* y, bf16* out) { *out = -*x; }
void half_of_sum(const bf16* x, const bf16* y, bf16* out) { *out = bf16(0.5f) * (*x + *y); }
void smaller(const bf16* x, const bf16* y, bf16* out) { *out = *x < *y ? *x : *y; }
void twice_in_float(const bf16* x, const bf16* y, bf16* out) { *out = bf16(float(*x) * 2.0f); }
void whole(const bf16* x, const bf16* y, bf16* out) { *out = bf16(int(*x)); }
void pair(const bf16* x, const bf16* y, bf16* out) {
  bf16x2 a = {*x, *y}, b = {*y, *x};
  floatx2 sum = __builtin_convertvector(a * b, floatx2) + 1.0f;
  *out = __builtin_convertvector(sum, bf16x2)[1];
}
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bfloat")
    clang = compiler.find_compiler()
    flags = ["-x", "c++", "-S", "-emit-llvm", "-O1", "-Xclang", "-disable-llvm-passes", "-fno-vectorize", "-w"]
    flags += ["-Xclang", "-fbfloat16-excess-precision=none", "-fPIC", "-o", "-"]
    made = clang.run(flags, TEXT)
    assert made.returncode == 0, made.stderr
    assert "bfloat" in made.stdout
    lowered = bfloat_lowering.lowered(made.stdout)
    assert "bfloat" not in lowered
    compiled = folder / "bfloat.o"
    done = clang.run(["-x", "ir", "-c", "-O2", "-w", "-fPIC", "-o", str(compiled)], lowered)
    assert done.returncode == 0, done.stderr
    shared = folder / "bfloat.so"
    subprocess.run([*clang.linker, str(compiled), "-o", str(shared)], check=True)
    return ctypes.CDLL(str(shared))


def called(library, name, x, y):
    out = np.zeros(len(x), ml_dtypes.bfloat16)
    function = getattr(library, name)
    for i in range(len(x)):
        function(*(ctypes.c_void_p(a.ctypes.data + 2 * i) for a in (x, y, out)))
    return out


def rounded(x):
    return x.astype(np.float32).astype(ml_dtypes.bfloat16)


OPERATIONS = {
    "add": lambda x, y: rounded(x + y),
    "subtract": lambda x, y: rounded(x - y),
    "multiply": lambda x, y: rounded(x * y),
    "divide": lambda x, y: rounded(x / y),
    "negate": lambda x, y: rounded(-x),
    "half_of_sum": lambda x, y: rounded(np.float32(0.5) * rounded(x + y).astype(np.float32)),
    "smaller": lambda x, y: rounded(np.where(x < y, x, y)),
    "twice_in_float": lambda x, y: rounded(x * 2),
    "whole": lambda x, y: rounded(np.trunc(x) + 0.0),
    "pair": lambda x, y: rounded(rounded(x * y).astype(np.float32) + 1),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_results_are_rounded_as_bfloat_is(library, name):
    rng = np.random.default_rng(3)
    x, y = (rounded(rng.standard_normal(2000) * 2.0 ** rng.integers(-12, 13, 2000)) for _ in range(2))
    expected = OPERATIONS[name](x.astype(np.float32), y.astype(np.float32))
    assert np.array_equal(called(library, name, x, y).view(np.uint16), expected.view(np.uint16))


def test_infinities_and_nan(library):
    x = rounded(np.array([np.inf, -np.inf, np.nan, 3.3e38, 0.0, -0.0]))
    y = rounded(np.array([1.0, np.inf, 1.0, 3.3e38, -0.0, -0.0]))
    result = called(library, "add", x, y).astype(np.float32)
    assert np.array_equal(result, [np.inf, np.nan, np.nan, np.inf, 0.0, -0.0], equal_nan=True)


def test_an_operation_that_is_not_known_is_said():
    with pytest.raises(bfloat_lowering.UnknownOperation, match=r"llvm\.fabs\.bf16"):
        bfloat_lowering.lowered("  %1 = call bfloat @llvm.fabs.bf16(bfloat %0)\n")


def test_a_text_without_bfloat_stays():
    assert bfloat_lowering.lowered("define void @softmax_bf16() {\n  ret void\n}\n").count("\n") == 3
