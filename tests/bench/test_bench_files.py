"""Runs of the benchmark that end early and go on, and the comparison of two files."""

import json
from dataclasses import replace

import mlx.core as mx
import pytest

from mlx_mittens import specs
from mlx_mittens.bench import machine, measure, timing
from mlx_mittens.cli import bench, bench_compare, runs
from mlx_mittens.cli.main import main

ASKED = ["--quick", "--device", "cpu", "--ops", "softmax,rms_norm"]


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """Few samples of small cases; the default device is put back."""
    monkeypatch.setattr(bench, "QUICK", measure.Budget(seconds=0, fewest=2, most=2))
    monkeypatch.setattr(timing, "_CPU_BYTES", (1 << 16, 1 << 16))
    monkeypatch.setattr(measure, "_SHORTEST_SAMPLE", {"cpu": 0, "gpu": 0})
    monkeypatch.setattr(machine, "copy_gb_s", lambda: 10.0)
    small = lambda op: tuple(replace(case, shape=(2, 64, 8)[: len(case.shape)]) for case in op.cases)
    ops = [op for op in specs.OPS if op.name in ("softmax", "rms_norm")]
    monkeypatch.setattr(specs, "OPS", tuple(replace(op, cases=small(op)) for op in ops))
    before = mx.default_device()
    yield
    mx.set_default_device(before)


@pytest.fixture
def counted(monkeypatch):
    """The cases that are measured, by their names."""
    names, real = [], bench.measure
    monkeypatch.setattr(
        bench, "measure", lambda *given: names.append((given[0].name, given[1].name, given[2])) or real(*given)
    )
    return names


def keys(file):
    return [(row["op"], row["case"], row["dtype"]) for row in json.loads(file.read_text())["rows"]]


def test_a_time_limit_ends_with_the_table_of_every_op(tmp_path, capsys, monkeypatch, counted):
    file = tmp_path / "bench.json"
    real = runs.each
    monkeypatch.setattr(bench, "each", lambda *given: real(*given[:3], 1e-9))
    assert main(["bench", *ASKED, "--minutes", "5", "--json", str(file)]) == 0
    assert len(counted) == 1, "one at least"
    printed = capsys.readouterr()
    assert "Incomplete: 1 of" in printed.out and "time limit" in printed.err and "speedup" in printed.out
    result = json.loads(file.read_text())
    assert result["complete"] is False and "time limit" in result["reason"]


def test_a_time_limit_takes_something_of_each_op_first():
    items = measure.plan(["rms_norm", "softmax"], "cpu", True)
    mixed = bench._mixed(items)
    assert [item[0].name for item in mixed[:4]] == ["rms_norm", "softmax"] * 2
    assert sorted(map(str, mixed)) == sorted(map(str, items))


@pytest.mark.parametrize("text", ["0", "-1", "x", "inf", "nan"])
def test_a_time_limit_is_a_number(capsys, text):
    with pytest.raises(SystemExit):
        main(["bench", "--minutes", text])
    assert "no number of minutes above 0" in capsys.readouterr().err


def test_a_run_goes_on(tmp_path, capsys, monkeypatch, counted):
    file = tmp_path / "bench.json"
    stop = bench.measure

    def stopped(*given):
        if len(counted) == 3:
            raise KeyboardInterrupt
        return stop(*given)

    monkeypatch.setattr(bench, "measure", stopped)
    assert main(["bench", *ASKED, "--seed", "7", "--json", str(file)]) == 130
    before = json.loads(file.read_text())
    assert before["measured"] == len(before["rows"]) == 3
    monkeypatch.setattr(bench, "measure", stop)
    counted.clear()
    assert main(["bench", "--resume", str(file)]) == 0
    after = json.loads(file.read_text())
    planned = [(op.name, case.name, dtype) for op, case, dtype in measure.plan(["softmax", "rms_norm"], "cpu", True)]
    assert after["complete"] and keys(file) == planned and after["machine"]["seed"] == 7
    assert after["rows"][:3] == before["rows"] and len(counted) == len(planned) - 3
    assert f"3 of {len(planned)} rows are there" in capsys.readouterr().out
    counted.clear()
    assert main(["bench", "--resume", str(file), "--json", str(tmp_path / "other.json")]) == 0
    assert counted == [] and keys(tmp_path / "other.json") == planned


def test_a_wrong_row_stays_wrong(tmp_path, capsys):
    file = tmp_path / "bench.json"
    assert main(["bench", *ASKED, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    result["rows"][0] |= {"wrong": "off by one", "error": None}
    file.write_text(json.dumps(result))
    assert main(["bench", "--resume", str(file)]) == 1
    assert "off by one" in capsys.readouterr().out


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "a.json"
    assert main(["bench", *ASKED, "--json", str(path)]) == 0
    return path


def edit(file, change):
    result = json.loads(file.read_text())
    change(result)
    file.write_text(json.dumps(result))


@pytest.mark.parametrize(
    ("change", "more", "words"),
    [
        (lambda result: result.pop("asked"), [], "an older version wrote it"),
        (lambda result: result["machine"].update(processor="another"), [], "is of processor another"),
        (lambda result: result["machine"]["versions"].update(mlx="0.1"), [], "is of mlx 0.1"),
        (lambda result: result.update(predicted=True), [], "is of predictions"),
        (lambda result: result.update(shares={}), [], "is of whole models"),
        (lambda result: result.pop("rows"), [], "is not what mlx-mittens bench --json writes"),
        (lambda result: None, ["--ops", "softmax"], "--ops does not go with --resume"),
        (lambda result: None, ["--quick"], "--quick does not go with --resume"),
        (lambda result: None, ["--model", "qwen3-0.6b"], "--resume does not go with --model"),
    ],
)
def test_what_cannot_be_gone_on_with(file, capsys, change, more, words):
    edit(file, change)
    assert main(["bench", "--resume", str(file), *more]) == 2
    assert words in capsys.readouterr().err


def test_files_that_cannot_be_read(tmp_path, capsys):
    (tmp_path / "text").write_text("text")
    for path, words in ((tmp_path / "none", "No such file"), (tmp_path / "text", "is not JSON")):
        assert main(["bench", "--resume", str(path)]) == 2
        assert words in capsys.readouterr().err


def compare(file, other, *more):
    return main(["bench", "--compare", str(file), str(other), *more])


def test_what_moved_beyond_the_spread(file, tmp_path, capsys):
    def of_known_times(result):
        for row in result["rows"]:
            row.update(mittens_ms=1.0, speedup=2.0, spread=0.1)

    def moved(result):
        for row, (ms, spread) in zip(result["rows"], ((1.5, 0.1), (0.5, 0.1), (1.19, 0.1), (1.5, 0.6)), strict=False):
            row.update(mittens_ms=ms, spread=spread)
        result["rows"][4]["wrong"] = "off by one"
        result["rows"].pop()

    edit(file, of_known_times)
    other = tmp_path / "b.json"
    other.write_text(file.read_text())
    assert compare(file, other) == 0
    rows = len(keys(file))
    assert f"{rows} rows in both: 0 slower in B, 0 faster, {rows} within the spread" in capsys.readouterr().out
    edit(other, moved)
    assert compare(file, other) == 0
    text = capsys.readouterr().out
    assert text.count("+50.0%") == 1 and text.count("-50.0%") == 1 and text.count("WRONG") == 1
    assert "Only in A" in text and "1 slower in B" in text and "no spread" not in text
    with_old = json.loads(other.read_text())
    for row in with_old["rows"]:
        del row["spread"]
    other.write_text(json.dumps(with_old))
    assert compare(file, other) == 0 and "Where a file has no spread, 5% is taken." in capsys.readouterr().out


def test_a_side_that_was_calibrated_is_named(file, tmp_path, capsys):
    other = tmp_path / "b.json"
    other.write_text(file.read_text())
    said = "planned by a calibration of its machine"
    assert compare(file, other) == 0 and said not in capsys.readouterr().out
    edit(other, lambda result: [row.update(calibrated=number < 2) for number, row in enumerate(result["rows"])])
    text = "B was planned by a calibration of its machine in 2 rows, A by the tables alone: "
    assert compare(file, other) == 0 and text in capsys.readouterr().out
    assert (
        compare(other, file) == 0 and text.replace("B was", "A was").replace("A by", "B by") in capsys.readouterr().out
    )
    assert compare(other, other) == 0 and said not in capsys.readouterr().out


def test_a_move_is_the_same_in_both_directions():
    row = lambda ms: {"op": "a", "case": "b", "dtype": "c", "mittens_ms": ms, "spread": 0.05}
    for a, b, moved in ((1.0, 1.2, True), (1.2, 1.0, True), (1.0, 1.09, False), (1.09, 1.0, False)):
        (move,) = bench_compare.moves({"rows": [row(a)]}, {"rows": [row(b)]})
        assert move.moved == moved


def test_a_comparison_takes_no_other_options(file, capsys):
    for more in (["--quick"], ["--ops", "softmax"], ["--json", "x.json"], ["--minutes", "1"], ["--seed", "0"]):
        assert compare(file, file, *more) == 2
        assert f"{more[0]} does not go with --compare" in capsys.readouterr().err


def test_files_without_a_common_row(file, tmp_path, capsys):
    other = tmp_path / "b.json"
    other.write_text(file.read_text())
    edit(other, lambda result: result.update(rows=[]))
    assert compare(file, other) == 2
    assert "no row in common" in capsys.readouterr().err
