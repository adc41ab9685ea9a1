"""Correct code calibrates the front end: MLX's own kernels are taken, and broken text never breaks it."""

import random
import re
import resource
from pathlib import Path

import mlx.core as mx
import pytest
from helpers.dialect_cases import ACCEPTED, HEADER

from mlx_mittens import frontend
from mlx_mittens.frontend.check import dialect

KERNELS = "mlx/backend/metal/kernels"
FOLDER = Path(mx.__file__).parent / "include" / KERNELS

# Text that a header needs before it, where MLX's own .metal files or its run-time compilation include it.
_STEEL = ("steel/gemm/gemm.h",)
_CONVOLUTION = ("steel/conv/conv.h",)
BEFORE = {
    "fp_quantized.h": _STEEL + ("quantized_utils.h",),
    "quantized.h": _STEEL + ("quantized_utils.h",),
    "indexing/scatter.h": ("atomic.h", "reduction/ops.h", "indexing/indexing.h"),
    "indexing/scatter_axis.h": ("atomic.h", "reduction/ops.h"),
    "reduce.h": ("atomic.h", "reduction/ops.h", "reduce_utils.h"),
    "reduction/ops.h": ("atomic.h",),
    "reduction/reduce_all.h": ("atomic.h", "reduction/ops.h", "reduce_utils.h"),
    "reduction/reduce_col.h": ("atomic.h", "reduction/ops.h", "reduce_utils.h"),
    "reduction/reduce_row.h": ("atomic.h", "reduction/ops.h", "reduce_utils.h"),
    "searchsorted.h": ("sort.h",),
    "scan.h": ("binary_ops.h",),
    **{
        f"steel/gemm/kernels/steel_gemm_{name}.h": _STEEL
        for name in ("fused", "gather", "masked", "segmented", "splitk")
    },
    "steel/conv/kernels/steel_conv.h": _STEEL + _CONVOLUTION,
    "steel/conv/kernels/steel_conv_3d.h": _STEEL + _CONVOLUTION,
    "steel/conv/kernels/steel_conv_general.h": _STEEL + _CONVOLUTION,
}
# They are parts of others, which are taken.
PARTS = re.compile(r"steel/conv/loader.*\.h")
# Matrix units of the M5, by tensors of Metal 4.
TENSORS = re.compile(r".*nax.*\.h")


def headers():
    found = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*.h"))
    return [name for name in found if not PARTS.fullmatch(name) and not TENSORS.fullmatch(name)]


def check_header(name):
    """The problems of a kernel header of MLX, with the text that it needs before it."""
    included = "".join(f'#include "{KERNELS}/{header}"\n' for header in ("utils.h", *BEFORE.get(name, ()), name))
    kernel = "[[kernel]] void nothing(device int* y [[buffer(0)]]) { y[0] = 1; }\n"
    file = f"mlx_{name.replace('/', '_')}.metal"
    frontend.register_source(file, HEADER + included + kernel)
    return dialect.check(file)


@pytest.mark.nightly
@pytest.mark.parametrize("name", headers())
def test_every_kernel_source_of_mlx_is_taken(name):
    assert check_header(name) == []


@pytest.mark.parametrize("name", ["binary_ops.h", "fft.h", "gated_delta_update.h", "reduce.h", "scan.h"])
def test_kernel_sources_of_mlx_are_taken(name):
    assert check_header(name) == []


def test_the_checked_file_is_that_of_mlx():
    assert "quantized.h" in headers() and len(headers()) > 60


OF_METAL_4 = {
    "steel/gemm/kernels/steel_gemm_fused_nax.h": "gemm, half, 64, 64, 64, 2, 2, false, true, float",
    "quantized_nax.h": "affine_qmm_t_nax, bfloat16_t, 64, 4, true, false, 64, 64, 64, 2, 2",
    "steel/attn/kernels/steel_attention_nax.h": "attention_nax, half, 64, 32, 64, 64, 4, 1, half, float",
}


@pytest.mark.parametrize("name", OF_METAL_4)
def test_kernels_for_matrix_units_are_taken_in_time(name, tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_MITTENS_CACHE", str(tmp_path))
    before = ("utils.h",) if "attn" in name else ("utils.h", "steel/gemm/gemm_nax.h")
    included = "".join(f'#include "{KERNELS}/{header}"\n' for header in (*before, name))
    frontend.register_source("metal4.metal", f'{included}instantiate_kernel("test", {OF_METAL_4[name]})\n')
    started = resource.getrusage(resource.RUSAGE_CHILDREN)
    [gate] = dialect.check("metal4.metal", dialect.Options(standard="metal4.0"))
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ended.ru_utime + ended.ru_stime - started.ru_utime - started.ru_stime < 10
    assert gate.severity == "note" and gate.what.startswith("products of tensors run right on an M5 with macOS 26.2")
    assert gate.file.endswith("nax.h")  # the header of MLX's that includes them


def test_vectors_of_eight_are_of_metal_4():
    kernel = "constant constexpr int n = 8;\n[[kernel]] void test(device half* y [[buffer(0)]]) {\n"
    kernel += "  vec<half, SIZE> v = 1;\n  y[0] = v[7];\n}\n"
    for size in ("8", "n"):
        frontend.register_source("eights.metal", HEADER + kernel.replace("SIZE", size))
        assert dialect.check("eights.metal", dialect.Options(standard="metal4.0")) == []
        assert "not 8: write an array" in dialect.check("eights.metal")[0].what


def test_quantized_kernels_are_checked_in_time(tmp_path, monkeypatch):
    monkeypatch.setenv("MLX_MITTENS_CACHE", str(tmp_path))
    started = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert check_header("quantized.h") == []
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ended.ru_utime + ended.ru_stime - started.ru_utime - started.ru_stime < 10


def mutated(text, rng):
    """The text with one to three tokens dropped, doubled, swapped or replaced by another of it."""
    tokens = re.findall(r"\w+|\s+|[^\w\s]", text)
    for _ in range(rng.randint(1, 3)):
        i, j = rng.randrange(len(tokens)), rng.randrange(len(tokens))
        kind = rng.randrange(4)
        if kind == 0:
            tokens[i] = ""
        elif kind == 1:
            tokens[i] *= 2
        elif kind == 2:
            tokens[i], tokens[j] = tokens[j], tokens[i]
        else:
            tokens[i] = tokens[j]
    return "".join(tokens)


def check_mutants(count, seed):
    rng = random.Random(seed)
    texts = list(ACCEPTED.values())
    for number in range(count):
        text = mutated(rng.choice(texts), rng)
        frontend.register_source("mutant.metal", HEADER + text)
        for problem in dialect.check("mutant.metal"):
            assert problem.line >= 1 and problem.what, (seed, number, text)


def test_mutated_kernels_have_a_verdict():
    check_mutants(40, seed=1)


@pytest.mark.parametrize(
    "text",
    [
        "kernel void k(device float* a, , uint i [[thread_position_in_grid]]) { a[i] = 1; }",
        "kernel void k(, device float* a [[buffer(0)]]) { a[0] = 1; }",
        "kernel void k(device float* a, [[buffer(0)]]) { a[0] = 1; }",
        "= Pair { float low; };\nfloat sum(= p) { return p.low; }",
    ],
)
def test_mutants_that_once_ended_the_check(text):
    frontend.register_source("mutant.metal", HEADER + text)
    assert any(problem.severity == "error" for problem in dialect.check("mutant.metal"))


@pytest.mark.nightly
def test_many_mutated_kernels_have_a_verdict():
    check_mutants(2000, seed=2)
