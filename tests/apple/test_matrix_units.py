"""Products on matrix units: the estimate equals the simulator's counts of MLX's kernel, and none is above the peak."""

import struct

import mlx.core as mx
import pytest
from helpers import scripts
from helpers.tensor_ops import mlx_kernel

import mlx_mittens as mm
from mlx_mittens.apple import estimates
from mlx_mittens.apple.chips import chips, find_chip
from mlx_mittens.apple.model import predict
from mlx_mittens.ops.custom import Output, int32, launch
from mlx_mittens.prediction import matrix_units as counted

script = scripts.load("apple/matrix_units")
UNITS = [chip.name for chip in chips().values() if chip.tensor_flop_per_core_cycle is not None]


def test_the_estimate_is_what_the_simulator_counts(rng):
    m, n, k = 128, 256, 128
    file = mlx_kernel(
        "nax_fused_large.metal",
        ["utils.h", "steel/gemm/gemm_nax.h", "steel/gemm/kernels/steel_gemm_fused_nax.h"],
        "gemm, half, 64, 128, 64, 2, 4, false, true, float",
    )
    params = struct.pack("<8i3q3i4x", m, n, k, k, k, n, 2, 2, 0, 0, 0, 0, k // 64, 1)
    a, b = (mx.array(rng.standard_normal(shape)).astype(mx.float16) for shape in ((m, k), (n, k)))
    arguments = {0: a, 1: b, 3: Output((m, n), mx.float16), 4: params, 6: int32(0), 7: int32(0)}
    constants = {10: False, 100: False, 110: False, 200: True, 201: True, 202: True}
    with mm.simulator.profiled() as launches:
        (c,) = launch(file, "test", arguments, [2, 2, 1], [32, 4, 2], constants=constants, stream=mx.cpu)
        mx.eval(c)
    found, expected = counted.work_of(launches[0]), estimates.unit_product(1, m, n, k, "float16", 2, (64, 128))
    for name in ("matrix", "loads", "stores"):
        assert getattr(found.instructions, name) == getattr(expected.instructions, name), name
    assert (found.lines, found.summed_lines, found.threads) == (expected.lines, expected.summed_lines, expected.threads)
    assert expected.rounds <= found.rounds <= 2 * expected.rounds  # a step's loads of one line need not wait


@pytest.mark.parametrize("name", UNITS)
def test_no_product_is_predicted_above_the_peak(name):
    chip = find_chip(name)
    for dtype, size in (("float16", 2), ("int8", 1)):
        for sizes in ((4096, 4096, 4096), (16384, 16384, 16384), (64, 4096, 4096), (1, 128, 128)):
            work = estimates.unit_product(
                1, *sizes, dtype, size, (64, 128) if chip.tier in ("pro", "max") else (128, 128)
            )
            rate = 2 * sizes[0] * sizes[1] * sizes[2] / predict(work, chip).microseconds / 1e6
            assert rate < script.peak(chip, dtype), (dtype, sizes)


def test_the_page_is_made_of_the_points():
    assert script.REPORT.read_text() == script.report(), "run python bench/apple/matrix_units.py"
    for point in script.POINTS:
        assert point.measured < script.peak(find_chip(point.chip), point.dtype)
