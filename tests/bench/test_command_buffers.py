"""Limits of Metal's command buffers, and a token's gain by other limits: with stand-ins, since none is here."""

import json
import subprocess
import sys

import mlx.core as mx
import pytest

from mlx_mittens import _ext
from mlx_mittens.calibration import Calibration, command_buffers, store
from mlx_mittens.calibration.command_buffers import Limits, Trial
from mlx_mittens.cli import calibrate, doctor

OWN = Trial(50, 50, True, 1000.0, 0.002, 100)
FASTER = Trial(1000, 400, False, 930.0, 0.002, 105)


@pytest.fixture
def metal(monkeypatch):
    """As on a Mac whose MLX ends a command buffer after 50 launches or 50 MB."""
    monkeypatch.setattr(_ext, "command_buffer_limits", lambda: (50, 50))
    for name in command_buffers.VARIABLES:
        monkeypatch.delenv(name, raising=False)


def trial(ops, mb, us, spread=0.002, peak=100):
    return Trial(ops, mb, False, us, spread, peak)


def test_without_metal_there_are_none():
    assert command_buffers.limits() is None
    assert doctor._command_buffers("gpu") is None and doctor._command_buffers("cpu") is None


@pytest.mark.parametrize(
    "others, expected",
    [
        ([FASTER], FASTER),
        ([trial(200, 200, 931.0), FASTER], trial(200, 200, 931.0)),  # the least of alike ones
        ([trial(200, 200, 960.0), FASTER], FASTER),
        ([trial(1000, 400, 995.0)], None),  # less than 1 %
        ([trial(1000, 400, 930.0, spread=0.08)], None),  # within the spread
        ([trial(1000, 400, 930.0, peak=150)], None),  # for more memory
        ([trial(1000, 1000, 900.0, peak=150), FASTER], FASTER),
        ([], None),
    ],
)
def test_the_best_limits(others, expected):
    assert command_buffers.best([OWN, *others]) == expected


def test_nothing_follows_from_others_alone():
    assert command_buffers.best([FASTER]) is None


def test_the_advice():
    own, current = OWN.limits, Limits(1000, 400)
    assert command_buffers.advice(own, []) == "`mlx-mittens calibrate` tries others"
    text = command_buffers.advice(own, [OWN, FASTER])
    assert text == (
        "set MLX_MAX_OPS_PER_BUFFER=1000 MLX_MAX_MB_PER_BUFFER=400 before Python starts: a token of the trial took 7% "
        "less time than with MLX's own, 50 launches or 50 MB"
    )
    assert command_buffers.advice(current, [OWN, FASTER]).startswith("a token of the trial took 7% less time")
    same = [OWN, trial(1000, 400, 999.0)]
    assert "no others that were tried" in command_buffers.advice(own, same)
    assert command_buffers.advice(current, same).endswith("unset MLX_MAX_OPS_PER_BUFFER and MLX_MAX_MB_PER_BUFFER")


def test_who_says_what_holds():
    assert command_buffers.holds(OWN.limits, {}) == "end after 50 launches or 50 MB, MLX's own limits for this GPU"
    text = command_buffers.holds(Limits(200, 50), {"MLX_MAX_OPS_PER_BUFFER": "200"})
    assert text == "end after 200 launches or 50 MB, as MLX_MAX_OPS_PER_BUFFER says"


def test_all_are_tried_in_turns():
    order = []

    def run(setting):
        order.append(setting)
        ops, mb = setting or (50, 50)
        base = 1000.0 if setting is None else 900.0 + mb / 100
        return {"limits": [ops, mb], "us": [base - 1, base, base, base + 1], "peak": 100 + len(order)}

    trials = command_buffers.try_all(run)
    assert [one.own for one in trials] == [True, False, False, False]
    assert order[:4] == order[8:] == order[4:8][::-1] and order[0] is None
    assert trials[0].limits == Limits(50, 50) and trials[0].us == 1000 and 0 < trials[0].spread < 0.01
    assert trials[0].peak == 109  # the most of its turns
    assert command_buffers.best(trials).limits == Limits(200, 200)


def test_what_a_process_times():
    """On a CPU, which has no command buffers: the work, and its report."""
    with mx.stream(mx.cpu):
        found = command_buffers.timed(layers=1, tokens=8, width=64, inner=128)
    assert found["limits"] == [0, 0] and len(found["us"]) == 6 and all(us > 0 for us in found["us"])
    assert found["peak"] >= 0


def test_a_process_gets_the_limits(monkeypatch):
    """By the environment, and MLX's own get none."""
    code = (
        "import json, os; print('warning');"
        f"values = [int(os.environ.get(name, 0)) for name in {command_buffers.VARIABLES}];"
        "print(json.dumps({'limits': values, 'us': [1, 2, 3], 'peak': 4}))"
    )
    monkeypatch.setattr(command_buffers, "_CHILD", code)
    monkeypatch.setenv("MLX_MAX_OPS_PER_BUFFER", "7")
    assert command_buffers._in_process((200, 100))["limits"] == [200, 100]
    assert command_buffers._in_process(None)["limits"] == [0, 0]
    monkeypatch.setattr(command_buffers, "_CHILD", "raise RuntimeError('no memory')")
    with pytest.raises(RuntimeError, match="a trial of command buffers failed: RuntimeError: no memory"):
        command_buffers._in_process(None)
    stopped = subprocess.TimeoutExpired(sys.executable, 1)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: (_ for _ in ()).throw(stopped))
    with pytest.raises(RuntimeError, match="took more than 120 s"):
        command_buffers._in_process(None)


def calibration_in(path):
    made = Calibration(store.machine("cpu"), store.versions("cpu"), "2026-11-29")
    store.write(path, made)
    return made


def test_a_file_keeps_them(tmp_path):
    path = tmp_path / "calibration.json"
    made = calibration_in(path)
    assert "command_buffers" not in json.loads(path.read_text()) and store.read(path).command_buffers == []
    made.command_buffers = command_buffers.as_values([OWN, FASTER])
    store.write(path, made)
    assert command_buffers.tried(store.read(path).command_buffers) == [OWN, FASTER]
    for wrong in ([{"ops": 1}], [{**command_buffers.as_values([OWN])[0], "us": "1"}], [{}], [7]):
        made.command_buffers = wrong
        store.write(path, made)
        assert command_buffers.tried(store.read(path).command_buffers) == []


def test_doctor_tells_what_was_tried(metal, tmp_path, monkeypatch):
    path = tmp_path / "calibration.json"
    monkeypatch.setattr(store, "path", lambda device: path)
    assert doctor._command_buffers("gpu") == (
        "end after 50 launches or 50 MB, MLX's own limits for this GPU; `mlx-mittens calibrate` tries others"
    )
    made = calibration_in(path)
    made.command_buffers = command_buffers.as_values([OWN, FASTER])
    store.write(path, made)
    assert "set MLX_MAX_OPS_PER_BUFFER=1000 MLX_MAX_MB_PER_BUFFER=400" in doctor._command_buffers("gpu")


def test_calibrate_tries_them_once(metal, tmp_path, monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(command_buffers, "try_all", lambda: calls.append(1) or [OWN, FASTER])
    made = Calibration(store.machine("cpu"), store.versions("cpu"), "2026-11-29")
    file, failed = calibrate._File(tmp_path / "calibration.json", made), []
    calibrate._try_command_buffers(file, False, failed)
    text = capsys.readouterr().out
    assert "50 launches or 50 MB, MLX's own" in text and "set MLX_MAX_OPS_PER_BUFFER=1000" in text
    assert command_buffers.tried(store.read(file.path).command_buffers) == [OWN, FASTER]
    calibrate._try_command_buffers(file, False, failed)
    assert len(calls) == 1
    calibrate._try_command_buffers(file, True, failed)
    assert len(calls) == 2 and not failed

    def fails():
        raise RuntimeError("a trial of command buffers failed: no memory")

    monkeypatch.setattr(command_buffers, "try_all", fails)
    calibrate._try_command_buffers(file, True, failed)
    assert failed == ["a trial of command buffers failed: no memory"]
    assert command_buffers.tried(file.calibration.command_buffers) == [OWN, FASTER]
