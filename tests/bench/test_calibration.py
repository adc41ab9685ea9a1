"""Calibrations: which plan wins, the file and mistakes in it, the command, and calls that follow it."""

import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import warnings
from dataclasses import asdict, replace
from itertools import product

import mlx.core as mx
import numpy as np
import pytest

import mlx_mittens as mm
from mlx_mittens import _ext, calibration, gpus, specs
from mlx_mittens.bench.measure import take_turns
from mlx_mittens.calibration import grid, inference, loading, measure, store
from mlx_mittens.calibration.measure import MX, TABLES, Plan, Time
from mlx_mittens.cli import calibrate
from mlx_mittens.cli.main import main

SOME_ROWS = (
    store.Row("rms_norm", "a", "float32", 0, (4, 64, 1, 1), True, "", 0, 1.0, 2.0, 2.0, 0.1),
    store.Row("rms_norm", "b", "float32", 0, (4, 1024, 1, 1), False, "", 0, 2.0, 1.0, 1.0, 0.1),
)


@pytest.fixture(autouse=True)
def none_left(native):
    """No test leaves a calibration, nor finds the user's."""
    yield
    loading.unload()
    _ext.calibration_force(None)


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The file that the environment names; not there yet."""
    monkeypatch.setenv("MLX_MITTENS_CALIBRATION", str(tmp_path / "calibration.json"))
    return tmp_path / "calibration.json"


def of_this_machine(rows=SOME_ROWS, device="cpu"):
    return store.Calibration(store.machine(device), store.versions(device), "2026-01-02", list(rows))


class Machine:
    """A clock of a made-up machine: microseconds of a plan for a case, spread by a tenth."""

    microseconds = staticmethod(lambda op, case, plan: 10.0 if plan == MX else 5.0)
    timed: list[tuple[str, str, str]] = []

    def __init__(self, op, case, arrays, device):
        self._op, self._case = op, case
        self.timed.append((op.name, case.name, str(next(a for a in arrays if a is not None).dtype)))

    def __call__(self, plans, budget):
        return {plan: Time(1e-6 * self.microseconds(self._op, self._case, plan), 0.1) for plan in plans}


@pytest.fixture
def made_up(monkeypatch):
    """Puts a made-up machine in the place of this one; a function gives its times."""

    def make(microseconds=Machine.microseconds):
        clock = type("Clock", (Machine,), {"microseconds": staticmethod(microseconds), "timed": []})
        monkeypatch.setattr(measure, "Stopwatch", clock)
        return clock

    return make


@pytest.fixture
def few_shapes(monkeypatch):
    """A grid of four shapes for each op that works along rows."""
    shapes = ((1, 64), (1, 1024), (64, 64), (64, 1024))
    cases = [specs.Case("calibration", shape) for shape in shapes]
    monkeypatch.setattr(grid, "_GRIDS", {op.name: lambda device, thin: iter(cases) for op in specs.ROW_OPS})
    monkeypatch.setattr(grid, "_SAMPLED", 1)
    return cases


A, B = Plan(schedule="a"), Plan(schedule="b", parallelism=1)


@pytest.mark.parametrize(
    "times, fastest, ours",
    [
        ({TABLES: (100, 0.1), MX: (50, 0.1)}, MX, TABLES),
        ({TABLES: (100, 0.1), MX: (92, 0.1)}, TABLES, TABLES),  # within the spread
        ({TABLES: (100, 0.1), MX: (92, 0.01)}, TABLES, TABLES),  # of either
        ({TABLES: (100, 0.01), MX: (92, 0.01)}, MX, TABLES),
        ({TABLES: (100, 0.01), MX: (200, 0.01), A: (90, 0.01)}, A, A),
        ({TABLES: (100, 0.1), MX: (200, 0.1), A: (92, 0.1)}, TABLES, TABLES),
        ({TABLES: (100, 0.01), MX: (200, 0.01), A: (90, 0.01), B: (80, 0.01)}, B, B),
        ({TABLES: (100, 0.01), MX: (85, 0.01), A: (80, 0.01)}, A, A),
        ({TABLES: (100, 0.01), MX: (70, 0.01), A: (80, 0.01)}, MX, A),
        # A plan that has not won by more than its spread does not keep mx from winning.
        ({TABLES: (100, 0.01), MX: (90, 0.01), A: (89, 0.2)}, MX, TABLES),
    ],
    ids=str,
)
def test_winner(times, fastest, ours):
    assert measure.winner({plan: Time(*values) for plan, values in times.items()}) == (fastest, ours)


@pytest.mark.parametrize("seed", range(20))
def test_the_winner_is_not_slower_than_mx_by_more_than_the_spread(seed):
    rng = np.random.default_rng(seed)
    for _ in range(200):
        times = {plan: Time(rng.uniform(1, 2), rng.uniform(0, 0.3)) for plan in (TABLES, MX, A, B)}
        fastest, _ = measure.winner(times)
        spread = max(times[fastest].spread, times[MX].spread)
        assert times[fastest].seconds <= times[MX].seconds * (1 + spread)


def test_a_candidate_is_a_schedule_and_then_its_parallelism():
    microseconds = {"": 10, "a": 8, "b": 9}
    for best in (-2, -1, 0, 1, 2):
        clock = lambda plans, budget, best=best: {
            plan: Time(microseconds[plan.schedule] + abs(plan.parallelism - best), 0.0) for plan in plans
        }
        assert measure.candidate(clock, MadeUpPlans("a", "b")) == Plan(schedule="a", parallelism=best)
        assert measure.candidate(clock, MadeUpPlans()) == Plan(parallelism=best)
        assert measure.candidate(clock, MadeUpPlans("a", most=0)) == Plan(schedule="a")


class MadeUpPlans:
    """Schedules of these names, whose parallelism changes their launches up to so much."""

    def __init__(self, *names, most=2):
        self._names, self._most = names, most

    def schedules(self):
        return [Plan(schedule=name) for name in self._names]

    def with_parallelism(self, plan, choices):
        return [replace(plan, parallelism=n) for n in choices if abs(n) <= self._most]


@pytest.mark.parametrize("name, shape", [("rms_norm", (4, 1024)), ("gemv", (1, 512, 16))])
def test_plans_give_other_launches_and_the_same_results(name, shape, rng):
    op, case = specs.get(name), specs.Case("calibration", shape)
    with mm.simulator.enabled(gpu="nvidia"):
        arrays = measure.draw(grid.Item(op, case, "float32"), rng)
        plans = measure.Plans(op, case, arrays)
        found = plans.schedules()
        assert found and {plan.schedule for plan in found} <= set(_ext.plan_schedules(name))
        assert not plans.schedules() and not plans.with_parallelism(TABLES, [0]), "they come to the same launches"
        launches = []
        for plan in (TABLES, *found):
            _ext.calibration_launches(True)
            with measure.forced(plan):
                mx.eval(specs.run(op, op.ours, case, arrays))
            launches.append(_ext.calibration_launches(False))
        assert all(launches[0]) and not any(one in launches[:i] for i, one in enumerate(launches))
        wrong = replace(op, ours=lambda *arrays, **options: op.ours(*arrays, **options) * mx.random.uniform())
        assert not measure.Plans(wrong, case, arrays).schedules(), "a plan with other results is none"


def test_parallelism_is_tried_where_it_changes_the_launches(rng):
    op = specs.get("rms_norm")
    with mm.simulator.enabled(gpu="m1"):
        for shape, choices in (((4, 64), []), ((1, 65536), [-2])):  # the second is split: of 8 cores into 32 parts
            case = specs.Case("calibration", shape)
            arrays = measure.draw(grid.Item(op, case, "float32"), rng)
            found = measure.Plans(op, case, arrays).with_parallelism(TABLES, [-1, -2])
            assert [plan.parallelism for plan in found] == choices


@pytest.mark.parametrize(
    "times, clear",
    [
        ({"a": [1, 1.1, 1.2], "b": [1.6, 2, 2]}, True),
        ({"a": [1, 1.1, 1.2], "b": [1.5, 2, 2]}, False),
        ({"a": [1, 1, 1], "b": [2, 2, 2], "c": [1.2, 2, 2]}, False),
        ({"a": [2, 2, 2], "b": [1, 1, 1], "c": [3, 3, 3]}, True),
    ],
    ids=str,
)
def test_turns_end_where_the_times_are_clear(times, clear):
    left = {name: iter([values[0]] * 2 + values) for name, values in times.items()}  # the first find the count
    samplers = {name: lambda count, name=name: next(left[name]) * 1e-3 for name in times}
    budget = replace(measure.FULL, fewest=3, most=3)
    taken = take_turns(samplers, "gpu", budget, 1e-3, measure._is_clear)
    assert measure._is_clear(taken) == clear and all(len(values) == 3 for values in taken.values())
    endless = {name: lambda count, name=name: statistics.mean(times[name]) * 1e-3 for name in times}
    assert len(take_turns(endless, "gpu", measure.FULL, 1e-3, lambda times: True)["a"]) == 3
    assert len(take_turns(endless, "gpu", replace(measure.FULL, most=4), 1e-3, lambda times: False)["a"]) == 4


def test_a_slow_call_is_timed_once_if_that_is_clear():
    called = []
    samplers = {"ours": lambda count: 1e-4, "mx": lambda count: called.append(count) or 0.5}
    assert take_turns(samplers, "cpu", measure.FULL, 2e-3, measure._is_clear) == {"ours": [1e-4], "mx": [0.5]}
    assert called == [1]
    samplers["mx"] = lambda count: called.append(count) or 0.11
    samplers["ours"] = lambda count: 0.09
    assert len(take_turns(samplers, "cpu", measure.FULL, 2e-3, measure._is_clear)["mx"]) == 2


def test_the_file_holds_what_was_measured(file):
    written = of_this_machine()
    store.write(file, written)
    assert store.read(file) == written
    assert set(json.loads(file.read_text())) == {"schema", "versions", "machine", "date", "rows"}
    assert os.listdir(file.parent) == [file.name], "nothing beside it is left"


def broken(change):
    """The text of a file that is right but for a change."""
    data = {
        "schema": 1,
        "versions": store.versions("cpu"),
        "machine": store.machine("cpu"),
        "date": "2026-01-02",
        "rows": [{**vars(row)} for row in SOME_ROWS],
    }
    return change(data) or json.dumps(data)


BAD = {
    "empty": (lambda data: " ", "is not a calibration"),
    "cut off": (lambda data: json.dumps(data)[:-30], "is not a calibration"),
    "no object": (lambda data: "[1, 2]", "is not a calibration"),
    "nested": (lambda data: "[" * 100000, "is not a calibration"),
    "no versions": (lambda data: data.pop("versions") and None, "is not a calibration"),
    "other versions": (lambda data: data["versions"].update(mlx="0.1.2"), "was made with .*mlx 0.1.2, installed is"),
    "other schema": (lambda data: data.update(schema=99), "is not a calibration of this version"),
    "other device": (lambda data: data["machine"].update(device="tpu"), "is not a calibration of this version"),
    "other chip": (lambda data: data["machine"].update(name="Z80"), "was made on .*name Z80.*, this is"),
    "fewer threads": (lambda data: data["machine"].update(threads=999), "was made on .*threads 999.*, this is"),
    "no rows": (lambda data: data.pop("rows") and None, "is not a calibration"),
    "a number of rows": (lambda data: data.update(rows=3), "is not a calibration of this version"),
    "rows of text": (lambda data: data.update(rows=["x"]), "has a row that cannot be read"),
    "missing field": (lambda data: data["rows"][0].pop("mx") and None, "has a row that cannot be read"),
    "three sizes": (lambda data: data["rows"][0].update(sizes=[1, 2, 3]), "has a row that cannot be read"),
    "sizes of text": (lambda data: data["rows"][0].update(sizes=["a"] * 4), "has a row that cannot be read"),
    "negative size": (lambda data: data["rows"][0].update(sizes=[-1, 1, 1, 1]), "has a row that cannot be read"),
    "unknown dtype": (lambda data: data["rows"][0].update(dtype="int4"), "has a row that cannot be read"),
    "no schedule": (lambda data: data["rows"][0].update(schedule=None), "has a row that cannot be read"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_ignored_with_one_warning(name, file, lenient):
    change, reason = BAD[name]
    file.write_text(broken(change))
    with pytest.warns(RuntimeWarning, match=reason) as said:
        calibration.load()
    assert len(said) == 1
    assert str(file) in str(said[0].message) and "`mlx-mittens calibrate`" in str(said[0].message)
    assert not calibration.loaded
    assert "ignored" in calibration.status("cpu") and "mlx-mittens calibrate" in calibration.status("cpu")
    mm.stats(reset=True)
    mx.eval(mm.rms_norm(mx.ones((4, 64)), mx.ones(64), 1e-5))
    assert not mm.stats()["rms_norm"]["mx"]


def test_a_file_that_is_not_there_or_no_file(file):
    with pytest.warns(RuntimeWarning, match="cannot be read .*No such file.*mlx-mittens calibrate"):
        calibration.load()
    file.mkdir()
    with pytest.warns(RuntimeWarning, match="cannot be read .*mlx-mittens calibrate"):
        calibration.load()
    assert not calibration.loaded


def test_a_file_of_a_gpu_where_there_is_none(file, monkeypatch):
    monkeypatch.setattr(store, "has_gpu", lambda: False)
    file.write_text(broken(lambda data: data.update(machine={"device": "gpu", "name": "X"})))
    with pytest.warns(RuntimeWarning, match="was made on device gpu, name X, and mx has no GPU here"):
        calibration.load()


@pytest.fixture
def mac(monkeypatch):
    """This machine as a Mac whose GPU is known; a function sets the version of macOS."""
    info = {"device_name": "Apple M5", "architecture": "applegpu_g17g"}
    monkeypatch.setattr(store, "has_gpu", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda device: info)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(gpus, "of_this_mac", lambda: gpus.named("m5"))
    return lambda macos: monkeypatch.setattr(platform, "mac_ver", lambda: (macos, ("", "", ""), "arm64"))


@pytest.mark.parametrize("chosen", [False, True])
def test_another_macos_has_another_compiler_for_the_gpu(mac, chosen, file, tmp_path, monkeypatch, lenient):
    if not chosen:
        monkeypatch.delenv("MLX_MITTENS_CALIBRATION")
        monkeypatch.setenv("MLX_MITTENS_CACHE", str(tmp_path))
    mac("26.1")
    store.write(store.path("gpu"), of_this_machine(device="gpu"))
    for same in ("26.1", "26.1.3"):
        mac(same)
        calibration.load()
        assert calibration.loaded == {"gpu": store.path("gpu")}
        loading.unload()
    mac("26.2")
    with pytest.warns(RuntimeWarning, match="was made with .*, macos 26.1, installed is .*, macos 26.2"):
        calibration.load()
    assert not calibration.loaded and "macos 26.2" in calibration.status("gpu")
    store.write(store.path("cpu"), of_this_machine())
    mac("26.1")
    assert store.read(store.path("cpu")), "the native code is compiled with the package"


@pytest.mark.parametrize(
    "default, options", [(mx.gpu, ("", " --device cpu")), (mx.cpu, (" --device gpu", ""))], ids=str
)
def test_the_advice_is_for_the_device_of_the_file(default, options, mac, file, tmp_path, monkeypatch):
    mac("26.1")
    monkeypatch.setattr(mx, "default_device", lambda: default)
    gpu, cpu = (f"`mlx-mittens calibrate{option}`" for option in options)
    for device, advice in (("gpu", gpu), ("cpu", cpu)):
        for changed in ({"versions": {"mlx": "0.1.2"}}, {"rows": [{}]}):
            store.write(file, of_this_machine(device=device))
            file.write_text(json.dumps(json.loads(file.read_text()) | changed))
            with pytest.warns(RuntimeWarning, match=f"It is ignored; {advice} measures this machine anew"):
                calibration.load()
            assert calibration.status(device).endswith(f"; {advice} measures this machine anew")

    monkeypatch.delenv("MLX_MITTENS_CALIBRATION")
    monkeypatch.setenv("MLX_MITTENS_CACHE", str(tmp_path))
    assert calibration.status("cpu") == f"none; {cpu} measures this machine anew"
    for device in ("gpu", "cpu"):
        store.write(store.path(device), of_this_machine(device=device))
        store.path(device).write_text("{")
    with pytest.warns(RuntimeWarning, match=f"It is ignored; {cpu} and {gpu} measure this machine anew"):
        calibration.load()


def test_a_file_of_the_other_device_is_none_of_this_one(mac, file):
    mac("26.1")
    for device, other in (("cpu", "gpu"), ("gpu", "cpu")):
        store.write(file, of_this_machine(device=device))
        for _ in range(2):  # before it is loaded and then
            assert calibration.status(other) == f"none, as MLX_MITTENS_CALIBRATION names that of the {device} ({file})"
            calibration.load()
        assert calibration.status(device).startswith("of 2026-01-02")
        loading.unload()


@pytest.mark.parametrize("code", ["import mlx_mittens.ops", "import mlx_mittens as mm; mm.softmax"])
@pytest.mark.parametrize("flags", [(), ("-W", "error")], ids=str)
def test_importing_the_ops_never_fails_for_it(flags, code, file):
    file.write_text("{")
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("It is ignored; `mlx-mittens calibrate`") == 1
    assert flags or done.stderr.startswith("<string>:1: RuntimeWarning")  # the line that asked for them


def command(*arguments):
    """Runs the command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", "import mlx_mittens_cli, sys; sys.exit(mlx_mittens_cli.main())", *arguments],
        capture_output=True,
        text=True,
    )


def test_doctor_warns_of_a_file_once(file):
    file.write_text("{")
    done = command("doctor", "--device", "cpu", "--ops", "ssm_update")
    assert done.returncode == 0, done.stderr
    assert (done.stderr + done.stdout).count("It is ignored; `mlx-mittens calibrate`") == 1
    assert f"calibration   ignored: {file} is not a calibration" in done.stdout


def test_the_command_does_not_warn_of_the_file_that_it_makes(file):
    options = ("calibrate", "--device", "cpu", "--quick", "--ops", "softcap", "--minutes", "1e-9")
    done = command(*options)
    assert done.returncode == 0 and file.exists() and "Warning" not in done.stderr, done.stderr
    file.write_text("{")
    done = command(*options)
    assert done.returncode == 2 and "Warning" not in done.stderr and "is not a calibration" in done.stderr


def test_without_a_calibration_nothing_is_said(tmp_path, monkeypatch):
    monkeypatch.delenv("MLX_MITTENS_CALIBRATION")
    monkeypatch.setenv("MLX_MITTENS_CACHE", str(tmp_path / "none"))
    monkeypatch.setattr(store, "machine", lambda device: pytest.fail("asks for the machine"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibration.load()
    assert not calibration.loaded


def test_the_file_of_this_machine_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.delenv("MLX_MITTENS_CALIBRATION")
    monkeypatch.setenv("MLX_MITTENS_CACHE", str(tmp_path))
    assert calibration.status("cpu").startswith("none")
    path = store.path("cpu")
    assert path.parent == tmp_path / "calibration" and path.name.startswith("cpu-")
    store.write(path.with_name("cpu-another.json"), of_this_machine())
    calibration.load()
    assert not calibration.loaded, "of another machine that shares the folder"
    store.write(path, of_this_machine())
    assert calibration.status("cpu").startswith("not used")
    calibration.load()
    assert calibration.loaded == {"cpu": path}
    assert calibration.status("cpu").startswith("of 2026-01-02, 2 problems")
    loading.unload()
    monkeypatch.setenv("MLX_MITTENS_CALIBRATION", "off")
    calibration.load()
    assert not calibration.loaded and calibration.status("cpu").startswith("off")


def slow_in_short_rows(op, case, plan):
    """A machine on which our kernels are slow for few columns."""
    return 10.0 if plan == MX else 50.0 if case.shape[-1] < 256 else 5.0


def test_patched_calls_follow_the_calibration(few_shapes, made_up, file, lenient):
    """The whole: a machine on which ours is slower for some shapes, measured, stored, read, followed."""
    made_up(slow_in_short_rows)
    assert main(["calibrate", "--device", "cpu", "--ops", "rms_norm"]) == 0
    rows = store.read(file).rows
    assert {row.sizes: row.mx for row in rows if row.dtype == "float32"} == {
        (1, 64, 1, 1): True, (1, 1024, 1, 1): False, (64, 64, 1, 1): True, (64, 1024, 1, 1): False,
    }  # fmt: skip
    calibration.load()

    def count(rows, columns):
        mm.stats(reset=True)
        mx.eval(mx.fast.rms_norm(mx.ones((rows, columns)), mx.ones(columns), 1e-5))
        counts = mm.stats().get("rms_norm", {"kernels": {}, "mx": {}})
        return sum(counts["kernels"].values()), counts["mx"]

    to_mx = {"a problem that mx computes faster, as measured on this machine": 1}
    ours = {}
    with mm.patched():
        for shape, expected in {
            (1, 64): to_mx, (64, 64): to_mx, (1, 1024): ours, (64, 1024): ours,
            (2, 64): to_mx, (64, 128): to_mx, (64, 100): to_mx, (33, 33): to_mx, (128, 2048): ours, (40, 600): ours,
            (8, 64): to_mx, (10, 64): to_mx, (8, 1024): ours, (10, 1500): ours,  # the points around them agree
            (1, 300): ours, (8, 300): ours,  # they do not
            (4, 64): ours, (1, 16): ours, (256, 64): ours,  # they are farther than 16 times, or on one side alone
        }.items():  # fmt: skip
            assert count(*shape) == (int(expected == ours), expected), shape
        with mm.strict():
            for shape in ((1, 64), (64, 64), (1, 1024)):
                assert count(*shape) == (1, ours), shape
    with mm.patched(strict=True):
        assert count(1, 64) == (1, ours)
    loading.unload()
    with mm.patched():
        assert count(1, 64) == (1, ours)


def between(points, shape):
    """Whether points agree about a shape between them, as the command sees it."""
    return grid.agree(specs.Case("", shape), [(specs.Case("", point), is_mx) for point, is_mx in points.items()])


@pytest.mark.parametrize("different", [None, (1, 4), (16, 64)], ids=str)
def test_what_is_not_measured_is_answered(different, file):
    """The command leaves a fine point out exactly where a call there is answered by the points around it."""
    points = {shape: shape == different for shape in product((1, 16), (4, 64))}
    row = replace(SOME_ROWS[1], schedule="a", parallelism=1)
    rows = [replace(row, sizes=(*shape, 1, 1), mx=is_mx) for shape, is_mx in points.items()]
    store.write(file, of_this_machine(rows))
    calibration.load()
    for shape in ((4, 16), (4, 4), (4, 64), (1, 16), (16, 16), (5, 11), (64, 16), (4, 1), (4, 256), (400, 4), (8, 16)):
        _ext.calibration_record(True)
        mm.rms_norm(mx.ones(shape), mx.ones(shape[-1]), 1e-5)
        ((*_, known, _),) = _ext.calibration_record(False)
        near = any(all(abs(math.log2(a / b)) <= 1 for a, b in zip(shape, point)) for point in points)
        assert known == (near or between(points, shape)), shape
    assert between(points, (4, 16)) == (different is None) and not between(points, (64, 16))


def test_points_that_agree_on_the_plan_give_it(file):
    def plan_of(first, second):
        rows = [
            replace(SOME_ROWS[0], sizes=(1, columns, 1, 1), mx=is_mx, schedule=schedule, parallelism=parallelism)
            for columns, (is_mx, schedule, parallelism) in ((256, first), (4096, second))
        ]
        _ext.calibration_load("simulator", [tuple(getattr(row, key) for key in store.KEYS) for row in rows])
        with mm.simulator.enabled(gpu="nvidia"), mm.strict():
            mm.stats(reset=True)
            mx.eval(mm.rms_norm(mx.ones((1, 1024)), mx.ones(1024), 1e-5))
        _ext.calibration_load("simulator", [])
        return next(iter(mm.stats()["rms_norm"]["kernels"]))

    usual, other = plan_of((False, "", 0), (False, "", 0)), plan_of((False, "looped", 0), (False, "looped", 0))
    assert "looped" in other and "looped" not in usual
    assert plan_of((False, "looped", 0), (False, "", 0)) == usual
    assert plan_of((True, "looped", 0), (True, "", 0)) == usual


FINE = ((1, 64), (4, 64), (16, 64), (1, 256), (4, 256), (16, 256), (1, 1024), (4, 1024), (16, 1024))


@pytest.fixture
def two_levels(monkeypatch):
    """A grid of four coarse points and five between them."""
    cases = [specs.Case("calibration", shape) for shape in FINE]
    corners = [case for case in cases if case.shape[0] in (1, 16) and case.shape[1] in (64, 1024)]
    monkeypatch.setattr(
        grid, "_GRIDS", {"rms_norm": lambda device, thin: iter(cases if thin is grid._fine else corners)}
    )


def run_calibration(*arguments):
    return main(["calibrate", "--device", "cpu", "--ops", "rms_norm", *arguments])


def test_points_between_are_measured_where_those_around_them_do_not_agree(two_levels, made_up, file):
    clock = made_up()
    assert run_calibration() == 0
    corners = {f"calibration {shape}" for shape in ("1x64", "16x64", "1x1024", "16x1024")}
    assert {name for _, name, _ in clock.timed} == corners
    assert run_calibration() == 0 and {row.case for row in store.read(file).rows} == corners

    clock = made_up(slow_in_short_rows)
    assert run_calibration("--again") == 0
    float32 = [name for _, name, dtype in clock.timed if "float32" in dtype]
    assert set(float32) == corners | {f"calibration {rows}x256" for rows in (1, 4, 16)}
    rows = {row.sizes[:2]: row.mx for row in store.read(file).rows if row.dtype == "float32"}
    assert [rows[shape] for shape in ((1, 64), (1, 256), (1, 1024), (4, 256))] == [True, False, False, False]


@pytest.mark.parametrize("ours, told", [((1.0, 1.0), True), ((1.0, 9.0), False), ((9.0, 9.0), False)], ids=str)
def test_plans_that_differ_tell_what_is_between_if_mx_is_slower_than_the_tables_plan(ours, told):
    """The tables decide there, whose plan must not be slower than mx."""
    op, points = specs.get("rms_norm"), (specs.Case("calibration", (1, columns)) for columns in (64, 1024))
    items = [grid.Item(op, case, "float32") for case in points]
    known = inference.Known(items, [])
    for item, plan, microseconds in zip(items, ("a", "b"), ours):
        row = replace(SOME_ROWS[1], case=item.case.name, schedule=plan, mx_us=5.0, ours_us=microseconds, best_us=0.5)
        known.add(item, [row])
    assert known.is_between(grid.Item(op, specs.Case("calibration", (1, 256)), "float32", fine=True)) == told


def test_half_types_that_agree_are_timed_once(few_shapes, made_up, file, monkeypatch):
    monkeypatch.setattr(grid, "_SAMPLED", 3)  # the first of four cases and the last
    clock = made_up(slow_in_short_rows)
    assert run_calibration() == 0
    timed = [(name.split()[1], dtype.split(".")[-1]) for _, name, dtype in clock.timed]
    assert [name for name, dtype in timed if dtype == "float16"] == ["1x64", "64x1024"]
    assert len(timed) == 4 + 2 + 4 and timed.index(("64x1024", "bfloat16")) < timed.index(("1x64", "float32"))
    rows = store.read(file).rows
    winners = {dtype: {row.sizes: row.mx for row in rows if row.dtype == dtype} for dtype in specs.DTYPES}
    assert winners["float16"] == winners["bfloat16"] == winners["float32"] and len(winners["float16"]) == 4
    assert {(row.case, row.dtype) for row in rows if row.timed} == {
        (f"calibration {shape}", "float16") for shape in ("1x1024", "64x64")
    }
    assert {row.timed for row in rows} == {"", "bfloat16"}


def test_half_types_that_do_not_agree_are_both_timed(few_shapes, made_up, file, monkeypatch):
    monkeypatch.setattr(grid, "_SAMPLED", 3)
    clock = made_up()

    def slow_in_one_type(op, case, plan):
        return 10.0 if plan == MX else 50.0 if "bfloat16" in clock.timed[-1][2] else 5.0

    clock.microseconds = staticmethod(slow_in_one_type)
    assert run_calibration() == 0
    rows = store.read(file).rows
    assert len(clock.timed) == len(rows) == 12 and not any(row.timed for row in rows)
    assert all(row.mx == (row.dtype == "bfloat16") for row in rows)


def test_a_time_limit(few_shapes, made_up, file, capsys):
    made_up()
    assert run_calibration("--minutes", "1e-9") == 0
    assert "the time limit of 1e-09 minutes came before" in (said := capsys.readouterr().out) and "goes on" in said
    assert len(store.read(file).rows) == 1
    with pytest.raises(SystemExit):
        run_calibration("--minutes", "0")
    assert "number of minutes" in capsys.readouterr().err
    assert run_calibration() == 0 and len(store.read(file).rows) == 12


# A small shape of each op that asks a calibration.
SMALL = {
    "rms_norm": ((4, 64), {}),
    "layer_norm": ((4, 64), {}),
    "add_rms_norm": ((4, 64), {}),
    "norm_add_norm": ((4, 64), {}),
    "qk_norm": ((4, 64), {}),
    "softcap": ((4, 64), {}),
    "softmax": ((4, 64), {}),
    "sample": ((2, 33), {"top_k": 5}),
    "gemv": ((2, 64, 8), {}),
    "quantized_matmul": ((2, 128, 8), {"bits": 8}),
    "quantized_matmuls": ((1, 128, 8, 4, 1), {"bits": 4}),
    "quantized_swiglu": ((1, 128, 8), {"bits": 4}),
    "block_matmul": ((2, 64, 8), {"kind": "q8_0"}),
    "scaled_dot_product_attention": ((1, 4, 2, 1, 70, 64), {}),
    "quantized_scaled_dot_product_attention": ((1, 4, 2, 1, 70, 64), {"bits": 4}),
    "rope_append": ((1, 4, 2, 1, 64), {"eps": 1e-6}),
    "gather_qmm": ((2, 2, 3, 64, 8), {}),
    "gather_mm": ((2, 2, 3, 64, 8), {}),
    "gather_swiglu": ((2, 2, 3, 64, 8), {}),
    "gather_sum": ((2, 2, 3, 64, 8), {}),
    "mixture": ((1, 2, 3, 64, 64), {"k": 2}),
    "route_top_k": ((2, 16), {"k": 2}),
    "gated_delta_token": ((1, 2, 1, 2, 3, 8), {}),
    "short_conv_token": ((1, 2, 3), {}),
    "ssm_token": ((1, 2, 1, 2, 3, 8), {}),
    "gated_delta_update": ((1, 2, 1, 2, 3, 8), {}),
    "ssm_update": ((1, 2, 1, 2, 3, 8), {}),
}


def test_every_op_of_the_table_is_calibrated():
    assert set(SMALL) == set(grid._GRIDS) == {op.name for op in specs.OPS} - grid.ASK_NOTHING
    assert grid.ASK_ON_MACS <= grid.ASK_ON_GPUS <= set(SMALL)


def problems_of(op, case, rng, device="simulator"):
    return measure.asked(op, case, op.draw(rng, case, mx.float16), device).problems


@pytest.mark.parametrize("name", sorted(grid.ASK_NOTHING))
def test_ops_without_a_grid_ask_nothing(name, rng):
    op = specs.get(name)
    assert not any(problems_of(op, case, rng, "cpu") for case in op.tests if not case.gpu)
    for gpu in ("apple", "nvidia"):
        with mm.simulator.enabled(gpu=gpu):
            assert not any(problems_of(op, case, rng) for case in op.tests[:2])
    assert not grid.items([name], "cpu") and not grid.items([name], "gpu")


@pytest.mark.parametrize("is_mac", [False, True], ids=["elsewhere", "mac"])
@pytest.mark.parametrize("name", sorted(grid.ASK_ON_GPUS))
def test_ops_that_ask_on_gpus_alone_are_measured_there_alone(name, is_mac, rng, monkeypatch):
    op, case = specs.get(name), specs.Case("calibration", *SMALL[name])
    monkeypatch.setattr(mx.metal, "is_available", lambda: is_mac)
    assert not problems_of(op, case, rng, "cpu") and not grid.items([name], "cpu")
    with mm.simulator.enabled(gpu="apple" if is_mac else "nvidia"):
        asks = problems_of(op, case, rng)
    assert bool(asks) == bool(grid.items([name], "gpu")) == (is_mac or name not in grid.ASK_ON_MACS)


def follows(op, case, dtype):
    """The calibration that is loaded leaves a call to mx, or to other ops, and in strict mode does not."""
    arrays = measure.draw(grid.Item(op, case, dtype), np.random.default_rng(0))
    mm.stats(reset=True)
    mx.eval(specs.run(op, op.ours, case, arrays))
    counts = mm.stats(reset=True)[op.name]
    assert counts["mx"] == {"a problem that mx computes faster, as measured on this machine": 1}
    assert not counts["kernels"]
    assert specs.check(op, case, arrays).passed and not mm.stats()[op.name]["kernels"]
    with mm.strict():
        mx.eval(specs.run(op, op.ours, case, arrays))
    assert mm.stats()[op.name]["kernels"], "strict mode asks for the kernel"


@pytest.mark.parametrize("name", [name for name in SMALL if name not in grid.ASK_ON_GPUS])
def test_every_op_follows_the_calibration(name, made_up, file, lenient):
    made_up(lambda op, case, plan: 1.0 if plan == MX else 50.0)
    dtype = "float32" if name == "gather_mm" else "float16"  # mx has no other gather_mm on a CPU
    op, case = specs.get(name), specs.Case("calibration", *SMALL[name])
    with mm.strict():
        (row,) = measure.measure(grid.Item(op, case, dtype), "cpu", measure.QUICK, np.random.default_rng(0))
    assert row.mx and row.op == name and row.dtype == dtype
    store.write(file, of_this_machine([row]))
    calibration.load()
    follows(op, case, dtype)


@pytest.mark.parametrize("name", sorted(grid.ASK_ON_GPUS))
def test_ops_of_gpus_follow_the_calibration(name, made_up, lenient):
    """In the simulator, whose calibration no file has."""
    made_up(lambda op, case, plan: 1.0 if plan == MX else 50.0)
    op, case = specs.get(name), specs.Case("calibration", *SMALL[name])
    item = grid.Item(op, case, "float16")
    with mm.simulator.enabled(gpu="apple"):
        with mm.strict():
            (row,) = measure.measure(item, "simulator", measure.QUICK, np.random.default_rng(0))
        assert row.mx and row.op == name
        store.activate({"machine": {"device": "simulator"}, "rows": [asdict(row)]})
        try:
            follows(op, case, "float16")
        finally:
            _ext.calibration_load("simulator", [])


def test_matmul_follows_the_calibration_of_gemv(made_up, file, lenient):
    """It is the same product: measurements of one hold for the other."""
    made_up(lambda op, case, plan: 1.0 if plan == MX else 50.0)
    case = specs.Case("calibration", *SMALL["gemv"])
    item = grid.Item(specs.get("gemv"), case, "float16")
    rows = measure.measure(item, "cpu", measure.QUICK, np.random.default_rng(0))
    store.write(file, of_this_machine(rows))
    op = specs.get("matmul")
    arrays = op.draw(np.random.default_rng(0), case, mx.float16)
    mm.stats(reset=True)
    mx.eval(specs.run(op, op.ours, case, arrays))
    assert mm.stats(reset=True)["matmul"]["kernels"]
    calibration.load()
    assert specs.check(op, case, arrays).passed
    assert not mm.stats(reset=True).get("matmul", {}).get("kernels"), "mx computed it"


def test_a_gather_that_mx_has_not_stays_here(made_up, lenient):
    made_up(lambda op, case, plan: 1.0 if plan == MX else 50.0)
    op, case = specs.get("gather_mm"), specs.Case("calibration", *SMALL["gather_mm"])
    assert measure.measure(grid.Item(op, case, "float16"), "cpu", measure.QUICK, np.random.default_rng(0)) == []
    _ext.calibration_force((True, "", 0))
    assert specs.check(op, case, op.draw(np.random.default_rng(0), case, mx.float16)).passed


def test_sorted_pairs_are_problems_of_their_own(rng):
    op, shape = specs.get("gather_qmm"), (16, 1, 3, 64, 8)
    problems = []
    for options in ({}, {"sorted_indices": True}):
        case = specs.Case("calibration", shape, options)
        arrays = op.draw(rng, case, mx.float32)
        assert bool((arrays[-1][1:] >= arrays[-1][:-1]).all()) == bool(options)
        problems += measure.asked(op, case, arrays, "cpu").problems
    (_, _, first, sizes), (_, _, second, same) = problems
    assert first + 1 == second and sizes == same == (16, 3, 64, 8)


def test_a_plan_asks_for_more_than_whether_mx_is_faster(rng):
    for name, planned in (("rms_norm", True), ("quantized_matmul", True), ("softcap", False), ("gather_qmm", False)):
        op, case = specs.get(name), specs.Case("calibration", *SMALL[name])
        with mm.simulator.enabled(gpu="nvidia"):
            assert measure.asked(op, case, op.draw(rng, case, mx.float16), "simulator").planned == planned


def test_mx_has_to_win_twice(made_up):
    asked = []

    def once(op, case, plan):
        asked.append(plan)
        return 1.0 if asked.count(MX) == 1 and plan == MX else 5.0

    made_up(once)
    item = grid.Item(specs.get("rms_norm"), specs.Case("calibration", (4, 64)), "float32")
    (row,) = measure.measure(item, "cpu", measure.QUICK, np.random.default_rng(0))
    assert asked == [TABLES, MX] * 2 and not row.mx and row.mx_us == 5.0


def test_a_busy_machine(few_shapes, made_up, file, capsys, monkeypatch):
    made_up()
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    assert main(["calibrate", "--device", "cpu", "--ops", "rms_norm"]) == 0
    assert "load 99.0 on" in capsys.readouterr().out
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 99.0, 0.0))
    assert main(["calibrate", "--device", "cpu", "--ops", "rms_norm", "--again"]) == 0
    assert "keep this machine busy" not in capsys.readouterr().out


def test_a_second_run_measures_what_is_missing(few_shapes, made_up, file, capsys):
    first = made_up()
    assert main(["calibrate", "--device", "cpu", "--ops", "rms_norm"]) == 0
    assert len(first.timed) == 12 and "12 problems" in capsys.readouterr().out
    second = made_up(lambda op, case, plan: 1.0)
    few_shapes.append(specs.Case("calibration", (512, 64)))
    assert main(["calibrate", "--device", "cpu", "--ops", "rms_norm,softmax"]) == 0
    new = [timed for timed in second.timed if timed[0] == "rms_norm"]
    assert [name for _, name, _ in new] == ["calibration 512x64"] * 3
    assert len(second.timed) == 3 + 15 and "goes on: 12 calls" in capsys.readouterr().out
    rows = store.read(file).rows
    assert len(rows) == 30 and sum(row.mx_us == 10.0 for row in rows) == 12

    again = made_up(lambda op, case, plan: 2.0)
    assert main(["calibrate", "--device", "cpu", "--ops", "softmax", "--again"]) == 0
    assert {op for op, _, _ in again.timed} == {"softmax"} and len(again.timed) == 15
    rows = store.read(file).rows
    assert {(row.op, row.mx_us) for row in rows} == {("rms_norm", 10.0), ("rms_norm", 1.0), ("softmax", 2.0)}


def times_by_call(file):
    return {row.key: (row.mx_us, row.again) for row in store.read(file).rows}


def test_what_is_measured_again_counts_until_then(few_shapes, made_up, file, capsys):
    made_up()
    assert run_calibration() == 0
    assert set(times_by_call(file).values()) == {(10.0, False)}
    newer = lambda op, case, plan: 2.0
    made_up(newer)
    assert run_calibration("--again", "--minutes", "1e-9") == 0
    assert "The same command without --again goes on" in capsys.readouterr().out
    assert sorted(times_by_call(file).values()) == [(2.0, False), *[(10.0, True)] * 11]
    assert calibration.status("cpu").startswith("not used") and "12 problems" in calibration.status("cpu")
    calibration.load()
    assert calibration.loaded == {"cpu": file}

    clock = made_up(newer)
    assert run_calibration("--minutes", "1e-9") == 0 and len(clock.timed) == 1
    assert "The same command goes on" in capsys.readouterr().out
    assert run_calibration() == 0 and len(clock.timed) == 11
    assert len(times_by_call(file)) == 12 and set(times_by_call(file).values()) == {(2.0, False)}


def test_what_cannot_be_measured_again_stays(few_shapes, made_up, file):
    def failing(op, case, plan):
        if case.shape == (1, 1024):
            raise RuntimeError("out of memory")
        return 2.0

    made_up()
    assert run_calibration() == 0
    made_up(failing)
    assert run_calibration("--again") == 1
    left = {case for (_, case, _), found in times_by_call(file).items() if found == (10.0, True)}
    assert left == {"calibration 1x1024"} and len(times_by_call(file)) == 12
    clock = made_up()
    assert run_calibration() == 0 and len(clock.timed) == 3
    assert not any(again for _, again in times_by_call(file).values())


def test_what_needs_no_measurement_any_more_goes(two_levels, made_up, file):
    made_up(slow_in_short_rows)
    assert run_calibration() == 0 and "calibration 4x256" in {row.case for row in store.read(file).rows}
    made_up()
    assert run_calibration("--again") == 0
    assert {row.case for row in store.read(file).rows} == {
        f"calibration {n}" for n in ("1x64", "16x64", "1x1024", "16x1024")
    }


def test_a_quick_run_again_leaves_the_other_shapes(few_shapes, made_up, file, monkeypatch):
    made_up()
    assert run_calibration() == 0
    made_up(lambda op, case, plan: 2.0)
    quick = grid.items(["rms_norm"], "cpu")
    monkeypatch.setattr(grid, "items", lambda *_: quick[:1])
    assert run_calibration("--again", "--quick") == 0
    assert sorted(times_by_call(file).values()) == [(2.0, False), *[(10.0, False)] * 11]


def test_a_file_of_other_versions_is_measured_anew(few_shapes, made_up, file, capsys):
    store.write(file, replace(of_this_machine(), versions={"mlx_mittens": "0.0.1", "mlx": "0.1.2"}))
    made_up()
    assert main(["calibrate", "--device", "cpu", "--ops", "rms_norm"]) == 0
    assert "mlx_mittens 0.0.1" in capsys.readouterr().out
    assert len(store.read(file).rows) == 12


@pytest.fixture
def same_signals():
    """A command that SIGTERM ended ignores further ones, for as long as its process has yet to live."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=str)
def test_what_was_measured_is_kept_when_it_is_stopped(number, status, few_shapes, made_up, file, capsys, same_signals):
    def stopped(op, case, plan):
        if case.shape == (1, 1024):
            signal.raise_signal(number)
        return 1.0

    made_up(stopped)
    assert main(["calibrate", "--device", "cpu", "--ops", "rms_norm"]) == status
    assert "goes on" in capsys.readouterr().out
    assert [row.case for row in store.read(file).rows] == ["calibration 1x64"] * 2
    made_up()
    assert main(["calibrate", "--device", "cpu", "--ops", "rms_norm"]) == 0
    assert len(store.read(file).rows) == 12


def test_what_fails_does_not_stop_the_rest(few_shapes, made_up, file, capsys):
    def failing(op, case, plan):
        if case.shape == (1, 1024):
            raise RuntimeError("out of memory\nand more")
        return 1.0

    made_up(failing)
    assert main(["calibrate", "--device", "cpu", "--ops", "rms_norm"]) == 1
    assert "not measured: rms_norm calibration 1x1024 float16: out of memory\n" in capsys.readouterr().out
    assert len(store.read(file).rows) == 9


def test_shapes_for_which_mx_would_take_minutes_are_left_out(few_shapes, made_up, file):
    slow = lambda op, case, plan: 1e6 if plan == MX and case.shape[0] == 64 else 5.0
    few_shapes += [specs.Case("calibration", (256, 1024)), specs.Case("calibration", (16, 1024))]
    clock = made_up(slow)
    assert main(["calibrate", "--device", "cpu", "--ops", "rms_norm"]) == 0
    assert {name for _, name, _ in clock.timed} == {f"calibration {s}" for s in ("1x64", "1x1024", "64x64", "16x1024")}
    clock = made_up(slow)
    assert main(["calibrate", "--device", "cpu", "--ops", "rms_norm"]) == 0
    assert not clock.timed, "a second run leaves them out too"


def test_a_full_disk(few_shapes, made_up, file, monkeypatch, capsys):
    made_up()
    monkeypatch.setattr(calibrate, "_SAVED_EVERY", 0.0)
    write, left = store.write, [3]

    def full(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        write(*arguments)

    monkeypatch.setattr(store, "write", full)
    assert main(["calibrate", "--device", "cpu", "--ops", "rms_norm"]) == 1
    assert "No space left on device" in capsys.readouterr().out
    assert len(store.read(file).rows) == 2


def test_a_call_that_no_kernel_covers_is_left_out(made_up, file):
    made_up()
    op = replace(
        specs.get("rms_norm"), ours=lambda *arrays, eps: mm.rms_norm(*(a.astype(mx.float64) for a in arrays), eps)
    )
    item = grid.Item(op, specs.Case("calibration", (2, 64)), "float32")
    assert measure.measure(item, "cpu", measure.QUICK, np.random.default_rng(0)) == []


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--ops", "rmsnorm"], ["rmsnorm", "rms_norm, layer_norm"]),
        pytest.param(
            ["--device", "gpu"],
            ["no such device"],
            marks=pytest.mark.skipif(mx.is_available(mx.gpu), reason="there is a GPU"),
        ),
    ],
    ids=str,
)
def test_bad_arguments(arguments, words, file, capsys):
    assert main(["calibrate", *arguments]) == 2
    message = capsys.readouterr().err
    assert message.startswith("mlx-mittens calibrate: ") and all(word in message for word in words)
    assert not file.exists()


def test_a_file_that_cannot_be_written(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLX_MITTENS_CALIBRATION", str(tmp_path / "file" / "below.json"))
    assert main(["calibrate", "--device", "cpu"]) == 2
    assert "below.json" in capsys.readouterr().err


def test_not_in_the_simulator(file, capsys):
    with mm.simulator.enabled():
        assert main(["calibrate", "--device", "cpu"]) == 2
    assert "MLX_MITTENS_SIMULATOR" in capsys.readouterr().err and not file.exists()


def test_times_of_this_machine(few_shapes, file, monkeypatch):
    """The clock itself: rows with times, for each dtype."""
    monkeypatch.setattr(measure, "FULL", replace(measure.FULL, seconds=0.0, fewest=2))
    assert main(["calibrate", "--device", "cpu", "--ops", "rms_norm"]) == 0
    rows = store.read(file).rows
    assert [row.dtype for row in rows[:4]] == ["float16", "bfloat16"] * 2
    assert {row.dtype for row in rows} == set(specs.DTYPES)
    for row in rows:
        assert row.mx_us > 0 and row.ours_us > 0 and row.best_us == row.ours_us and row.spread >= 0
        assert not row.schedule and not row.parallelism


def within_two(a, b):
    return len(a) == len(b) and all(x <= 2 * y and y <= 2 * x for x, y in zip(a, b))


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("op", [op for op in specs.OPS if op.name in grid._GRIDS], ids=lambda op: op.name)
def test_models_are_near_a_point_of_the_grid(op, device):
    def sizes(case):
        if op.name == "softcap":
            return (math.prod(case.shape),)
        if op.name == "route_top_k":
            return (*case.shape, op.arguments(case)["k"])
        return (math.prod(case.shape[:-1]), case.shape[-1]) if isinstance(op, specs.RowOp) else case.shape

    def is_model(case):
        return not case.vjp and case.label != "large" and (op.name == "rope_append" or case.shape[1:3] != (1, 1))

    points = [sizes(case) for case in (*grid.cases(op, device), *grid.fine_cases(op, device))]
    cases = [case for case in op.cases if case.runs_on(device) and is_model(case)]
    assert not [case.name for case in cases if not any(within_two(sizes(case), p) for p in points)]


def test_the_grid(monkeypatch):
    names = [op.name for op in specs.OPS]
    for device in ("cpu", "gpu"):
        items = grid.items(names, device)
        first = [item for item in items if not item.fine and (item.dtype != "float16" or item.sampled)]
        assert len(grid.items(names, device, quick=True)) < 120 < len(first) < {"cpu": 750, "gpu": 950}[device]
        assert items[: len(first) // 3] == first[: len(first) // 3], "models need them first"
        assert all(item.dtype != "float32" for item in items[: len(first) // 3])
        assert [item.fine for item in items] == sorted(item.fine for item in items)
    assert {item.op.name for item in grid.items(["softmax"], "cpu")} == {"softmax"}
    for op in specs.OPS:
        assert op.name in grid.ASK_NOTHING or (grid.cases(op, "cpu") and grid.cases(op, "gpu"))
        assert not any(case.vjp for case in grid.cases(op, "cpu"))
    all_of_them, fitting = (grid.items(names, "gpu", memory=memory) for memory in (math.inf, 8 << 30))
    assert 0.8 * len(all_of_them) < len(fitting) < len(all_of_them), "what a small GPU has no memory for is left out"
    monkeypatch.setattr(grid, "_GRIDS", {})
    op = specs.get("rms_norm")
    assert grid.cases(op, "cpu") == [case for case in op.cases if not case.vjp and not case.gpu_only]


@pytest.mark.parametrize("name", ["gemv", "quantized_matmul", "quantized_swiglu", "block_matmul"])
def test_prompts_of_products_are_measured_on_macs_alone(name, monkeypatch):
    op = specs.get(name)
    prompts = lambda: [case for case in grid.cases(op, "gpu") if case.shape[0] > 16]
    assert not prompts()
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert {case.shape[0] for case in prompts()} == {32, 64, 512, 2048}
    assert 2 * sum(math.prod(case.shape) for case in prompts()) < 1.6e12, "one of each takes an M1 about a second"
    dtypes = {item.dtype for item in grid.items([name], "gpu") if item.case.shape[0] > 64}
    assert dtypes == ({"bfloat16"} if name == "gemv" else {"float16", "bfloat16"})


@pytest.mark.parametrize("name", ["gather_qmm", "gather_mm", "gather_swiglu"])
def test_prompts_of_experts_are_longer_on_macs(name, monkeypatch):
    longest = lambda: max(case.shape[0] for case in grid.cases(specs.get(name), "gpu"))
    assert longest() == 1024
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert longest() == 4096


@pytest.mark.parametrize("op", specs.OPS, ids=lambda op: op.name)
def test_inputs_are_those_of_the_op(op, rng):
    """Few numbers are drawn, and arrays have the shapes, types and views that the op draws."""
    case = replace(op.cases[0], shape=getattr(op, "smallest", (2, 64, 8))[: len(op.cases[0].shape)])
    drawn, usual = measure.draw(grid.Item(op, case, "float16"), rng), op.draw(rng, case, mx.float16)
    assert [None if a is None else (a.shape, a.dtype) for a in drawn] == [
        None if a is None else (a.shape, a.dtype) for a in usual
    ]
    for a in drawn:
        if a is not None and mx.issubdtype(a.dtype, mx.floating):
            assert bool(mx.isfinite(a).all())


def test_bench_marks_rows_that_the_calibration_answered(file, capsys, tmp_path, monkeypatch):
    op = specs.get("rms_norm")
    small = [replace(case, shape=shape) for case, shape in zip(op.cases, ((4, 64), (4, 300)))]
    monkeypatch.setattr(specs, "OPS", (replace(op, cases=tuple(replace(case, quick=True) for case in small)),))
    store.write(file, of_this_machine())
    calibration.load()
    assert main(["bench", "--quick", "--device", "cpu", "--json", str(tmp_path / "bench.json")]) == 0
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    marked = {(row["case"], row["dtype"]) for row in rows if row["calibrated"]}
    assert marked == {(small[0].name, "float32")} and len(rows) == 2
    text = capsys.readouterr().out
    assert "cal" in text and "* planned by the calibration of this machine" in text


def test_doctor_says_which_calibration_there_is(file, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(specs, "OPS", tuple(replace(op, tests=op.tests[:1], cases=()) for op in specs.OPS[:1]))
    store.write(file, of_this_machine())
    calibration.load()
    assert main(["doctor", "--device", "cpu", "--ops", "rms_norm", "--json", str(tmp_path / "doctor.json")]) in (0, 1)
    assert "calibration   of 2026-01-02, 2 problems" in capsys.readouterr().out
    assert json.loads((tmp_path / "doctor.json").read_text())["calibration"].startswith("of 2026-01-02")
