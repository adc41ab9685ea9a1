"""Check: what a Mac's compiler would refuse in .metal files, by line and column, on a machine without one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .. import frontend
from ..frontend import CompileError
from ..frontend.check import dialect
from ..frontend.errors import ERROR, UNCOVERED, WARNING, Problem
from .options import UsageError, registered

PASSED, REFUSED, NOT_COVERED = 0, 1, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE.metal", help="files, all of whose kernels are compiled")
    parser.add_argument("-I", dest="include", action="append", default=[], metavar="FOLDER", help="where headers are")
    parser.add_argument(
        "-D", dest="define", action="append", default=[], metavar="NAME[=VALUE]", help="a macro to define"
    )
    parser.add_argument(
        "--std", choices=list(dialect.STANDARDS), default="metal3.1", help="the version of the language (metal3.1)"
    )
    parser.add_argument("--json", action="store_true", help="print the problems of all files as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Checks every file.

    Returns:
        int: 0 if no mistake was found, 1 if one was, 2 if none was but a file has code that the check does not cover.
    """
    if frontend.compiler_problem():
        raise UsageError(frontend.compiler_problem())
    for folder in arguments.include:
        if not Path(folder).is_dir():
            raise UsageError(f"-I: there is no folder {folder}")
    options = dialect.Options(tuple(arguments.include), tuple(arguments.define), arguments.std)
    verdicts, reports = [], []
    for path in arguments.files:
        name = registered(path)
        problems = dialect.check(name, options)
        verdict = _verdict(problems)
        verdicts.append(verdict)
        if arguments.json:
            reports.append(_report(path, name, verdict, problems))
            continue
        for problem in problems:
            print(f"{_place(path, name, problem)}: {problem.severity}: {problem.what}")
        if verdict == PASSED:
            print(f"{path}: {_count(name)}, no mistake that this check knows of")
    if arguments.json:
        print(json.dumps({"files": reports}, indent=2))
    return REFUSED if REFUSED in verdicts else max(verdicts)


def _verdict(problems: list[Problem]) -> int:
    severities = {problem.severity for problem in problems}
    if severities & {ERROR, WARNING}:
        return REFUSED
    return NOT_COVERED if UNCOVERED in severities else PASSED


def _file(path: str, name: str, problem: Problem) -> str:
    return path if problem.file == name else problem.file


def _place(path: str, name: str, problem: Problem) -> str:
    return f"{_file(path, name, problem)}:{problem.line}:{max(problem.column, 1)}"


def _report(path: str, name: str, verdict: int, problems: list[Problem]) -> dict[str, object]:
    listed = [
        {
            "file": _file(path, name, problem),
            "line": problem.line,
            "column": max(problem.column, 1),
            "severity": problem.severity,
            "message": problem.what,
        }
        for problem in problems
    ]
    return {"file": path, "verdict": ("passed", "refused", "not covered")[verdict], "problems": listed}


def _count(name: str) -> str:
    try:
        kernels = len(frontend.variants(name))
    except CompileError:
        return "checked"
    return "1 kernel" if kernels == 1 else f"{kernels} kernels"
