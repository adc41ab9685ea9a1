"""The page of measurements on many machines."""

import json
import pathlib
import runpy
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
SCRIPT = ROOT / "bench" / "machines.py"
MACHINES = runpy.run_path(str(SCRIPT))


def file(tmp_path, name, speedups, **more):
    of = {"gpu": "Apple M3 Pro", "device": "gpu", "processor": "Apple M3 Pro", "cores": 12, "executor": "metal"}
    of |= {"copy_gb_s": 140.2, "versions": {"mlx": "0.32.4", "mlx_mittens": "0.1.0"}, "date": "2026-12-01"}
    rows = [
        {"op": op, "case": case, "dtype": "float16", "mittens_ms": 1.0, "speedup": speedup, "error": 1e-4}
        for op, case, speedup in speedups
    ]
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps({"machine": of, "complete": True, "rows": rows, **more}))
    return path


def run(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True)


def test_a_table_and_a_plot(tmp_path):
    pytest.importorskip("matplotlib")
    one = file(tmp_path, "m3-pro-18", [("softmax", "a", 2.0), ("softmax", "b", 8.0), ("gemv", "c", 3.0)])
    other = file(tmp_path, "m1-8", [("softmax", "a", 1.5)], complete=False)
    done = run(one, other, "--plot", tmp_path / "plot.svg")
    assert done.returncode == 0, done.stderr
    assert "| m3-pro-18 | Apple M3 Pro | metal | 140 | 3 | 0 | 0.32.4 | 0.1.0 | 2026-12-01 |" in done.stdout
    assert "| m1-8 | Apple M3 Pro | metal | 140 | 1 (incomplete) | 0 |" in done.stdout
    assert "| softmax | 4 | 1.5 |" in done.stdout and "| gemv | 3 | - |" in done.stdout
    assert (tmp_path / "plot.svg").read_text().count("m3-pro-18") == 1


def test_wrong_rows_count_as_wrong_and_not_as_fast(tmp_path):
    path = file(tmp_path, "m1", [("softmax", "a", 2.0), ("softmax", "b", 100.0)])
    found = json.loads(path.read_text())
    found["rows"][1] |= {"wrong": "off by one"}
    path.write_text(json.dumps(found))
    machine = MACHINES["read"](path)
    assert machine.wrong == 1 and machine.speeds() == {"softmax": 2.0}


def test_rows_that_scatter_by_more_than_themselves_say_nothing(tmp_path):
    path = file(tmp_path, "h200", [("sample", "a", 2.0), ("sample", "b", 48.9)])
    found = json.loads(path.read_text())
    for row, spread in zip(found["rows"], (0.3, 135.5), strict=True):
        row["spread"] = spread
    path.write_text(json.dumps(found))
    assert MACHINES["read"](path).speeds() == {"sample": 2.0}


def test_other_files_are_left_out(tmp_path):
    predicted, models = file(tmp_path, "a", []), file(tmp_path, "b", [("softmax", "a", 2.0)], shares={})
    assert MACHINES["read"](predicted) is None and MACHINES["read"](models) is None
    done = run(predicted)
    assert done.returncode == 1 and "no file of mlx-mittens bench --json" in done.stderr


def test_the_page_is_of_the_files():
    machines = MACHINES["all_machines"]()
    assert MACHINES["TABLE"].read_text() == MACHINES["page"](machines), "run python bench/machines.py --write"
    svg = MACHINES["PLOT"].read_text()
    assert all(machine.name in svg for machine in machines)
