"""Doctor: what is installed, which executors are there, and whether every case is right on this machine."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import platform
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from .. import _ext, calibration, frontend, gpus, simulator, specs
from ..backends import executors, strict
from ..bench import machine
from ..calibration import command_buffers, store
from ..frontend import cache
from ..patching import targets
from ..stats import stats
from . import integer_products, matrix_layout, pipelines
from .bench import op_names, select_device
from .doctor_processes import Child, run_ahead
from .options import add_ops, add_seed, drawn, inputs
from .runs import Ending, JsonFile, each, finish, progress, quiet_steps

# Larger cases repeat the same kernels, and are not worth the wait.
_LARGEST = {"cpu": 2**23, "gpu": 2**27}

# Up to here mx's error, which bounds ours, is taken on the CPU, on a GPU too: in MLX 0.32.4's CUDA build the
# gradient of mx.fast.layer_norm can end the process.
_LARGEST_TWIN_ON_CPU = 2**20

# Larger cases of an op without native code are not simulated.
_LARGEST_SIMULATED = 2**18

# Cases of more elements come after all others: they take the most time, and few find what no smaller one does.
_LARGE = 2**20

# Processes that launch kernels ahead of a quick examination.
_MOST_AHEAD = 4

# Ended processes after which the rest of an op's cases is left out: a process takes seconds to start.
_MOST_DEATHS = 3


@dataclass(frozen=True)
class Finding:
    """One case's outcome."""

    op: str
    case: str
    dtype: str
    passed: bool
    error: float | None
    mx_error: float | None
    detail: str


def _size(case: specs.Case) -> int:
    return math.prod(case.shape)


def _todo(op: specs.Op, device: str, quick: bool = False) -> list[tuple[specs.Case, str]]:
    """The cases of an op that are examined, the largest last, each with the name of a type.

    The quick form takes the cases for tests alone, which reach every kernel, the smallest first.
    """
    found = [*op.checks(), *(case for case in op.cases if not quick and _size(case) <= _LARGEST[device])]
    found.sort(key=lambda case: _size(case) if quick or _size(case) > _LARGE else 0)
    return [(case, dtype) for case in found if case.runs_on(device) for dtype in op.dtypes(case)]


def _was_composed() -> bool:
    """Whether mx's operations have done the work on the CPU, for lack of native code."""
    return any("native composed" in counts["kernels"] for counts in stats().values())


def _reached(op: specs.Op, case: specs.Case, dtype: str, rng: np.random.Generator) -> set[tuple[str, ...]]:
    """The kernels that a case runs, and on a CPU the native code by type and for gradients apart.

    Nothing is known of one that raises, which is the finding when it is examined.
    """
    stats(reset=True)
    try:
        arrays = op.draw(rng, case, specs.DTYPES[dtype])
        mx.eval(specs.run(op, op.ours, case, arrays, op.cotangents(rng, case, specs.DTYPES[dtype])))
    except Exception:
        return set()
    native = (dtype, str(case.vjp))
    return {
        (name, kernel, *(native if kernel.startswith("native") else ()))
        for name, counts in stats().items()
        for kernel in counts["kernels"]
    }


def examine(op: specs.Op, case: specs.Case, dtype: str, rng: np.random.Generator) -> Finding:
    """Runs one case and compares it with float64; whatever is raised is the finding.

    On the CPU an op without native code also runs in the simulator: nothing of it but mx's operations ran before. Where
    it does not, a finding says so.
    """
    problem = ""
    try:
        arrays = op.draw(rng, case, specs.DTYPES[dtype])
        cotangents = op.cotangents(rng, case, specs.DTYPES[dtype])
        twin_device = mx.Device(mx.cpu) if math.prod(case.shape) <= _LARGEST_TWIN_ON_CPU else None
        stats(reset=True)
        check = specs.check(op, case, arrays, cotangents, twin_device)
        if check.passed and _was_composed():
            problem = frontend.compiler_problem()
            if math.prod(case.shape) > _LARGEST_SIMULATED:
                problem = f"cases of more than {_LARGEST_SIMULATED} elements are too large to simulate"
            if not problem:
                with simulator.enabled(gpu=case.gpu):
                    check = specs.check(op, case, arrays, cotangents, twin_device)
    except Exception as exception:  # doctor must report kernels that do not compile or launch
        return Finding(op.name, case.name, dtype, False, None, None, f"{type(exception).__name__}: {exception}")
    detail = check.detail or (problem and f"has no native code, and its kernels did not run: {problem}")
    error, mx_error = (value if math.isfinite(value) else None for value in (check.error, check.twin_error))
    return Finding(op.name, case.name, dtype, check.passed, error, mx_error, detail)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to a parser."""
    add_ops(parser)
    parser.add_argument("--device", choices=("cpu", "gpu"), help="where to run (mx's default device)")
    parser.add_argument("--quick", action="store_true", help="the smallest case for each kernel")
    parser.add_argument("--json", metavar="FILE", help="write what was found to FILE")
    add_seed(parser)


def child() -> None:
    """Examines cases, as its input names them by their op and number, and answers each with a line of JSON.

    In quick mode it answers null for a case that runs the same kernels as one before it.
    """
    device, seed, quick = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "quick"
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of a library is no answer
    select_device(device)
    seen: set[tuple[str, ...]] = set()
    with strict():
        for line in sys.stdin:
            name, number = line.split()
            op = specs.get(name)
            case, dtype = _todo(op, device, quick)[int(number)]
            drawn_inputs = lambda op=op, case=case, dtype=dtype: inputs(seed, op.name, case.name, dtype)
            if quick:
                reached = _reached(op, case, dtype, drawn_inputs())
                if reached and reached <= seen:
                    print("null", file=answers, flush=True)
                    continue
                seen |= reached
            finding = examine(op, case, dtype, drawn_inputs())
            print(json.dumps(asdict(finding)), file=answers, flush=True)


# Code of the child process. It uses the parent's sys.path, so the current folder cannot shadow the package.
_CHILD = "from mlx_mittens.cli.doctor import child; child()"


class _Findings:
    """The findings so far, on stdout by op and in the JSON file by case."""

    def __init__(self, file: JsonFile, head: dict[str, Any], planned: int) -> None:
        self.failed: list[Finding] = []
        self.step: Callable[[str], None] = lambda _: None
        self.notes: list[str] = []  # notes on cases of the current op that passed
        self.count = 0
        self.running: dict[str, str] | None = None
        self.given_up: list[str] = []  # ops whose cases did not all run
        self.pipelines: list[pipelines.Row] | None = None  # where there is Metal
        self._rows: list[str] = []
        self._file, self._head, self.planned = file, head, planned

    def add(self, finding: Finding) -> None:
        self.count += 1
        self.running = None
        self.step(f"{finding.op} {finding.case} {finding.dtype}")
        self._rows.append(json.dumps(asdict(finding)))
        if not finding.passed:
            self.failed.append(finding)
        elif finding.detail:
            self.notes.append(finding.detail)

    def leave_out(self, op: str, case: str, dtype: str) -> None:
        """Notes that a planned case is not examined, since another one has run the same."""
        self.planned -= 1
        self.running = None
        self.step(f"{op} {case} {dtype}")

    def begin(self, op: str, case: str, dtype: str) -> None:
        """Names the case that is about to run, for whatever ends this process or the machine."""
        self.running = {"op": op, "case": case, "dtype": dtype}
        self.save()

    def save(self, ending: Ending | None = None) -> None:
        """Writes the file."""
        passed = ending is not None and ending.complete and not self.failed
        head = {**self._head, "passed": passed, **progress(ending, self.count, self.planned), "running": self.running}
        if self.pipelines is not None:
            head["pipelines"] = self.pipelines
        self._file.write(head, "cases", self._rows, last=ending is not None)


@dataclass(frozen=True)
class _Part:
    """Cases of an op, by their numbers, which are examined one after another."""

    op: specs.Op
    todo: list[tuple[specs.Case, str]]  # all of the op's
    numbers: Sequence[int]
    name: str  # in the output


def _parts(ops: Sequence[specs.Op], device: str, quick: bool) -> list[_Part]:
    """The units of an examination: each op, then the large cases of each."""
    parts: list[_Part] = []
    for is_large in (False, True):
        for op in ops:
            todo = _todo(op, device, quick)
            numbers = [i for i, (case, _) in enumerate(todo) if (_size(case) > _LARGE) == is_large]
            if numbers:
                parts.append(_Part(op, todo, numbers, f"{op.name} large" if is_large else op.name))
    return parts


class _Examiner:
    """Examines parts, each in a process of its own, quickly all in one, and in a new one after a case that ends it."""

    def __init__(self, device: str, seed: int, quick: bool, environment: dict[str, str], findings: _Findings) -> None:
        arguments = [device, str(seed), "quick" if quick else "all"]
        self._start = lambda: Child(_CHILD, arguments, environment)
        self._quick, self._findings = quick, findings
        self._process: Child | None = None
        self._deaths: Counter[str] = Counter()

    def examine(self, part: _Part) -> None:
        """Examines the cases of a part, and prints the findings."""
        findings, op = self._findings, part.op
        before, failed, same = findings.count, len(findings.failed), 0
        try:
            for number in part.numbers:
                case, dtype = part.todo[number]
                if self._deaths[op.name] == _MOST_DEATHS:
                    findings.given_up.append(op.name)
                    break
                findings.begin(op.name, case.name, dtype)
                self._process = self._process or self._start()
                try:
                    answer = self._process.examine(op.name, number)
                    found = Finding(**answer) if answer else None
                except EOFError:
                    found = Finding(op.name, case.name, dtype, False, None, None, self._process.end())
                    self._process, self._deaths[op.name] = None, self._deaths[op.name] + 1
                if found is None:
                    same += 1
                    findings.leave_out(op.name, case.name, dtype)
                else:
                    findings.add(found)
            if not self._quick:
                self.end()
        except BaseException:
            if self._process:
                self._process.kill()
            raise
        finally:
            mine = findings.failed[failed:]
            examined, planned = findings.count - before, len(part.numbers) - same
            unseen = f", {planned - examined} not run" if examined < planned else ""
            others = f" ({same} others run the same kernels)" if same else ""
            if planned:
                print(f"{part.name:12} {examined - len(mine)} of {planned} cases pass{unseen}{others}", flush=True)
            for note in dict.fromkeys(findings.notes):
                print(f"  {note}", flush=True)
            findings.notes.clear()
            for finding in mine:
                print(f"  FAILED {finding.case} {finding.dtype}: {finding.detail}", flush=True)

    def ahead(self, parts: Sequence[_Part], executor: str) -> contextlib.AbstractContextManager[None]:
        """Has NVIDIA's driver compile the kernels of a quick examination in several processes at once."""
        most = min(_MOST_AHEAD, machine.cores() - 1) if self._quick and executor == "cuda" else 0
        return run_ahead([(part.op.name, part.numbers) for part in parts], self._start, most)

    def end(self) -> None:
        """Ends the process, if there is one."""
        if self._process:
            self._process.end()
            self._process = None


def _has_pipelines(device: str) -> bool:
    return device == "gpu" and bool(_ext.metal_built)


def _list_pipelines(findings: _Findings) -> None:
    """Has Metal compile every kernel and keeps its messages; a kernel that no op launches fails nothing."""
    found = findings.pipelines = []
    file = None
    for row in pipelines.measured():
        if row["file"] != file:
            file = row["file"]
            findings.begin("pipelines", file, "")
        found.append(row)
    findings.running = None
    wrong = [row for row in found if "error" in row]
    seconds = sum(row.get("seconds", 0.0) for row in found)
    print(f"{'pipelines':12} {len(found) - len(wrong)} of {len(found)} compiled in {seconds:.1f} s", flush=True)
    for row in wrong:
        print(f"  {row['kernel'] or row['file']}: {row['error']}", flush=True)


def _internals() -> dict[str, str]:
    """Features that rest on private parts of MLX and mlx-lm: ``on``, or the features that are off and why."""
    problem, layers = _ext.mlx_internals_problem(), targets.unknown()
    mlx = f"off ({problem}): key-value caches are copied where MLX copies them" if problem else "on"
    unknown = f"off for {', '.join(layers)}: their code is not the one that is known here; mlx-lm's own runs"
    known = "on" if importlib.util.find_spec("mlx_lm") else 'mlx-lm is not installed: pip install "mlx-mittens[lm]"'
    return {"mlx internals": mlx, "mlx-lm layers": unknown if layers else known}


def _command_buffers(device: str) -> str | None:
    """Limits of Metal's command buffers, and a better setting if `calibrate` found one; None without Metal."""
    current = command_buffers.limits() if device == "gpu" else None
    if current is None:
        return None
    try:
        found = store.read(store.path(device)).command_buffers
    except (calibration.CalibrationError, OSError, RuntimeError):  # another line tells of these
        found = []
    told = command_buffers.advice(current, command_buffers.tried(found))
    return f"{command_buffers.holds(current, os.environ)}; {told}"


def _shared_cache() -> Path:
    """A cache folder for this process and its children, which can be written to, with the contents of the user's."""
    folder = cache.writable_folder()
    try:
        of_user = cache.cache_folder().absolute()
        names = os.listdir(of_user) if folder.absolute() != of_user else []
    except (OSError, RuntimeError):  # there is none
        names = []
    for name in names:
        if not name.startswith("."):  # of files that were being written, and their locks
            with contextlib.suppress(OSError):
                os.symlink(of_user / name, folder / name)
    return folder


def run(arguments: argparse.Namespace) -> int:
    """Examines this machine.

    Returns:
        int: 0 if every case passed, else 1.

    Raises:
        UsageError: The arguments cannot be served.
    """
    names = op_names(arguments.ops)
    file = JsonFile(arguments.json)
    select_device(arguments.device)
    device = machine.device()
    seed = drawn(arguments.seed)
    environment = {**os.environ, "MLX_MITTENS_CACHE": str(_shared_cache()), "MLX_MITTENS_QUIET": "1"}
    if device not in calibration.loaded:  # this process has said why; its children need not
        environment["MLX_MITTENS_CALIBRATION"] = "off"
    versions, found, internals = machine.versions(), executors(), _internals()
    head = {
        "versions": versions,
        "system": platform.platform(),
        "processor": machine.processor(),
        "gpu": machine.gpu(),
        "gpu_architecture": machine.gpu_architecture(),
        "gpu_cores": gpus.cores_of_this_mac(),
        "device": device,
        "executor": machine.executor(),
        "executors": found,
        "internals": internals,
        "calibration": calibration.status(device),
        "command_buffers": _command_buffers(device),
        "mlx_kernels": machine.mlx_kernel_cache(),
        "matrix_units": matrix_layout.told() if _ext.gpu()["matrix_units"] else None,
        "integer_products": integer_products.told() if _ext.gpu()["matrix_units"] else None,
        "quick": arguments.quick,
        "seed": seed,
    }
    print("\n".join(f"{name:12} {version}" for name, version in versions.items()))
    print(f"{'system':12} {head['system']}")
    print(f"{'processor':12} {head['processor']}, {machine.cores()} cores")
    print(f"{'gpu':12} {head['gpu'] or 'none that mx can use'}")
    print(f"{'device':12} {device}, executor {head['executor']}")
    print(f"{'cache':12} {environment['MLX_MITTENS_CACHE']}")
    print("executors")
    for name, status in found.items():
        print(f"  {name:10} {status}")
    for name, status in internals.items():
        print(f"{name:13} {status}")
    print(f"{'calibration':13} {head['calibration']}")
    if head["command_buffers"]:
        print(f"{'buffers':13} command buffers {head['command_buffers']}")
    if head["matrix_units"]:
        print(f"{'matrix units':13} {head['matrix_units']}")
        print(f"{'integers':13} {head['integer_products']}")
    if head["mlx_kernels"]:
        print(f"{'mlx kernels':13} MLX keeps those that it compiles at run time in {head['mlx_kernels']}")
    sys.stdout.flush()
    head["compiling"] = compiling = pipelines.probe()
    print(f"{'compiling':12} {pipelines.told(compiling)}", flush=True)

    parts = _parts([op for op in specs.OPS if op.name in names], device, arguments.quick)
    planned = sum(len(part.numbers) for part in parts)
    findings = _Findings(file, head, planned)
    findings.save()
    where = lambda part: " ".join(findings.running.values()) if findings.running else part.name
    examiner = _Examiner(device, seed, arguments.quick, environment, findings)
    with examiner.ahead(parts, machine.executor()), quiet_steps(planned) as findings.step:
        ending = each(parts, examiner.examine, where)
    if ending.complete:
        examiner.end()
    if ending.complete and arguments.json and not (arguments.ops or arguments.quick) and _has_pipelines(device):
        pipelines_ending = each([None], lambda _: _list_pipelines(findings), lambda _: "pipelines")
        ending = ending if pipelines_ending.complete else pipelines_ending
    if ending.complete and findings.given_up:
        ending = Ending(
            1, f"gave up {', '.join(dict.fromkeys(findings.given_up))} after {_MOST_DEATHS} processes had ended"
        )
    findings.save(ending)
    if not ending.complete:
        print(f"Incomplete: {findings.count} of {findings.planned} cases examined.")
    if findings.failed:
        print(f"{len(findings.failed)} cases failed (seed {seed}).")
    elif ending.complete:
        print("All is well.")
    return finish("doctor", ending, file, passed=not findings.failed)
