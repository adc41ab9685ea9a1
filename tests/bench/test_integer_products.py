"""`doctor` multiplies known integers by the kernel for int8 activations on an M5, and says whether they are exact."""

import json

import mlx.core as mx
import numpy as np
import pytest

import mlx_mittens as mm
from mlx_mittens import _ext
from mlx_mittens.cli import integer_products
from mlx_mittens.cli.main import main

EXACT = "integers of 8 bits are multiplied exactly (80x192x70)"


@pytest.mark.parametrize("layout", ["m5", "shuffled"])
def test_the_product_is_exact(native, layout):
    with mx.stream(mx.cpu), mm.simulator.enabled(gpu="m5", tensor_layout=layout):
        _ext.simulator_record(True)
        found, exact = integer_products.multiplied()
        kernels = [run["kernel"] for run in _ext.simulator_record(False)]
        assert (found == exact).all() and integer_products.told() == EXACT
    assert np.abs(exact).max() < 2**24
    assert kernels == ["quantized_matmul_int8_rows_64_float32", "quantized_matmul_qmm_int8_64_float32"]


def test_a_wrong_sum_is_told_with_its_place(native, monkeypatch):
    found, exact = np.zeros((80, 70)), np.zeros((80, 70), np.int64)
    exact[2, 5] = -31
    monkeypatch.setattr(integer_products, "multiplied", lambda: (found, exact))
    assert integer_products.told() == (
        "integers of 8 bits are multiplied wrongly: 1 of 5600 sums, the first in row 2, column 5, where 0 should be "
        "-31; leave activations='int8' out here"
    )


def test_where_it_cannot_be_computed_the_reason_is_told(native):
    with mx.stream(mx.cpu), mm.simulator.enabled(gpu="m4-max"):
        assert integer_products.told().startswith(
            "the product of integers could not be computed: [quantized_matmul] activations is 'int8' on a GPU without"
        )


@pytest.mark.parametrize("gpu, multiplies", [("m5", True), ("m4-max", False)])
def test_doctor_multiplies_where_there_are_matrix_units(native, tmp_path, capsys, gpu, multiplies):
    file = tmp_path / "doctor.json"
    with mm.simulator.enabled(gpu=gpu):
        assert main(["doctor", "--quick", "--ops", "softmax", "--device", "cpu", "--json", str(file)]) == 0
    assert json.loads(file.read_text())["integer_products"] == (EXACT if multiplies else None)
    assert (f"integers      {EXACT}" in capsys.readouterr().out) == multiplies
