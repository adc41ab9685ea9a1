"""`doctor` asks an M5 for the layout of matrices in a SIMD-group, and reports whether MLX's kernels assume the same."""

import json

import mlx.core as mx
import pytest

import mlx_mittens as mm
from mlx_mittens.cli import matrix_layout
from mlx_mittens.cli.main import main


def test_the_layout_that_mlx_assumes_is_told(native):
    with mm.simulator.enabled(gpu="m5"):
        assert matrix_layout.asked() | matrix_layout.asked_of_reductions() == matrix_layout.assumed()
        assert matrix_layout.told() == "the layout that MLX's kernels and the simulator assume"


def test_each_operand_holds_all_places_once():
    sizes = {"left operand": (16, 16), "right operand": (32, 16), "destination": (16, 32)}
    assumed = matrix_layout.assumed()
    for operand, (rows, columns) in sizes.items():
        places = [place for lane in assumed[operand] for place in lane if place != (-1, -1)]
        assert sorted(places) == [(row, column) for row in range(rows) for column in range(columns)]


def test_a_lane_has_the_values_of_its_rows_and_columns():
    assumed = matrix_layout.assumed()
    for elements, rows, columns in zip(
        assumed["destination"], assumed["reduction of rows"], assumed["reduction of columns"]
    ):
        assert [row for row, _ in rows if row >= 0] == sorted({row for row, _ in elements})
        assert [column for column, _ in columns if column >= 0] == sorted({column for _, column in elements})


def test_another_layout_is_told_with_the_first_place(native):
    with mm.simulator.enabled(gpu="m5", tensor_layout="shuffled"):
        found = matrix_layout.asked()
        told = matrix_layout.told()
    lane, i = next(
        (lane, i)
        for lane in range(32)
        for i in range(8)
        if found["left operand"][lane][i] != matrix_layout.assumed()["left operand"][lane][i]
    )
    row, column = found["left operand"][lane][i]
    assert told.startswith("not the layout that MLX's kernels assume: of the left operand ")
    assert f"lane {lane} has row and column {row}, {column} as element {i}, " in told


def test_reductions_that_lie_otherwise_are_told(native, monkeypatch):
    other = {of: [lane[::-1] for lane in lanes] for of, lanes in matrix_layout.assumed().items() if "reduction" in of}
    with mm.simulator.enabled(gpu="m5"):
        monkeypatch.setattr(matrix_layout, "asked_of_reductions", lambda: other)
        told = matrix_layout.told()
    assert told.startswith(
        "the layout that MLX's kernels and the simulator assume; but in the reduction of rows lane 0 "
    )
    assert "has value -1 as element 0, where the simulator has 0, so that tensor_layout='m5' is wrong for it" in told


def test_reductions_that_cannot_be_asked_for_are_told(native, monkeypatch):
    def refused():
        raise RuntimeError("no member named get_row_reduction\nin line 3")

    with mm.simulator.enabled(gpu="m5"):
        monkeypatch.setattr(matrix_layout, "asked_of_reductions", refused)
        told = matrix_layout.told()
    assert told.endswith("assume; that of reductions could not be asked for: no member named get_row_reduction")


@pytest.mark.skipif(mx.metal.is_available(), reason="this machine has Metal")
def test_where_it_cannot_be_asked_for_the_reason_is_told(native):
    assert matrix_layout.told().startswith("the layout of matrix units could not be asked for: ")


@pytest.mark.parametrize("gpu, asks", [("m5", True), ("m4-max", False)])
def test_doctor_asks_where_there_are_matrix_units(native, tmp_path, capsys, gpu, asks):
    file = tmp_path / "doctor.json"
    with mm.simulator.enabled(gpu=gpu):
        assert main(["doctor", "--quick", "--ops", "softmax", "--device", "cpu", "--json", str(file)]) == 0
    told = "the layout that MLX's kernels and the simulator assume"
    assert json.loads(file.read_text())["matrix_units"] == (told if asks else None)
    assert (f"matrix units  {told}" in capsys.readouterr().out) == asks
