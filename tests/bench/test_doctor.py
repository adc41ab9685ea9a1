"""The doctor command."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import mlx.core as mx
import pytest

from mlx_mittens import calibration, simulator, specs, strict
from mlx_mittens.bench import machine
from mlx_mittens.calibration import store
from mlx_mittens.cli import doctor, doctor_processes
from mlx_mittens.cli.main import main
from mlx_mittens.cli.options import inputs
from mlx_mittens.frontend import cache

# Runs in the test's process and in processes that doctor starts.
FEW_CASES = """
import math, os, signal, sys, time
from dataclasses import replace
import mlx.core as mx
from mlx_mittens import specs
from mlx_mittens.cli import doctor
small = lambda cases: tuple(case for case in cases[:1] if math.prod(case.shape) < 2**20)
specs.OPS = tuple(replace(op, tests=op.tests[:3], cases=small(op.cases)) for op in specs.OPS)
def instead(name, ours):
    specs.OPS = tuple(replace(op, ours=ours(op.ours)) if op.name == name else op for op in specs.OPS)
def of_half(action):
    def make(ours):
        return lambda x, *rest, **options: action() if x.dtype == mx.float16 else ours(x, *rest, **options)
    return make
"""


@pytest.fixture
def only(monkeypatch):
    """Leaves few cases, and changes ops by more code, here and in the processes that doctor starts."""

    def change(code=""):
        monkeypatch.setattr(specs, "OPS", specs.OPS)
        exec(FEW_CASES + code, {})
        monkeypatch.setattr(doctor, "_CHILD", f"{FEW_CASES}{code}\n{doctor._CHILD}")

    return change


@pytest.fixture
def few_cases(only):
    only()


def test_all_is_well(only, tmp_path, capsys):
    """Of one op in five, for each takes a process of its own."""
    only("specs.OPS = specs.OPS[::5]")
    file = tmp_path / "doctor.json"
    assert main(["doctor", "--json", str(file)]) == 0
    text = capsys.readouterr().out
    for word in ("mlx ", "mlx_mittens", "executors", "native", "simulator", "rms_norm", "All is well."):
        assert word in text
    result = json.loads(file.read_text())
    assert result["passed"] and all(case["passed"] for case in result["cases"])
    assert result["complete"] and result["measured"] == result["planned"] == len(result["cases"])
    assert result["running"] is None
    assert {case["op"] for case in result["cases"]} == {op.name for op in specs.OPS} and len(specs.OPS) > 4
    assert {case["dtype"] for case in result["cases"]} == set(specs.DTYPES)
    assert result["executors"].keys() >= {"native", "simulator"}


@pytest.mark.parametrize("op", specs.OPS, ids=lambda op: op.name)
def test_each_op_passes(op):
    for case, dtype in doctor._todo(replace(op, tests=op.tests[:3], cases=()), "cpu"):
        with strict():
            finding = doctor.examine(op, case, dtype, inputs(7, op.name, case.name, dtype))
        assert finding.passed, finding


def test_some_ops(few_cases, tmp_path):
    file = tmp_path / "doctor.json"
    assert main(["doctor", "--ops", "softmax,rms_norm", "--json", str(file)]) == 0
    assert {case["op"] for case in json.loads(file.read_text())["cases"]} == {"softmax", "rms_norm"}


def examined(file, *options):
    assert main(["doctor", *options, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["complete"] and result["measured"] == result["planned"] == len(result["cases"])
    return [(case["op"], case["case"], case["dtype"]) for case in result["cases"]]


def test_quickly_a_case_for_each_kernel(only, monkeypatch, tmp_path, capsys):
    """In the simulator, which runs a GPU's kernels: the smallest case of each, and none that adds no kernel."""
    only("""
specs.OPS = tuple(replace(op, tests=tuple(case for case in op.tests if math.prod(case.shape) < 2**13))
                  for op in specs.OPS)
""")
    names = ("rms_norm", "softmax")
    monkeypatch.setenv("MLX_MITTENS_SIMULATOR", "1")  # of the processes that doctor starts
    found = examined(tmp_path / "doctor.json", "--ops", ",".join(names), "--quick", "--device", "cpu")
    assert "others run the same kernels" in capsys.readouterr().out
    first: dict[tuple[str, ...], tuple[str, ...]] = {}
    todo = [(op, *one) for op in map(specs.get, names) for one in doctor._todo(op, "cpu", quick=True)]
    with simulator.enabled():
        for op, case, dtype in todo:
            for kernel in doctor._reached(op, case, dtype, inputs(0, op.name, case.name, dtype)):
                first.setdefault(kernel, (op.name, case.name, dtype))
    assert set(found) == set(first.values()) and len(found) < len(todo)
    assert all(kernel[1].startswith("simulator ") for kernel in first)


def test_quickly_on_a_cpu_a_case_for_each_type(few_cases, tmp_path):
    found = examined(tmp_path / "doctor.json", "--ops", "rms_norm,gemv", "--quick", "--device", "cpu")
    assert {op for op, *_ in found} == {"rms_norm", "gemv"} and {dtype for *_, dtype in found} == set(specs.DTYPES)
    assert len(found) < len(examined(tmp_path / "all.json", "--ops", "rms_norm,gemv", "--device", "cpu"))


def test_quickly_what_fails_is_found(only, tmp_path, capsys):
    only("""
def make(ours):
    def raising(x, *rest, **options):
        if x.dtype == mx.float16:
            raise RuntimeError("no kernel")
        return ours(x, *rest, **options)
    return raising
instead("rms_norm", make)
instead("softmax", of_half(lambda: os._exit(3)))
""")
    file = tmp_path / "doctor.json"
    assert main(["doctor", "--quick", "--ops", "rms_norm,softmax", "--device", "cpu", "--json", str(file)]) == 1
    failed = [case for case in json.loads(file.read_text())["cases"] if not case["passed"]]
    assert {case["dtype"] for case in failed} == {"float16"} and {case["op"] for case in failed} == {
        "rms_norm",
        "softmax",
    }


def test_the_largest_shapes_come_last(few_cases, monkeypatch):
    """After the other cases of every op."""
    ops = [replace(op, cases=specs.OPS[0].cases) for op in specs.OPS[:3]]
    monkeypatch.setattr(doctor, "_LARGE", 100)
    sizes, order = lambda part: [doctor._size(part.todo[i][0]) for i in part.numbers], []
    for part in doctor._parts(ops, "cpu", quick=False):
        order.append(max(sizes(part)) > 100)
        assert len({size > 100 for size in sizes(part)}) == 1
        if order[-1]:
            assert sizes(part) == sorted(sizes(part)) and part.name == f"{part.op.name} large"
    assert order == sorted(order) and True in order


def test_says_what_failed(only, tmp_path, capsys):
    only("instead('rms_norm', lambda ours: lambda x, weight, eps: x * 3)")
    file = tmp_path / "doctor.json"
    assert main(["doctor", "--ops", "rms_norm", "--json", str(file)]) == 1
    text = capsys.readouterr().out
    assert "FAILED" in text and "worst at" in text and "All is well." not in text
    assert not json.loads(file.read_text())["passed"]


ABORT = """
def abort():
    print("-[Encoder endEncoding]: failed assertion", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGABRT)
instead("rms_norm", of_half(abort))
"""


@pytest.mark.parametrize(
    "code, how",
    [
        (ABORT, f"signal 6 ({signal.strsignal(6)})\n-[Encoder endEncoding]: failed assertion"),
        ("instead('rms_norm', of_half(lambda: os._exit(3)))", "exit status 3"),
    ],
    ids=["signal", "exit"],
)
def test_a_process_that_dies_is_a_finding(only, tmp_path, capsys, code, how):
    only(code)
    file = tmp_path / "doctor.json"
    assert main(["doctor", "--ops", "rms_norm,softmax", "--json", str(file)]) == 1
    result = json.loads(file.read_text())
    failures = [case for case in result["cases"] if not case["passed"]]
    failed, first = failures[0], specs.get("rms_norm").tests[0].name
    assert (failed["op"], failed["case"], failed["dtype"]) == ("rms_norm", first, "float16")
    assert failed["detail"] == f"the process was ended by {how}"
    assert sum(case["op"] == "softmax" for case in result["cases"]) == len(doctor._todo(specs.get("softmax"), "cpu"))
    text = capsys.readouterr().out
    assert f"FAILED {first} float16: the process was ended by {how}" in text
    assert [case["dtype"] for case in failures] == ["float16"] * 3 and "3 cases failed" in text
    assert "rms_norm     5 of" in text and "not run" in text
    assert not result["complete"] and not result["passed"] and result["measured"] < result["planned"]
    assert result["reason"] == "gave up rms_norm after 3 processes had ended"


def test_a_process_that_dies_hides_no_other_case(only, tmp_path, capsys):
    shape = specs.get("rms_norm").tests[1].shape
    only(f"""
def make(ours):
    end = lambda x: x.dtype == mx.float16 and tuple(x.shape) == {tuple(shape)}
    return lambda x, *rest, **options: os._exit(3) if end(x) else ours(x, *rest, **options)
instead("rms_norm", make)
""")
    file = tmp_path / "doctor.json"
    assert main(["doctor", "--ops", "rms_norm", "--json", str(file)]) == 1
    result = json.loads(file.read_text())
    assert result["complete"] and not result["passed"] and result["measured"] == result["planned"]
    assert [case["dtype"] for case in result["cases"] if not case["passed"]] == ["float16"] * 2, "one is its gradient"
    assert "2 cases failed" in capsys.readouterr().out


def test_a_cache_that_can_only_be_read_is_used(only, tmp_path, monkeypatch):
    def refuse(folder):
        raise OSError(30, "Read-only file system")

    folder = tmp_path / "cache"
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLX_MITTENS_CALIBRATION", raising=False)
    monkeypatch.setenv("MLX_MITTENS_CACHE", "cache")
    file = store.path("cpu")
    row = store.Row("softmax", "a", "float32", 0, (4, 64, 1, 1), False, "", 0, 1.0, 1.0, 1.0, 0.1)
    store.write(file, store.Calibration(store.machine("cpu"), store.versions("cpu"), "2026-01-02", [row]))
    (folder / "old.so").write_text("compiled before")
    monkeypatch.setattr(cache, "_probe", refuse)
    monkeypatch.setattr(cache, "_problems", {})
    before = sorted(folder.rglob("*"))
    only("""
from mlx_mittens import calibration
from mlx_mittens.frontend import cache
def tell():
    made = [cache.cached(name, lambda path: path.write_text("new")).read_text() for name in ("old.so", "new.so")]
    raise RuntimeError(f"{list(calibration.loaded)} {made}")
instead("rms_norm", of_half(tell))
""")
    calibration.load()
    try:
        with pytest.warns(RuntimeWarning, match="Read-only file system"):
            assert main(["doctor", "--device", "cpu", "--ops", "rms_norm", "--json", "doctor.json"]) == 1
    finally:
        calibration.loading.unload()
    result = json.loads((tmp_path / "doctor.json").read_text())
    assert result["calibration"].startswith("of 2026-01-02")
    details = {case["detail"] for case in result["cases"] if case["dtype"] == "float16"}
    assert details == {"RuntimeError: ['cpu'] ['compiled before', 'new']"}
    assert sorted(folder.rglob("*")) == before


def test_a_seed_repeats_the_inputs(few_cases, tmp_path):
    found = []
    for ops in ("rms_norm,softmax", "softmax"):
        assert main(["doctor", "--ops", ops, "--seed", "7", "--json", str(tmp_path / "doctor.json")]) == 0
        result = json.loads((tmp_path / "doctor.json").read_text())
        assert result["seed"] == 7
        found.append([case for case in result["cases"] if case["op"] == "softmax"])
    assert found[0] == found[1]


def test_kernels_of_nvidia_gpus_are_launched_ahead(only, monkeypatch, tmp_path, capsys):
    """Quickly: by processes whose findings count for nothing."""
    mark = tmp_path / "ahead"
    only(f"""
def once():
    if not os.path.exists({str(mark)!r}):
        open({str(mark)!r}, "w").close()
        os._exit(1)
    return math
instead("softmax", lambda ours: lambda *given, **options: once() and ours(*given, **options))
specs.OPS = tuple(op for op in specs.OPS if op.name in ("layer_norm", "softmax"))
""")
    started = []
    monkeypatch.setattr(doctor, "Child", lambda *given: started.append(given) or doctor_processes.Child(*given))
    assert main(["doctor", "--quick", "--device", "cpu", "--ops", "softmax"]) == 1  # nothing is ahead: it met the end
    assert len(started) == 2 and mark.exists()
    started.clear()
    monkeypatch.setattr(machine, "executor", lambda: "cuda")
    monkeypatch.setattr(machine, "cores", lambda: 3)
    assert main(["doctor", "--quick", "--device", "cpu"]) == 0
    assert len(started) == 2 and "All is well" in capsys.readouterr().out  # of two parts one is ahead


def test_the_file_names_the_case_before_it_runs(only, tmp_path, capsys):
    file = tmp_path / "doctor.json"
    only(f"""
from pathlib import Path
def show():
    print("seen:", Path({str(file)!r}).read_text(), file=sys.stderr, flush=True)
    os._exit(1)
instead("softmax", of_half(show))
""")
    assert main(["doctor", "--ops", "softmax", "--json", str(file)]) == 1
    seen, _ = json.JSONDecoder().raw_decode(capsys.readouterr().err.partition("seen: ")[2])
    assert seen["running"] == {"op": "softmax", "case": specs.get("softmax").tests[0].name, "dtype": "float16"}
    assert seen["complete"] is False and seen["passed"] is False and len(seen["cases"]) == seen["measured"] == 1


# Its report on mlx-lm's layers imports them, which takes longer than all else.
SCRIPT = """
doctor.targets.unknown = lambda: []
doctor._CHILD = {child!r}
from mlx_mittens.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)], ids=str)
def test_what_cuts_it_off_loses_nothing(tmp_path, number, status):
    file, mark = tmp_path / "doctor.json", tmp_path / "child"
    code = f"""
def wait():
    open({str(mark)!r}, "w").write(str(os.getpid()))
    time.sleep(60)
instead("softmax", of_half(wait))
"""
    child = f"{FEW_CASES}{code}\n{doctor._CHILD}"
    command = [sys.executable, "-c", FEW_CASES + SCRIPT.format(child=child), "doctor", "--ops", "rms_norm,softmax"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "--json", str(file)], **pipes) as process:
        deadline = time.monotonic() + 60
        while not (mark.exists() and mark.read_text()):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    child_id = int(mark.read_text())
    if number == signal.SIGKILL:  # nobody is left to end the process of the op
        os.kill(child_id, signal.SIGKILL)
    else:
        with pytest.raises(ProcessLookupError):
            os.kill(child_id, 0)
    assert process.returncode == status, err
    case = f"softmax {specs.get('softmax').tests[0].name} float16"
    assert "Traceback" not in err and (status < 0 or case in err)
    result = json.loads(file.read_text())
    assert result["complete"] is False and result["measured"] == len(result["cases"]) < result["planned"]
    assert " ".join(result["running"].values()) == case
    assert "rms_norm" in out and (status < 0 or f"Incomplete: {result['measured']} of" in out)


def test_an_exception_is_a_finding(rng):
    def broken(x, weight, eps):
        raise RuntimeError("norm/rms_norm.metal:7: no such type")

    op = specs.get("rms_norm")
    finding = doctor.examine(replace(op, ours=broken), op.tests[0], "float32", rng)
    assert not finding.passed and finding.detail == "RuntimeError: norm/rms_norm.metal:7: no such type"


def test_bad_arguments(capsys):
    assert main(["doctor", "--json", "no/such/folder/x.json"]) == 2
    assert "does not exist" in capsys.readouterr().err
    assert main(["doctor", "--ops", "hardmax"]) == 2
    assert "hardmax" in capsys.readouterr().err
    if not mx.is_available(mx.gpu):
        assert main(["doctor", "--device", "gpu"]) == 2
