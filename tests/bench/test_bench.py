"""The benchmark command, on budgets too small to measure anything."""

import errno
import io
import json
import math
import os
import pathlib
import runpy
import signal
import subprocess
import sys
import threading
import time
import types
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

import mlx_mittens as mm
from mlx_mittens import frontend, specs, table
from mlx_mittens.bench import machine, measure, timing
from mlx_mittens.cli import bench, runs
from mlx_mittens.cli.main import main

KEYS = ["op", "case", "dtype", "device", "executor", "mittens_ms", "mx_ms", "speedup", "gb_s", "error", "mx_error"]
KEYS += ["spread"]


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """Few samples of the smallest cases, over little memory; the default device is put back."""
    monkeypatch.setattr(bench, "QUICK", measure.Budget(seconds=0, fewest=2, most=2))
    monkeypatch.setattr(timing, "_CPU_BYTES", (1 << 16, 1 << 16))
    monkeypatch.setattr(timing, "_GPU_BYTES", 1 << 16)
    monkeypatch.setattr(measure, "_SHORTEST_SAMPLE", {"cpu": 0, "gpu": 0})
    monkeypatch.setattr(machine, "copy_gb_s", lambda: 10.0)
    shape = lambda op: getattr(op, "smallest", (2, 64, 8))
    small = lambda op: tuple(replace(case, shape=shape(op)[: len(case.shape)]) for case in op.cases)
    monkeypatch.setattr(specs, "OPS", tuple(replace(op, cases=small(op)) for op in specs.OPS))
    before = mx.default_device()
    yield
    mx.set_default_device(before)


def test_json(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    file = tmp_path / "result.json"
    assert main(["bench", "--quick", "--device", "cpu", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert set(result) == {"machine", "asked", "complete", "measured", "planned", "rows"}
    assert result["complete"] is True and result["measured"] == result["planned"] == len(result["rows"])
    assert {row["op"] for row in result["rows"]} == {op.name for op in specs.OPS}
    assert {row["dtype"] for row in result["rows"]} == set(specs.DTYPES)
    for row in result["rows"]:
        assert list(row) == KEYS
        assert row["device"] == "cpu" and row["executor"] == "native"
        assert row["mittens_ms"] > 0 and row["gb_s"] > 0
        assert math.isclose(row["speedup"], row["mx_ms"] / row["mittens_ms"])
        assert 0 <= row["error"] < 0.05 and 0 <= row["mx_error"] < math.inf
    assert result["machine"]["processor"] and result["machine"]["copy_gb_s"] == 10.0
    assert {"mlx", "mlx_mittens", "python"} <= set(result["machine"]["versions"])
    text = capsys.readouterr().out
    assert "speedup" in text and "GB/s" in text and "0 wrong" in text


@pytest.mark.parametrize("suffix, start", [("png", b"\x89PNG"), ("svg", b"<?xml")])
def test_plot(tmp_path, suffix, start):
    pytest.importorskip("matplotlib")
    file = tmp_path / f"plot.{suffix}"
    assert main(["bench", "--quick", "--ops", "rms_norm,softmax", "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(start)


def test_without_rich(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"] + ["rich", "rich.console"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["bench", "--quick", "--ops", "softmax"]) == 0
    captured = capsys.readouterr()
    assert "softmax" in captured.out and "speedup" in captured.out
    assert "[1/" in captured.err


def test_wrong_results_fail(monkeypatch, capsys, tmp_path):
    op = specs.get("rms_norm")
    nan = replace(op, ours=lambda x, weight, eps: mx.fast.rms_norm(x, weight, eps) * math.nan)
    monkeypatch.setattr(specs, "OPS", (nan,))
    file = tmp_path / "wrong.json"
    assert main(["bench", "--quick", "--ops", "rms_norm", "--json", str(file)]) == 1
    assert "WRONG" in capsys.readouterr().out
    assert json.loads(file.read_text())["rows"][0]["error"] is None, "infinity is not JSON"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--ops", "rmsnorm"], ["rmsnorm", "rms_norm, layer_norm, softmax, add_rms_norm"]),
        (["--ops", ","], ["--ops", "rms_norm"]),
        (["--json", "no/such/folder/x.json"], ["--json", "does not exist"]),
        (["--json", "."], ["--json", "cannot write", "choose a file"]),
        (["--plot", "x.pdf"], ["--plot", ".png", ".svg"]),
        (["--plot", "no/such/folder/x.png"], ["--plot", "does not exist"]),
        (["--weights", "4-bit"], ["--weights goes with --model"]),
        (["--dtype", "float16"], ["--dtype goes with --model"]),
        (["--prompt", "128"], ["--prompt goes with --model"]),
        (["--tokens", "64"], ["--tokens goes with --model"]),
        (["--seconds", "30"], ["--seconds goes with --model"]),
        (["--memory"], ["--memory goes with --model"]),
        (["--model", "qwen3-0.6b"], ["--quick does not go with --model"]),
    ],
    ids=str,
)
def test_bad_arguments(arguments, words, capsys):
    assert main(["bench", "--quick", *arguments]) == 2
    message = capsys.readouterr().err
    assert message.startswith("mlx-mittens bench: ") and all(word in message for word in words)


@pytest.mark.skipif(mx.is_available(mx.gpu), reason="there is a GPU")
def test_no_gpu(capsys):
    assert main(["bench", "--device", "gpu"]) == 2
    assert "no such device" in capsys.readouterr().err


def test_no_matplotlib(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "--plot", "x.png"]) == 2
    assert "mlx-mittens[bench]" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [["bnech"], ["bench", "--device", "tpu"], ["bench", "--frobnicate"], ["bench", "--seed", "-1"]],
    ids=str,
)
def test_usage(arguments):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2


def test_plan():
    names = [op.name for op in specs.OPS]
    quick, full, gpu = (measure.plan(names, *more) for more in (("cpu", True), ("cpu", False), ("gpu", False)))
    assert len(quick) < len(full) < len(gpu)
    assert {op.name for op, _, _ in measure.plan(["softmax"], "cpu", True)} == {"softmax"}
    assert any(case.gpu_only for _, case, _ in gpu) and not any(case.gpu_only for _, case, _ in full)


def test_inputs_rotate_through_memory(monkeypatch):
    monkeypatch.setattr(timing, "_CPU_BYTES", (1 << 20, 1 << 20))
    x, weight = mx.ones((4, 64)), mx.ones((64,))
    sets = timing.rotation([x, None, weight], "cpu")
    assert len(sets) * (x.nbytes + weight.nbytes) >= 1 << 20
    assert all(group[1] is None and group[0].shape == (4, 64) and group[2].shape == (64,) for group in sets)
    assert mx.array_equal(sets[-1][0], x).item()


def test_a_copy_takes_turns_with_large_cases(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(measure, "_COPIED_BYTES", 1000)
    monkeypatch.setenv("COLUMNS", "160")
    file = tmp_path / "result.json"
    assert main(["bench", "--quick", "--device", "cpu", "--ops", "softmax,gemv", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert all(list(row) == [*KEYS[:-1], "copy_gb_s", "spread"] for row in rows)
    assert {row["copy_gb_s"] is None for row in rows} == {True, False}
    assert all(0.1 < row["copy_gb_s"] < 10000 for row in rows if row["copy_gb_s"])
    assert "of copy" in capsys.readouterr().out


def turns(device, **seconds):
    """The times of contenders that take so long a call, and the order in which they were asked."""
    order = []
    samplers = {name: lambda count, name=name: order.append(name) or seconds[name] for name in seconds}
    return measure.take_turns(samplers, device, measure.Budget(seconds=0, fewest=3, most=3)), order


def test_contenders_take_turns():
    times, order = turns("cpu", mittens=0.01, mx=0.02)
    assert times == {"mittens": [0.01] * 3, "mx": [0.02] * 3}
    assert order[-6:] == ["mittens", "mx", "mx", "mittens", "mittens", "mx"]


def test_who_is_slow_on_a_cpu_runs_twice():
    times, order = turns("cpu", mittens=0.01, mx=2.0)
    assert times == {"mittens": [0.01] * 3, "mx": [2.0] * 2} and order.count("mx") == 2
    times, _ = turns("gpu", mittens=0.01, mx=2.0)
    assert times == {"mittens": [0.01] * 3, "mx": [2.0] * 3}


def test_each_call_on_a_cpu_is_made_once():
    x = mx.ones((4, 64))
    built = []
    build = lambda group: built.append(group) or [group[0] * 2]
    sample = timing.sampler(build, 0, {}, [[x], [x + 1], [x + 2]], 1, "cpu")
    assert sample(300) > 0 and len(built) == 300
    assert mx.array_equal(built[0][0], x + 1).item() and mx.array_equal(built[299][0], x).item()
    sample(1)
    assert mx.array_equal(built[300][0], x + 1).item(), "it goes on where it stopped"


def test_calls_on_a_gpu_are_a_chain(monkeypatch):
    monkeypatch.setattr(timing, "_ATTEMPTS", 1)
    x, weight = mx.ones((4, 64)), mx.array(2.0)
    built = []
    build = lambda group: built.append(group) or [group[0] * group[1]]
    sample = timing.sampler(build, 0, {}, [[x, weight], [x, weight + 1]], 0, "gpu")
    assert sample(4) > 0 and len(built) >= 4  # more where the machine was too busy to queue them in time
    assert built[3][0].max().item() == built[3][0].min().item() == 2 * 3 * 2, "each call takes the last one's result"


def test_each_call_in_a_chain_waits_for_all_of_the_last_ones_results():
    """A gradient's second kernel would run beside the next call otherwise."""
    x = mx.ones((4, 64))
    sample = timing.sampler(lambda group: [group[0] * 2, mx.exp(group[0])], 0, {}, [[x]], 0, "gpu")
    graph = io.StringIO()
    mx.export_to_dot(graph, sample._calls(3, mx.array(1.0)))
    assert graph.getvalue().count("Exp") == 3


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_what_calls_update_goes_from_one_to_the_next(monkeypatch, device):
    """So that nothing but the next call refers to it; on a GPU the buffer that links them goes through all sets."""
    monkeypatch.setattr(timing, "_ATTEMPTS", 1)
    sets = [[mx.array(float(i)), mx.zeros(8), mx.zeros(8)] for i in range(2)]
    seen = []
    build = lambda group: seen.append([a[0].item() if a.ndim else a.item() for a in group]) or [
        group[0] * 10, group[1] + 1, group[2] + 1
    ]  # fmt: skip
    sample = timing.sampler(build, 1, {1: 1, 2: 2}, sets, 0, device)
    sample._host_seconds = 0.03  # of a call, at most: they wait behind work that lasts as long, on a busy machine, too
    assert sample(6) > 0
    linked = [0, 1, 2, 3, 4, 5] if device == "gpu" else [0, 0, 1, 1, 2, 2]
    assert seen == [[i % 2, linked[i], i // 2] for i in range(6)]
    assert [group[2][0].item() for group in sets] == [3, 3]


def test_updated_inputs_have_buffers_of_their_own():
    sets = timing.rotation([mx.ones(64), mx.ones(64)], "cpu", {1: 0})
    place = lambda a: np.asarray(memoryview(a)).ctypes.data
    pool, own = ([place(group[i]) for group in sets] for i in (0, 1))
    assert len(set(own)) == len(sets) > 2
    assert pool == list(range(pool[0], pool[0] + 256 * len(sets), 256)) != own


class FakeGpu:
    """A clock that only work moves, in place of MLX's and the system's, and the events in order."""

    BUILD, HAND_OVER, CALL = 2e-3, 1e-4, 1e-5  # seconds of a call on the host, of all calls, and of one on the GPU

    def __init__(self, monkeypatch):
        self.now, self.gate_end, self.events, self.waiting = 0.0, 0.0, [], 0
        self.beside = mx.new_stream(mx.cpu)
        monkeypatch.setattr(timing, "_work", lambda: self)
        monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(mx, "async_eval", self.async_eval)
        monkeypatch.setattr(mx, "synchronize", self.synchronize)

    def of(self, seconds):
        self.gate, self.gate_seconds = mx.array(0.0), seconds
        self.events.append("work")
        return self.gate

    def build(self, group):
        self.now += self.BUILD
        self.waiting += 1
        self.events.append("build")
        return [group[0] + 1]

    def async_eval(self, array):
        if array is self.gate:
            self.gate_end = self.now + self.gate_seconds
            self.events.append("begin work")
        else:
            self.now += self.HAND_OVER
            self.events.append("hand over")

    def synchronize(self, stream=None):
        if stream is None:  # the stream of the work
            self.now = max(self.now, self.gate_end)
            return
        self.now += self.CALL * self.waiting
        self.waiting = 0
        self.events.append("calls end")


def test_calls_on_a_gpu_wait_behind_other_work(monkeypatch):
    """Queued calls take as long as by themselves, whatever the host needs to prepare them."""
    gpu = FakeGpu(monkeypatch)
    x = mx.ones((4, 4))
    sample = timing.sampler(gpu.build, 0, {}, [[x], [x + 1]], 0, "gpu")
    assert math.isclose(sample(4), gpu.CALL)
    last = gpu.events[len(gpu.events) - 1 - gpu.events[::-1].index("work") :]
    count = last.count("build")
    assert last == ["work", *["build"] * count, "begin work", "hand over", "calls end"] and count > 1
    assert math.isclose(sample.host[0], gpu.BUILD + gpu.HAND_OVER / count)


@pytest.mark.parametrize("width", [1, 24, 64, 100])
def test_small_results_are_repeated_in_a_chain(monkeypatch, width):
    """And the time of repeating them is no part of a call's time."""
    seconds = iter([10.0, 4.0])  # of three calls with two links, and of the links

    def timed(sampler, work_seconds, make):
        result = make(mx.array(0.0))
        mx.eval(*([] if result is None else [result]))
        return timing._Timing(result, next(seconds) if result is not None else 0.0, 4e-6)

    monkeypatch.setattr(timing._QueuedSampler, "_timed", timed)
    inputs = []
    build = lambda group: inputs.append(group[1]) or [group[1] @ group[0]]
    w, x = mx.random.normal((64, width)), mx.random.normal((2, 64))
    sample = timing.sampler(build, 1, {}, [[w, x]], 0, "gpu")
    assert sample(3) == (6.0 if width < 64 else 10.0) / 3
    assert all(a.shape == (2, 64) for a in inputs)
    y = (inputs[0] @ w).reshape(-1).tolist()
    assert mx.allclose(inputs[1].reshape(-1), mx.array((64 * y)[:128])).item()


@pytest.mark.parametrize("dtype", [mx.float16, mx.float32])
def test_packed_results_are_read_as_what_comes_next(dtype):
    """Blocks of GGUF and their numbers stand in for each other."""
    w = mx.random.normal((3, 64)).astype(dtype)
    blocks = mm.block_quantize(w, "q4_0")
    assert timing._as_large(blocks, w).dtype == dtype and timing._as_large(w, blocks).dtype == mx.uint8
    assert timing._as_large(blocks, w).shape == w.shape and timing._as_large(w, blocks).shape == blocks.shape


def test_what_queued_calls_take_the_host_has_columns(monkeypatch):
    timed = lambda sampler, seconds, make: timing._Timing(make(mx.array(0.0)), 3e-3, 4e-6)
    monkeypatch.setattr(timing._QueuedSampler, "_timed", timed)
    monkeypatch.setattr(timing._QueuedSampler, "_links", lambda *_: None)
    op, budget = specs.get("softmax"), measure.Budget(seconds=0, fewest=2, most=2)
    outcome = measure.measure(op, specs.Case("test", (2, 64)), "float32", "gpu", budget, np.random.default_rng(1))
    assert outcome.row.mittens_host_ms > 0 and outcome.row.mx_host_ms > 0
    cells = dict(zip((column.name for column in bench._COLUMNS), bench._cells(outcome, "test"), strict=True))
    assert cells["host us"] and cells["mx host us"] and not cells["peer ms"]
    assert "mx_host_ms" in bench.json_rows([outcome])[0]


def test_one_slow_call_leaves_the_others_queued(monkeypatch):
    """The first one of a peer's kernel may compile it."""
    counts = []

    def timed(sampler, work_seconds, make):
        if make.func != sampler._calls:
            return timing._Timing(None, 0.0, 0.0)
        counts.append(make.args[0])
        return timing._Timing(make(mx.array(0.0)), 1e-3, 1e-3) if len(counts) > 1 else None

    monkeypatch.setattr(timing._QueuedSampler, "_timed", timed)
    sample = timing.sampler(lambda group: [group[0] + 1], 0, {}, [[mx.ones((4, 4))]], 0, "gpu")
    sample(1)
    sample(500)
    assert counts == [1, 1, 500]


def test_calls_that_wait_for_the_gpu_are_timed_as_they_are(monkeypatch):
    monkeypatch.setattr(timing._QueuedSampler, "_timed", lambda *_: None)
    x = mx.ones((4, 4))

    seconds = 0

    def build(group):
        nonlocal seconds
        seconds += 3
        return [group[0] + 1]

    sample = timing.sampler(build, 0, {}, [[x]], 0, "gpu")
    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: seconds))
    assert sample(8) == 3 and not sample.host


def test_what_the_host_waits_for_is_not_taken_for_its_own_time(monkeypatch):
    """MLX lets the host wait where it is far ahead: with fewer calls, not with ever more work to wait behind."""
    asked = []

    def timed(sampler, work_seconds, make):
        if make.func != sampler._calls:
            return timing._Timing(None, 0.0, 0.0)
        asked.append((make.args[0], work_seconds))
        waits = make.args[0] > 12  # then the host takes as long as the work
        return None if waits else timing._Timing(make(mx.array(0.0)), 1e-3, 1e-4)

    monkeypatch.setattr(timing._QueuedSampler, "_timed", timed)
    sample = timing.sampler(lambda group: [group[0] + 1], 0, {}, [[mx.ones((4, 4))]], 0, "gpu")
    for _ in range(20):
        sample(200)
    counts, seconds = zip(*asked)
    assert counts[:6] == (200, 100, 50, 25, 13, 7) and set(counts[6:]) == {7}
    assert max(seconds) < 0.02


def after(count, action):
    """`bench.measure` that runs `action` instead of the row after `count` rows."""
    one, rows = bench.measure, []

    def limited(*arguments):
        if len(rows) == count:
            action()
        rows.append(one(*arguments))
        return rows[-1]

    return limited


def fail():
    raise RuntimeError("no kernel for this")


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "action, status, word", [(fail, 1, "RuntimeError: no kernel for this"), (interrupt, 130, "interrupted")]
)
def test_what_was_measured_is_kept(monkeypatch, tmp_path, capsys, action, status, word):
    monkeypatch.setattr(bench, "measure", after(2, action))
    file = tmp_path / "bench.json"
    assert main(["bench", "--ops", "softmax", "--quick", "--device", "cpu", "--json", str(file)]) == status
    printed = capsys.readouterr()
    result = json.loads(file.read_text())
    assert f"Incomplete: 2 of {result['planned']} measured." in printed.out
    assert sum(line.startswith("softmax ") and "float" in line for line in printed.out.splitlines()) == 2
    assert word in printed.err and "bfloat16" in printed.err, "it names the case that failed"
    assert result["complete"] is False and result["measured"] == len(result["rows"]) == 2 < result["planned"]
    assert word in result["reason"]


def test_the_first_case_may_fail(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "measure", after(0, fail))
    file = tmp_path / "bench.json"
    assert main(["bench", "--ops", "softmax", "--quick", "--json", str(file)]) == 1
    assert "Incomplete: 0 of" in capsys.readouterr().out and json.loads(file.read_text())["rows"] == []


SLOW = """
import sys, time
from mlx_mittens.cli import bench
from mlx_mittens.bench import machine, measure as measuring, timing
from mlx_mittens.cli.main import main
bench.QUICK = measuring.Budget(seconds=0, fewest=2, most=2)
timing._CPU_BYTES = (1 << 16, 1 << 16)
machine.copy_gb_s = lambda: 10.0
measure, rows = bench.measure, []
def limited(*arguments):
    if len(rows) == 2:
        print("waiting", file=sys.stderr, flush=True)
        time.sleep(60)
    rows.append(measure(*arguments))
    return rows[-1]
bench.measure = limited
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)], ids=str)
def test_a_signal_loses_no_rows(tmp_path, number, status):
    """A time limit's SIGTERM comes twice, to the process and to its group; nothing can be done after SIGKILL."""
    file = tmp_path / "bench.json"
    command = [sys.executable, "-c", SLOW, "bench", "--quick", "--ops", "softmax", "--device", "cpu"]
    with subprocess.Popen(
        [*command, "--json", str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in process.stderr:
            if line == "waiting\n":
                break
        process.send_signal(number)
        if number == signal.SIGTERM:
            time.sleep(0.005)
            process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    assert "Traceback" not in err
    result = json.loads(file.read_text())
    assert result["complete"] is False and result["measured"] == len(result["rows"]) == 2 < result["planned"]
    assert os.listdir(tmp_path) == ["bench.json"]
    if status > 0:
        assert f"Incomplete: 2 of {result['planned']} measured." in out and "speedup" in out


def test_a_full_disk_loses_no_table(monkeypatch, tmp_path, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert main(["bench", "--ops", "softmax", "--quick", "--json", str(tmp_path / "bench.json")]) == 1
    printed = capsys.readouterr()
    assert "0 wrong" in printed.out and "--json: cannot write" in printed.err and "No space left" in printed.err
    assert os.listdir(tmp_path) == []


def test_a_pipe_gets_the_result_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()), daemon=True)
    reader.start()
    assert main(["bench", "--ops", "softmax", "--quick", "--json", str(tmp_path / "pipe")]) == 0
    reader.join(60)
    assert json.loads(read[0])["complete"]


def test_a_pipe_without_a_path_gets_the_result_once():
    """As a shell gives it for ``--json >(command)``."""
    source, sink = os.pipe()
    read = []
    reader = threading.Thread(target=lambda: read.append(os.fdopen(source).read()), daemon=True)
    reader.start()
    assert main(["bench", "--ops", "softmax", "--quick", "--json", f"/dev/fd/{sink}"]) == 0
    os.close(sink)
    reader.join(60)
    assert json.loads(read[0])["complete"]


def test_a_file_in_a_folder_that_cannot_be_written_to_is_written_in_place(monkeypatch, tmp_path):
    file, access = tmp_path / "bench.json", os.access
    file.write_text("old and long" * 1000)
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(tmp_path) and access(path, mode))
    monkeypatch.setattr(os, "replace", None)
    assert main(["bench", "--ops", "softmax", "--quick", "--json", str(file)]) == 0
    assert json.loads(file.read_text())["complete"] and os.listdir(tmp_path) == ["bench.json"]


def test_a_file_is_on_the_disk_before_it_replaces_the_last_one(monkeypatch, tmp_path):
    done = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: done.append("sync") or sync(file))
    monkeypatch.setattr(os, "replace", lambda *paths: done.append("replace") or replace(*paths))
    runs.JsonFile(str(tmp_path / "bench.json")).write({"a": 1}, "rows", [])
    assert done == ["sync", "replace"]


def test_a_link_stays_one(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert main(["bench", "--ops", "softmax", "--quick", "--json", str(tmp_path / "link")]) == 0
    assert (tmp_path / "link").is_symlink() and json.loads((tmp_path / "file").read_text())["complete"]


def test_a_seed_does_not_go_with_models(capsys):
    assert main(["bench", "--model", "qwen3-0.6b", "--seed", "0"]) == 2
    assert "--seed does not go with --model" in capsys.readouterr().err


def test_a_seed_repeats_the_inputs(tmp_path):
    file, found = tmp_path / "bench.json", []
    for ops in ("softmax", "rms_norm,softmax"):
        assert main(["bench", "--quick", "--device", "cpu", "--ops", ops, "--seed", "7", "--json", str(file)]) == 0
        result = json.loads(file.read_text())
        assert result["machine"]["seed"] == 7
        found.append([(row["case"], row["dtype"], row["error"]) for row in result["rows"] if row["op"] == "softmax"])
    assert found[0] == found[1]


def test_the_report_says_that_rows_are_missing(monkeypatch, tmp_path, capsys):
    file = tmp_path / "bench.json"
    report = runpy.run_path(str(pathlib.Path(__file__).parents[2] / "bench" / "report.py"))["report"]
    assert main(["bench", "--ops", "softmax", "--quick", "--device", "cpu", "--json", str(file)]) == 0
    assert "Incomplete" not in report(json.loads(file.read_text()), set(specs.DTYPES))
    monkeypatch.setattr(bench, "measure", after(2, fail))
    assert main(["bench", "--ops", "softmax", "--quick", "--device", "cpu", "--json", str(file)]) == 1
    result = json.loads(file.read_text())
    assert report(result, set(specs.DTYPES)).startswith(f"Incomplete: 2 of {result['planned']} rows were measured.")


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("compiler", "no clang++ of version 19 or later", "--peer metal: no clang++ of version 19"),
        ("cuda", "no clang++ of version 19 or later", "the executor cuda is not ready: no clang++ of version 19"),
    ],
)
def test_what_cannot_be_done_is_said_before_it_begins(monkeypatch, tmp_path, capsys, name, value, words):
    monkeypatch.setattr(machine, "executor", lambda: "cuda")
    monkeypatch.setattr(bench, "executors", lambda: {"cuda": value if name == "cuda" else "ready"})
    monkeypatch.setattr(frontend, "compiler_problem", lambda: value)
    monkeypatch.setattr(bench, "measure", None)
    assert main(["bench", "--peer", "metal", "--json", str(tmp_path / "bench.json")]) == 2
    assert words in capsys.readouterr().err and os.listdir(tmp_path) == []


def test_nothing_to_measure(monkeypatch, capsys):
    monkeypatch.setattr(specs, "OPS", tuple(replace(op, cases=()) for op in specs.OPS))
    assert main(["bench", "--ops", "softmax", "--quick", "--device", "cpu"]) == 2
    assert "none of the cases of softmax is for cpu and --quick" in capsys.readouterr().err


def outcome(op, case, dtype, passed=True, **more):
    numbers = {"mittens_ms": 1234.5, "mx_ms": 0.0012345, "speedup": 123.456, "gb_s": 1234.5}
    numbers |= {"error": 1e-8, "mx_error": 2e-8, "mittens_host_ms": 0.1, "mx_host_ms": 0.2, "spread": 0.123}
    row = measure.Row(op.name, case.name, dtype, "cpu", "native", **numbers, **more)
    return measure.Outcome(row, passed, "")


def test_what_scatters_by_more_than_itself_has_no_speed(capsys):
    """As a call that is shorter than the copies between calls of a chain, which are taken off."""
    op, case = specs.OPS[0], specs.OPS[0].cases[0]
    clear = outcome(op, case, "float16")
    unclear = replace(clear, row=replace(clear.row, dtype="float32", speedup=0.001, spread=9.46))
    summary = bench._summary([clear, unclear], {"copy_gb_s": 100.0})
    assert "2 rows, 0 wrong" in summary and "mean 123.46x mx, least 123.46x" in summary and "1 unclear" in summary
    bench._show([clear, unclear])
    first, second = capsys.readouterr().out.splitlines()[1:]
    assert "123.46x" in first and "unclear" in second and "0.00x" not in second
    assert "mean" not in bench._summary([unclear], {"copy_gb_s": 100.0})


def on_a_terminal(monkeypatch, width):
    monkeypatch.setenv("NO_COLOR", "1")
    for module in (bench, table):
        monkeypatch.setattr(module, "terminal_width", lambda: width)


OPS = specs.OPS
FULL_TABLE = [(op, case, dtype) for op in OPS for case in op.cases for dtype in op.dtypes(case)]


@pytest.mark.parametrize("width", [80, 100, 140])
def test_every_row_is_one_line_of_a_terminal(monkeypatch, capsys, width):
    monkeypatch.setattr(specs, "OPS", OPS)
    on_a_terminal(monkeypatch, width)
    bench._show([outcome(*row) for row in FULL_TABLE])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) == len(FULL_TABLE) + 2 * len(specs.OPS) - 1, "a heading for each op, and a line between them"
    rows = [line.split("  ")[0] for line in lines if " float" in line or " bfloat16" in line]
    for op in specs.OPS:
        short = bench._short_names(op)
        names = [short[case.name] for each, case, dtype in FULL_TABLE if each is op and dtype == "float32"]
        assert len(set(names)) == len(names) and set(names) <= set(rows), "cases are told apart, and none is cut"
    for op, line in zip(specs.OPS, (line for line in lines if " dtype" in line)):
        assert line.startswith(f"{op.name} ") and "speedup" in line and " ms" in line and "mx ms" in line
    assert all("123.46x" in line for line in lines if " float16 " in line)


def test_columns_are_dropped_in_order(monkeypatch, capsys):
    op, case, dtype = FULL_TABLE[0]
    seen, width = [], 140
    while width > 30:
        on_a_terminal(monkeypatch, width)
        bench._show([outcome(op, case, dtype, copy_gb_s=3000.0, peer_ms=1.0)])
        heading = capsys.readouterr().out.splitlines()[0]
        assert len(heading) <= width
        width = len(heading) - 1  # down to its own width a table is the same
        seen.append([column.name for column in bench._COLUMNS[2:] if f"  {column.name}  " in f"{heading}  "])
    dropped = [set(a) - set(b) for a, b in zip(seen, seen[1:]) if a != b]
    assert dropped == [{name} for name in (
        *("mx host us", "host us", "mx error", "+-", "error", "of copy", "GB/s", "peer ms", "mx ms", "ms"),
    )]  # fmt: skip
    assert seen[-1] == ["dtype", "speedup"]


def test_wrong_rows_show_at_every_width(monkeypatch, capsys):
    for width in (None, 140, 20):
        on_a_terminal(monkeypatch, width)
        bench._show([outcome(*FULL_TABLE[0], passed=False)])
        assert capsys.readouterr().out.count("WRONG") == 1


def test_what_is_piped_is_plain(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["bench", "--quick", "--ops", "rms_norm,softmax", "--device", "cpu"]) == 0
    printed = capsys.readouterr()
    assert printed.out.isascii() and "\x1b" not in printed.out
    wanted = measure.plan(["rms_norm", "softmax"], "cpu", True)
    lines = [" ".join(line.split()) for line in printed.out.splitlines()]
    for op, case, dtype in wanted:
        assert sum(line.startswith(f"{op.name} {case.name} {dtype} ") for line in lines) == 1
    assert lines.count("op case dtype ms mx ms speedup +- GB/s error mx error") == 1
    assert printed.err.splitlines()[-1].startswith(f"[{len(wanted)}/{len(wanted)}] softmax")


def test_colours_are_for_terminals(monkeypatch):
    columns = [table.Column("op", left=True), table.Column("case", left=True), table.Column("speedup")]
    rows = [["softmax", "a", "2.00x"], ["softmax", "b", "0.50x"]]
    lines = ["\x1b[1msoftmax  speedup\x1b[0m", "a          2.00x", "\x1b[33mb          0.50x\x1b[0m"]
    assert table.text(columns, rows, 80, ["", "33"]).split("\n") == lines
    assert "\x1b" not in table.text(columns, rows, None, ["", "33"])
