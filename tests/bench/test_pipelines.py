"""The records of `doctor --json` on a Mac: pipelines and GPU, with planted answers of Metal; and the comparison."""

import json
import subprocess
import sys

import pytest
from helpers import scripts

from mlx_mittens import gpus, specs
from mlx_mittens.bench import machine
from mlx_mittens.cli import doctor, pipelines
from mlx_mittens.cli.main import main

# In the processes that compile pipelines: two files of kernels. Metal refuses one.
PLANTED = """
import os
from mlx_mittens import _ext
KERNELS = {
    "norm/a.metal": ["one_float16", "two_float16"], "matmul/b.metal": ["three_float32", "wrong"], "gone.metal": None
}
def kernels(file):
    if KERNELS[file] is None:
        raise RuntimeError(f"{file} does not compile")
    return KERNELS[file]
def pipeline(file, kernel):
    if kernel == "wrong":
        raise RuntimeError("Unable to load kernel wrong")
    print("noise of a library")
    threads, memory = {"one_float16": (1024, 0), "two_float16": (832, 512), "three_float32": (384, 8192)}[kernel]
    return {
        "maxTotalThreadsPerThreadgroup": threads, "staticThreadgroupMemoryLength": memory, "threadExecutionWidth": 32
    }
_ext.metal_kernels, _ext.metal_pipeline = kernels, pipeline
"""

FILES = ["norm/a.metal", "gone.metal", "matmul/b.metal"]


@pytest.fixture
def planted(monkeypatch):
    def plant(more=""):
        monkeypatch.setattr(pipelines, "_CHILD", f"{PLANTED}{more}\n{pipelines._CHILD}")

    return plant


def timed(rows):
    """The rows without their seconds, which every kernel that was compiled has."""
    rows = list(rows)
    for found in rows:
        assert ("seconds" in found) == ("error" not in found) and found.pop("seconds", 0.0) >= 0
    return rows


def row(file, kernel, threads, memory):
    made = {
        "maxTotalThreadsPerThreadgroup": threads,
        "staticThreadgroupMemoryLength": memory,
        "threadExecutionWidth": 32,
    }
    return {"file": file, "kernel": kernel, **made}


ONE = row("norm/a.metal", "one_float16", 1024, 0)
TWO = row("norm/a.metal", "two_float16", 832, 512)
THREE = row("matmul/b.metal", "three_float32", 384, 8192)
GONE = {"file": "gone.metal", "kernel": None, "error": "gone.metal does not compile"}
WRONG = {"file": "matmul/b.metal", "kernel": "wrong", "error": "Unable to load kernel wrong"}


def test_every_pipeline_is_listed(planted):
    planted()
    assert timed(pipelines.measured(FILES)) == [ONE, TWO, GONE, THREE, WRONG]


def test_a_metallib_names_the_kernels_of_all_files_once(planted):
    planted("_ext.metal_kernels = lambda file: ['one_float16', 'three_float32']")
    assert timed(pipelines.measured(FILES)) == [ONE, {**THREE, "file": "norm/a.metal"}]


def test_a_crash_hides_no_other_pipeline(planted):
    planted("""
def crash(file, kernel):
    if kernel == "one_float16":
        os.abort()
    return pipeline(file, kernel)
_ext.metal_pipeline = crash
""")
    crashed = {"file": "norm/a.metal", "kernel": "one_float16", "error": "the process was ended by signal 6"}
    assert timed(pipelines.measured(FILES)) == [crashed, TWO, GONE, THREE, WRONG]


def test_a_file_that_crashes_is_left_out(planted):
    planted("_ext.metal_kernels = lambda file: os._exit(3) if 'gone' in file else kernels(file)")
    crashed = {"file": "gone.metal", "kernel": None, "error": "the process was ended by exit status 3"}
    assert timed(pipelines.measured(FILES)) == [ONE, TWO, crashed, THREE, WRONG]


def test_many_crashes_end_it(planted):
    planted("_ext.metal_kernels = lambda file: os._exit(3)")
    *dead, fourth, fifth = pipelines.measured([*FILES, "d.metal", "e.metal"])
    assert [found["file"] for found in dead] == FILES
    assert [fourth["file"], fifth["file"]] == ["d.metal", "e.metal"]
    assert all("left out after 3 processes" in found["error"] for found in (fourth, fifth))


def test_only_the_kernels_that_are_wanted(planted):
    planted()
    assert timed(pipelines.measured(FILES[:1], ["two_float16"])) == [TWO]


SLOW_PROBE = """
import time
_ext.metal_pipeline = lambda file, kernel: time.sleep(0.2) or {"maxTotalThreadsPerThreadgroup": 1024}
"""


@pytest.mark.parametrize("plant", [SLOW_PROBE, "_ext.metal_pipeline = lambda file, kernel: os._exit(3)"])
def test_the_time_of_metals_compiler(planted, monkeypatch, plant):
    planted(plant)
    monkeypatch.setattr(machine, "executor", lambda: "metal")
    found = pipelines.probe()
    assert (found["file"], found["kernel"]) == ("norm/rms_norm.metal", "rms_norm_simd32_float16")
    if plant is SLOW_PROBE:
        assert found["seconds"] >= 0.2
        assert pipelines.told(found) == f"{found['kernel']} took {found['seconds']:.2f} s; less where a cache has it"
    else:
        assert pipelines.told(found) == f"{found['kernel']} does not compile: the process was ended by exit status 3"


def test_the_time_of_clang(monkeypatch, tmp_path):
    monkeypatch.setenv("MLX_MITTENS_CACHE", str(tmp_path))
    monkeypatch.setattr(machine, "executor", lambda: "cuda")
    first, second = pipelines.probe()["seconds"], pipelines.probe()["seconds"]
    assert list(tmp_path.glob("rms_norm_simd32_float16-*.ptx")) and second < first
    monkeypatch.setattr(pipelines.frontend, "ptx", refused)
    assert pipelines.told(pipelines.probe()) == "rms_norm_simd32_float16 does not compile: there is no clang"


def refused(file, kernel):
    raise RuntimeError("there is no clang")


@pytest.fixture
def few_cases(monkeypatch):
    few = [op for op in specs.OPS if op.name == "softmax"]
    from dataclasses import replace

    monkeypatch.setattr(specs, "OPS", tuple(replace(op, tests=op.tests[:1], cases=()) for op in few))
    change = "from dataclasses import replace\nfrom mlx_mittens import specs\n"
    change += "specs.OPS = tuple(replace(op, tests=op.tests[:1], cases=()) for op in specs.OPS)\n"
    monkeypatch.setattr(doctor, "_CHILD", change + doctor._CHILD)


def test_doctor_records_pipelines_and_the_gpu(planted, few_cases, monkeypatch, tmp_path, capsys):
    planted()
    monkeypatch.setattr(doctor, "_has_pipelines", lambda device: True)
    monkeypatch.setattr(pipelines.frontend, "files", lambda: FILES)
    monkeypatch.setattr(machine, "gpu_architecture", lambda: "applegpu_g13s")
    monkeypatch.setattr(gpus, "cores_of_this_mac", lambda: 16)
    file = tmp_path / "doctor.json"
    assert main(["doctor", "--json", str(file)]) == 0, "a kernel that no op launches fails nothing"
    found = json.loads(file.read_text())
    assert timed(found["pipelines"]) == [ONE, TWO, GONE, THREE, WRONG]
    assert (found["gpu_architecture"], found["gpu_cores"]) == ("applegpu_g13s", 16)
    assert found["complete"] and found["running"] is None
    text = capsys.readouterr().out
    assert "pipelines    3 of 5 compiled in 0." in text and "wrong: Unable to load kernel wrong" in text


def test_without_metal_there_is_no_list(few_cases, tmp_path, capsys):
    file = tmp_path / "doctor.json"
    assert main(["doctor", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert "compiling    nothing: native code was compiled with the package" in capsys.readouterr().out
    assert found["compiling"]["executor"] == "native" and "seconds" not in found["compiling"]
    assert "pipelines" not in found and found["gpu_cores"] is None and found["gpu_architecture"] is None


PROFILER = json.dumps({"SPDisplaysDataType": [{"_name": "Apple M1 Pro", "sppci_cores": "16"}]})
REGISTRY = '+-o AGXAcceleratorG13X  <class AGXAcceleratorG13X>\n    {\n      "gpu-core-count" = 14\n    }\n'


def programs_of_a_mac(monkeypatch, folder, texts):
    """Makes this machine a Mac whose programs print these texts, or fail; PATH is cron's."""
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text)
        (folder / name).write_text(f"#!/bin/sh\n{'exec cat ' + str(folder / name) + '.txt' if text else 'exit 1'}\n")
        (folder / name).chmod(0o755)
    run, of_mac = subprocess.run, {f"/usr/sbin/{name}": str(folder / name) for name in texts}
    monkeypatch.setattr(
        subprocess, "run", lambda command, **options: run([of_mac.get(command[0], command[0]), *command[1:]], **options)
    )
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(sys, "platform", "darwin")


@pytest.mark.parametrize(
    ("profiler", "registry", "cores"),
    [
        (PROFILER, REGISTRY, 14),
        (PROFILER, "", 16),
        ("", REGISTRY, 14),
        ("{}", REGISTRY, 14),
        ("not JSON", "", None),
        ("", "", None),
    ],
)
def test_cores_of_the_gpu(monkeypatch, tmp_path, profiler, registry, cores):
    """By the system's own commands. Either may be missing or say nothing."""
    programs_of_a_mac(monkeypatch, tmp_path, {"system_profiler": profiler, "ioreg": registry})
    assert gpus.cores_of_this_mac() == cores


def test_the_processor_of_a_mac(monkeypatch, tmp_path):
    programs_of_a_mac(monkeypatch, tmp_path, {"sysctl": "Apple M1 Pro"})
    assert machine.processor() == "Apple M1 Pro"


# The comparison with Mesa's registers.

mac_registers = scripts.load("mac_registers")

TABLE = """# Registers

| kernel | spills | half registers | threads a core | declared threads |
|---|--:|--:|--:|--:|
| `one_float16` | 0 | 83 | 1024 | 1024 |
| `norm/a.metal:two_float16` | 0 | 143 | 704 | |
| `three_float32` | 12 | 255 | 384 | |
| `never_on_the_mac` | 0 | 50 | 1024 | |

| kernel | half registers | threads a core |
|---|--:|--:|
| `of_another_table` | 1 | 1024 |
"""


def test_the_table_is_read_by_the_names_of_its_columns():
    table = mac_registers.read_table(TABLE)
    assert table == {
        "one_float16": mac_registers.Code(83, 1024, 1024),
        "two_float16": mac_registers.Code(143, 704),
        "three_float32": mac_registers.Code(255, 384),
        "never_on_the_mac": mac_registers.Code(50, 1024),
    }
    refused = "| `three_float32` | not compiled | | | |"
    assert mac_registers.read_table(TABLE.replace("| `three_float32` | 12 | 255 | 384 | |", refused)) == {
        **table,
        "three_float32": None,
    }
    with pytest.raises(ValueError, match="no table with the columns kernel, half registers, threads a core"):
        mac_registers.read_table("| kernel | registers |\n|---|---|\n| `a` | 1 |\n")
    with pytest.raises(ValueError, match="line 7: .*expected numbers"):
        mac_registers.read_table(TABLE.replace("| 255 |", "| many |"))


# Threads on Mesa's side, the declared limit, threads on the Mac; steps of registers that the Mac takes more.
STEPS = [
    (1024, None, 1024, 0),
    (704, None, 832, -2),
    (384, None, 448, -1),
    (1024, None, 896, 1),
    (1024, None, 384, 9),
    (832, 512, 512, None),  # both could run more
    (448, 512, 512, -1),  # the Mac runs all that is declared
    (832, 512, 448, 6),
    (384, 1024, 1024, -9),
]


@pytest.mark.parametrize(("mesa", "declared", "mac", "steps"), STEPS)
def test_steps(mesa, declared, mac, steps):
    assert mac_registers.compare(mac_registers.Code(100, mesa, declared), mac) == steps


def test_registers_of_threads():
    assert [mac_registers.registers_of(n) for n in (1024, 832, 384, 500)] == [
        "1 to 104",
        "113 to 128",
        "233 to 256",
        "",
    ]


def test_the_report(tmp_path, capsys):
    head = {"gpu": "Apple M1 Pro", "gpu_architecture": "applegpu_g13s", "gpu_cores": 16, "system": "macOS-14.5"}
    doctor_file, table = tmp_path / "doctor.json", tmp_path / "agx.md"
    doctor_file.write_text(json.dumps({**head, "pipelines": [ONE, TWO, GONE, THREE, WRONG]}))
    table.write_text(TABLE)
    assert mac_registers.main([str(doctor_file), "--table", str(table)]) == 0
    text = capsys.readouterr().out
    assert "Apple M1 Pro, applegpu_g13s, 16 cores; macOS-14.5." in text
    assert "3 kernels are on both sides, of 5 pipelines and 4 rows." in text
    assert "2 can be compared: 1 take the same step of registers, 1 the same or the next." in text
    assert "The other 1 reach the declared limit on both sides." in text
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert rows == [
        "| `two_float16` | 143 | 113 to 128 | 704 | 832 | -2 | 512 |",
        "| `one_float16` | 83 |  | 1024 | 1024 |  | 0 |",
        "| `three_float32` | 255 | 233 to 256 | 384 | 384 | 0 | 8192 |",
    ]
    assert "Refused: `wrong`: Unable to load kernel wrong" in text
    assert "shares registers out" not in text
    assert "has no code of" not in text


def test_the_report_names_kernels_that_mesa_does_not_compile():
    table = mac_registers.read_table(TABLE.replace("| 12 | 255 | 384 | |", "| not compiled | | | |"))
    found = {"gpu": "", "gpu_architecture": "applegpu_g13g", "gpu_cores": 8, "system": "", "pipelines": [ONE, THREE]}
    text = mac_registers.report(found, table)
    assert "Mesa's compiler has no code of 1: `three_float32`." in text
    assert "1 kernels are on both sides" in text


def test_a_newer_gpu_says_less():
    table = mac_registers.read_table(TABLE)
    found = {"gpu": "Apple M3", "gpu_architecture": "applegpu_g15g", "gpu_cores": 10, "system": "", "pipelines": [ONE]}
    assert "shares registers out" in mac_registers.report(found, table)


@pytest.mark.parametrize(
    ("found", "words"),
    [({}, "mlx-mittens doctor --json"), ({"pipelines": [row("a", "unknown", 1024, 0)]}, "none of its 1 pipelines")],
)
def test_files_that_cannot_be_compared(found, words, tmp_path, capsys):
    (tmp_path / "doctor.json").write_text(json.dumps(found))
    (tmp_path / "agx.md").write_text(TABLE)
    assert mac_registers.main([str(tmp_path / "doctor.json"), "--table", str(tmp_path / "agx.md")]) == 2
    assert words in capsys.readouterr().err
