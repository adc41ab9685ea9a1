r"""The mutation run: faults planted in our kernels, one at a time, and whether tests in the simulator see them.

    PYTHONPATH=tests python -m verification.mutate \
        [--count N] [--seed S] [--files A,B] [--jobs J] [--log FILE] [--write]

A mutant differs from the kernels in one place: a barrier is dropped, an index shifted, a stride, a comparison or a
constant changed. Cases of the ops that run the changed text come first, then the suite's own tests of these ops in the
simulator. The mutant is killed if one fails: by a fault, a wrong result, or a kernel that never ends. Mutants that do
not compile do not count. Survivors are listed, with the reason where one is known. With a log, an interrupted run can
be resumed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from helpers.support import child_environment

ROOT = Path(__file__).resolve().parents[2]
METAL = ROOT / "metal"
TESTS = ROOT / "tests"
RESULT = ROOT / "bench" / "results" / "mutation.md"
EXPLANATIONS = Path(__file__).with_name("mutants_explained.json")
KINDS = ("barrier", "index", "stride", "comparison", "constant")
STEP_LIMIT = 20_000_000
SECONDS = 300


@dataclass(frozen=True)
class Scope:
    """The runs on each mutant: element types, one after the other, and cases up to a number of elements."""

    dtypes: tuple[str, ...] = ("float16", "float32", "bfloat16")
    elements: int = 400_000
    suite: bool = True  # whether survivors meet the suite's tests


@dataclass(frozen=True)
class Mutant:
    """One change of one line."""

    kind: str
    file: str  # below metal/
    line: int  # from 1
    before: str
    after: str

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}"


# Where nothing is mutated: code that is not executed, and arrays' sizes, which may be larger without harm.
_NO_CODE = re.compile(r"^\s*(//|#|template|instantiate|using|struct|static_assert|namespace)|\[\[|operator")
_DECLARATION = re.compile(r"^\s*(?:const |threadgroup |thread )*[\w:]+(?:<[^;=]*>)? \w+\[")
_SIZE = r"(?:columns|rows|splits|threads|simdgroups|chunks|packs\w*|stride\w*|shape\w*|N|L|R|32)"
_COMPARISONS = {
    **{" < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > "},
    **{" == ": " != ", " != ": " == ", " && ": " || "},
}


def _changes(line: str):
    """Every change of a line, as (kind, start, end, new text)."""
    code = line.split("//")[0]
    for match in re.finditer(r"\b(threadgroup|simdgroup)_barrier\([^;]*\);", code):
        yield "barrier", *match.span(), ""
    if not _DECLARATION.match(code):
        for match in re.finditer(r"(?<=\w)\[([^\[\]]+)\]", code):
            yield "index", *match.span(), f"[{match[1]} + 1]"
    for match in re.finditer(rf" \* ((?:[\w.]+\.)?{_SIZE})\b(?![\w(.\[])", code):
        yield "stride", *match.span(), f" * ({match[1]} + 1)"
    for match in re.finditer(r"(\w+) \+= ([\w.]+)\) \{", code):
        yield "stride", *match.span(), f"{match[1]} += {match[2]} + 1) {{"
    for old, new in _COMPARISONS.items():
        for match in re.finditer(re.escape(old), code):
            yield "comparison", *match.span(), new
    for match in re.finditer(r"(?<![\w.<])(\d+)(\.\d*)?(f?)\b(?![.\w>])", code):
        if _DECLARATION.match(code) and "[" in code[: match.start()] and "=" not in code[: match.start()]:
            continue
        yield "constant", *match.span(), f"{int(match[1]) + 1}{match[2] or ''}{match[3]}"
    for match in re.finditer(r"-?\bINFINITY\b", code):
        yield "constant", *match.span(), "0.0f"


def mutants() -> list[Mutant]:
    """All that can be made, in the order of the files."""
    found = []
    for path in sorted(
        path for path in METAL.rglob("*") if path.suffix in (".metal", ".h") and path.parent.name != "params"
    ):
        if path.name == "instantiate.h":
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if _NO_CODE.search(line):
                continue
            for kind, start, end, new in _changes(line):
                after = line[:start] + new + line[end:]
                found.append(Mutant(kind, str(path.relative_to(METAL)), number, line.strip(), after.strip()))
    return found


def sample(count: int, seed: int, files: Iterable[str] = ()) -> list[Mutant]:
    """A choice in which every kind has its share; of a kind that is rare, all. Only in `files`, if any are named."""
    generator = random.Random(seed)
    known = [m for m in mutants() if not files or m.file in files]
    by_kind = {kind: [m for m in known if m.kind == kind] for kind in KINDS}
    chosen: list[Mutant] = []
    for left, kind in zip(range(len(KINDS), 0, -1), sorted(KINDS, key=lambda kind: len(by_kind[kind]))):
        share = min(len(by_kind[kind]), (count - len(chosen)) // left)
        chosen += generator.sample(by_kind[kind], share)
    return chosen


# Tests of an op that are not named as it is.
_TESTS = {
    "scaled_dot_product_attention": "test_attention",
    "quantized_scaled_dot_product_attention": "test_quantized_attention",
    **{f"block_{what}": "test_gguf" for what in ("matmul", "quantize", "dequantize")},
}

# One mutant, in a process of its own.


def _write(mutant: Mutant | None, dtype: str | None, original: Path, folder: Path) -> None:
    """A copy of the kernels with the mutant in it, and with the variants of one dtype alone, if one is named."""
    shutil.copytree(original, folder, dirs_exist_ok=True)
    if dtype:
        types = {"float32": "float", "float16": "half", "bfloat16": "bfloat"}
        header = folder / "mittens" / "instantiate.h"
        text = header.read_text()
        kept = f'instantiate_kernel(name "_{dtype}", function, {types[dtype]}, __VA_ARGS__)'
        before = text[: text.index("#define instantiate_types")]
        header.write_text(f"{before}#define instantiate_types(name, function, ...) {kept}\n")
    if mutant:
        path = folder / mutant.file
        lines = path.read_text().splitlines()
        lines[mutant.line - 1] = mutant.after
        path.write_text("\n".join(lines) + "\n")


def _probes(op, case, dtype, rng):
    """Arguments of a case: drawn, in views, without weights, and for softmax with rows and places of -inf."""
    import math

    import mlx.core as mx
    from helpers.support import absences

    drawn = op.draw(rng, case, dtype)
    # One element off a boundary, and such that in softmax no element outweighs the others.
    yield [_one_off(a) for a in drawn]
    if math.prod(case.shape) > 100_000:
        return
    yield drawn
    if math.prod(case.shape) > 5000:
        return
    yield from absences(op, drawn, case)[1:]
    if not case.vjp:
        yield [a if a is None else mx.concatenate([a, a], axis=-1)[..., : a.shape[-1]] for a in drawn]
        yield [a if a is None else mx.repeat(a, 2, axis=-1)[..., ::2] for a in drawn]
    if op.name == "softmax" and not case.vjp and len(case.shape) == 2 and not case.options:
        masked = drawn[0] + mx.where(mx.arange(case.shape[1]) % 3 == 1, -math.inf, 0).astype(dtype)
        yield [mx.concatenate([mx.full((1, case.shape[1]), -math.inf, dtype), masked[1:]])]


def _one_off(a):
    import mlx.core as mx

    if a is None:
        return a
    flat = a.reshape(-1) / 16 if mx.issubdtype(a.dtype, mx.floating) else a.reshape(-1)
    return mx.concatenate([mx.zeros((1,), a.dtype), flat])[1:].reshape(a.shape)


def _uses(file: str) -> set[str]:
    """The .metal files that hold a text."""
    from mlx_mittens import frontend

    return {name for name in frontend.files() if name == file or f'#line 1 "{file}"' in frontend.flatten(name)}


class _FirstFailure:
    """A pytest plugin."""

    test = ""

    def pytest_runtest_logreport(self, report):
        self.test = self.test or (report.nodeid if report.failed else "")


def _failing_test(ops: set[str], tiles: bool) -> str:
    """The first test in the simulator that fails, among the tests of these ops and of the tile library."""
    import pytest

    from mlx_mittens import _ext, specs

    _ext.simulator_record(False)
    _ext.simulator_configure(False)
    os.environ["MLX_MITTENS_TEST_SEED"] = "1"
    files = {f"{_TESTS.get(op, 'test_' + op)}.py" for op in ops} | ({"test_tiles.py"} if tiles else set())
    if ops & {op.name for op in specs.ROW_OPS}:
        files.add("test_long_rows.py")
    if ops & {"scaled_dot_product_attention", "cascade_attention", "paged_attention"}:
        files.add("test_attention_combine.py")
    if ops & {"quantized_matmul", "quantized_swiglu"}:
        files.add("test_mma_row.py")
    first = _FirstFailure()
    paths = [str(next(TESTS.rglob(file))) for file in sorted(files)]
    chosen = "simulator or test_tiles or test_attention_combine or test_mma_row"
    with contextlib.redirect_stdout(io.StringIO()):
        pytest.main([*paths, "-x", "-q", "-n0", "-p", "no:cacheprovider", "-k", chosen], [first])
    return first.test


def judge(mutant: Mutant | None, scope: Scope, shared: Path, folder: Path) -> tuple[str, str]:
    """Runs the quick tests on a mutant.

    Args:
        mutant: None for the kernels themselves.
        shared: A folder with the kernels in ``metal``; without a mutant it receives ``plan.json``, which says which
            .metal files each case runs.
        folder: Where the mutant's kernels are put.

    Returns:
        tuple[str, str]: ``killed``, ``survived`` or ``stillborn`` (it does not compile), and how.
    """
    import mlx.core as mx
    import numpy as np

    from mlx_mittens import _ext, frontend, specs
    from mlx_mittens.frontend.read import sources

    mx.set_default_device(mx.cpu)
    rng = np.random.default_rng(0)
    _ext.simulator_record(True)
    sources.metal_folder = lambda: folder
    plan = shared / "plan.json"
    planned = json.loads(plan.read_text()) if mutant else {}
    for dtype in scope.dtypes:
        _write(mutant, dtype, shared / "metal", folder)
        changed = _uses(mutant.file) if mutant else set()
        try:
            for file in changed:
                frontend.simulator_library(file)
        except frontend.CompileError as error:
            return "stillborn", str(error).splitlines()[1]
        todo = [(op, case) for op in specs.OPS for case in op.checks()]
        if dtype == "float32":  # so long that every loop over a row's parts goes round twice
            todo += [(op, specs.Case("long", (1, 270001), vjp=vjp)) for op in specs.ROW_OPS for vjp in (False, True)]
        for op, case in sorted(todo, key=lambda item: np.prod(item[1].shape)):
            name = f"{op.name} {case.name} {dtype}"
            if np.prod(case.shape) > scope.elements:
                continue
            if mutant and not changed & set(planned.get(name, changed)):
                continue
            cotangents = op.cotangents(rng, case, specs.DTYPES[dtype])
            for arrays in _probes(op, case, specs.DTYPES[dtype], rng):
                _ext.simulator_configure(True, int(rng.integers(1, 1000)), True, STEP_LIMIT, case.gpu)
                try:
                    check = specs.check(op, case, arrays, cotangents)
                except RuntimeError as error:
                    return "killed", f"{name}: {error}"
                if not check.passed:
                    return "killed", f"{name}: {check.detail}"
            if mutant is None:
                planned[name] = sorted({run["file"] for run in _ext.simulator_record(True)})
    if mutant is None:
        plan.write_text(json.dumps(planned))
        return "survived", ""
    if scope.suite and key(mutant) not in explanations():
        _write(mutant, None, shared / "metal", folder)
        ops = {name.split()[0] for name, files in planned.items() if changed & set(files)}
        if test := _failing_test(ops, mutant.file.startswith("mittens/")):
            return "killed", test
    return "survived", ""


def run_one(mutant: Mutant | None, scope: Scope, shared: Path) -> tuple[str, str]:
    """As `judge`, in a process of its own: a mutant may also crash or never end."""
    environment = {**child_environment(), "MLX_MITTENS_CACHE": str(shared / "cache")}
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps(asdict(mutant) if mutant else None)
        command = [sys.executable, __file__, "--judge", text, "--scope", json.dumps(asdict(scope))]
        command += ["--folder", folder, "--shared", str(shared)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
        except subprocess.TimeoutExpired:
            return "killed", f"runs for more than {SECONDS} s"
        if done.returncode < 0:
            return "killed", f"the process ends by signal {-done.returncode}"
        if done.returncode:
            raise RuntimeError(f"{mutant}: {done.stderr}")
        return tuple(json.loads(done.stdout.splitlines()[-1]))


def explanations() -> dict[str, str]:
    """Why mutants survive, by file, changed line and what became of it: they are no faults, or "Not reached: ..."."""
    return json.loads(EXPLANATIONS.read_text()) if EXPLANATIONS.is_file() else {}


def key(mutant: Mutant) -> str:
    return f"{mutant.file}: {mutant.before} -> {mutant.after}"


def run(
    chosen: list[Mutant], jobs: int, scope: Scope = Scope(), log: Path | None = None
) -> list[tuple[Mutant, str, str]]:
    """Judges mutants; their fates in order. Fates that the log has are taken from there, the others added to it."""
    from helpers.log import add, entries

    known = {}
    if log:
        for mutant, fate, what in entries(log):
            known[Mutant(**mutant)] = fate, what
    with tempfile.TemporaryDirectory() as folder:
        shared = Path(folder)
        shutil.copytree(METAL, shared / "metal")
        sound = run_one(None, scope, shared)
        if sound[0] != "survived":
            raise RuntimeError(f"the kernels themselves do not pass: {sound[1]}")

        def one(mutant: Mutant) -> tuple[Mutant, str, str]:
            if mutant in known:
                return mutant, *known[mutant]
            fate, what = run_one(mutant, scope, shared)
            if log:
                add(log, [asdict(mutant), fate, what])
            return mutant, fate, what

        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(one, chosen))


def report(fates: list[tuple[Mutant, str, str]], seed: int) -> str:
    """The result as Markdown."""
    reasons = explanations()
    counted = [(m, fate) for m, fate, _ in fates if fate != "stillborn"]
    survivors = [m for m, fate in counted if fate == "survived"]
    harmless = [m for m in survivors if key(m) in reasons and not reasons[key(m)].startswith("Not reached")]
    faults = len(survivors) - len(harmless)
    killed = len(counted) - len(survivors)
    lines = [
        "# Mutation run",
        "",
        f"`PYTHONPATH=tests python -m verification.mutate --count {len(fates)} --seed {seed} --write`:",
        f"{len(fates)} of {len(mutants())} possible mutants, {len(fates) - len(counted)} of which do not compile.",
        "",
        f"Of {len(counted)} mutants {killed} are killed: {killed / len(counted):.1%}.",
        f"Of the {len(survivors)} survivors {len(harmless)} are no faults, for the reasons below.",
        f"Of the other {killed + faults} mutants {killed / max(1, killed + faults):.1%} are killed.",
        "",
        "| kind | mutants | killed | survivors that are no faults | others |",
        "|---|--:|--:|--:|--:|",
    ]
    for kind in KINDS:
        here = [(m, fate) for m, fate in counted if m.kind == kind]
        killed = sum(fate == "killed" for _, fate in here)
        sound = sum(m.kind == kind for m in harmless)
        lines.append(f"| {kind} | {len(here)} | {killed} | {sound} | {len(here) - killed - sound} |")
    lines += ["", "## Survivors", ""]
    for m in survivors:
        lines += [
            f"- `{m.place}` ({m.kind}) `{m.before}` -> `{m.after}`",
            f"  {reasons.get(key(m), '**not explained**')}",
        ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=240)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--files", metavar="A,B", default="", help="only these, below metal/, comma separated (all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--log", type=Path, help="where results are kept while it runs")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    parser.add_argument("--scope", help=argparse.SUPPRESS)
    parser.add_argument("--judge", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--shared", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.judge:
        given = json.loads(arguments.judge)
        mutant, scope = Mutant(**given) if given else None, Scope(**json.loads(arguments.scope))
        print(json.dumps(judge(mutant, scope, arguments.shared, arguments.folder)))
        return 0
    files = [name for name in arguments.files.split(",") if name]
    fates = run(sample(arguments.count, arguments.seed, files), arguments.jobs, log=arguments.log)
    text = report(fates, arguments.seed)
    print(text)
    if arguments.write:
        RESULT.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
