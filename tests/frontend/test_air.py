"""MLX's kernels as Apple's compiler left them in the wheel, beside our front end's output for the same source.

They agree where Metal's text leaves its meaning in doubt: which products and sums may be fused, which functions are the
fast ones, which operations round, and whether anything is rearranged. The library is downloaded, and only read.
"""

import re

import pytest

pytest.importorskip("llvmlite", "0.50")

from helpers import air

from mlx_mittens import frontend

RELEASE = "0.32.4"

pytestmark = pytest.mark.skipif(bool(frontend.compiler_problem()), reason=frontend.compiler_problem() or "")

UNARY, BINARY = "unary_ops.h unary.h", "binary_ops.h binary.h"
QUANTIZED = "steel/gemm/gemm.h quantized_utils.h quantized.h"
# By the name in the library: MLX's headers, and the arguments of its instantiation.
KERNELS = {
    "block_softmax_float16": ("softmax.h", "softmax_single_row, half"),
    "looped_softmax_precise_float16": ("softmax.h", "softmax_looped, half, float"),
    "block_logsumexp_float32": ("logsumexp.h", "logsumexp, float"),
    "v_Expfloat32float32": (UNARY, "unary_v, float, float, Exp"),
    "v_Sigmoidfloat16float16": (UNARY, "unary_v, half, half, Sigmoid"),
    "v_Erffloat16float16": (UNARY, "unary_v, half, half, Erf"),
    "v_Tanhfloat32float32": (UNARY, "unary_v, float, float, Tanh"),
    "v_Rsqrtfloat32float32": (UNARY, "unary_v, float, float, Rsqrt"),
    "v_Roundfloat32float32": (UNARY, "unary_v, float, float, Round"),
    "vv_Dividefloat32": (BINARY, "binary_vv, float, float, Divide"),
    "vv_Powerfloat32": (BINARY, "binary_vv, float, float, Power"),
    "vv_LogAddExpfloat32": (BINARY, "binary_vv, float, float, LogAddExp"),
    "gemv_float32_bm4_bn1_sm1_sn32_tm4_tn4_nc0_axpby0": ("gemv.h", "gemv, float, 4, 1, 1, 32, 4, 4, false, false"),
    "affine_qmv_fast_float16_t_gs_64_b_4_batch_0_pr_0_hgs_0_r_4": (
        QUANTIZED, "affine_qmv_fast, half, 64, 4, false, false",
    ),
    "affine_quantize_float_gs_64_b_4": (QUANTIZED, "affine_quantize, float, 64, 4"),
    "sdpa_vector_float16_t_64_64": ("sdpa_vector.h", "sdpa_vector, half, 64, 64"),
}  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return air.functions(air.download(tmp_path_factory.mktemp("mlx_metal"), RELEASE))


@pytest.mark.parametrize("kernel", KERNELS)
def test_what_the_front_end_reads(library, kernel):
    text = air.text_of(library[kernel])
    assert air.ours(*KERNELS[kernel]) == air.meaning(text)
    # Nothing is rearranged, and subnormals of float32 are zeros: mm.simulator.enabled(subnormals="flush").
    assert {"fast_math_disable", "denorms_disable"} <= air.options(text)


def test_what_is_found_is_there(library):
    """The kernels have one of each kind."""
    found = [air.meaning(air.text_of(library[kernel])) for kernel in KERNELS]
    assert {"exp", "fast_exp", "log", "pow", "tanh", "rsqrt", "rint", "round", "fma"} <= set().union(
        *(one.functions for one in found)
    )
    assert {one.fuses for one in found} == {one.divides for one in found} == {False, True}
    assert not any(one.flags for one in found)


def test_an_expression_is_fused_and_two_are_not(library):
    """A product and a sum of one expression: LLVM's fmuladd, which Apple's machine code may fuse or not."""
    text = air.text_of(library["gemv_float32_bm4_bn1_sm1_sn32_tm4_tn4_nc0_axpby0"])
    assert "@llvm.fmuladd.f32" in text and not re.search(r"= fmul contract|@air\.fma", text)


def test_a_narrower_float_is_the_nearest(library):
    """A plain truncation, whose rounding is the target's: to nearest, as ours."""
    text = air.text_of(library["v_copyfloat32float16"])
    assert "fptrunc float" in text and "air.convert" not in text


def test_a_file_that_is_no_library(tmp_path):
    (tmp_path / "other").write_bytes(bytes(100))
    with pytest.raises(ValueError, match="other is no Metal library"):
        air.functions(tmp_path / "other")
