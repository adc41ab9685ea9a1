"""Check: what a Mac's compiler would refuse in .metal files, by line, on a machine without one."""

from __future__ import annotations

import argparse

from .. import frontend
from ..frontend import CompileError, dialect
from .options import UsageError, registered


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", metavar="FILE.metal", help="files, all of whose kernels are compiled")


def run(arguments: argparse.Namespace) -> int:
    """Checks every file; 0 if nothing was found, else 1."""
    if frontend.compiler_problem():
        raise UsageError(frontend.compiler_problem())
    found = 0
    for path in arguments.files:
        name = registered(path)
        problems = dialect.check(name)
        for problem in problems:
            print(f"{path if problem.file == name else problem.file}:{problem.line}: {problem.what}")
        if not problems:
            print(f"{path}: {_count(name)}, nothing that a Mac's compiler would refuse")
        found += len(problems)
    return 1 if found else 0


def _count(name: str) -> str:
    try:
        kernels = len(frontend.variants(name))
    except CompileError:
        kernels = 0
    return "1 kernel" if kernels == 1 else f"{kernels} kernels"
