"""Agx-compiler: where Mesa's compiler for Apple GPUs is; it is built where there is none."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from ..apple import agx_compiler


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="build it again, though there is one")
    parser.add_argument("--source", type=Path, metavar="FILE", help="Mesa's source, such as mesa-25.0.7.tar.xz")


def run(arguments: argparse.Namespace) -> int:
    """Prints the path of the compiler; 0, or 1 where it cannot be built."""
    chosen = os.environ.get(agx_compiler.VARIABLE)
    if chosen and not arguments.force:
        if problem := agx_compiler.problem():
            print(problem, file=sys.stderr)
            return 1
        print(agx_compiler.find())
        return 0
    start = time.monotonic()

    def report(step: str) -> None:
        print(f"{time.monotonic() - start:4.0f} s  {step}", file=sys.stderr, flush=True)

    try:
        print(agx_compiler.build(arguments.force, report, arguments.source))
    except agx_compiler.BuildError as error:
        print(f"mlx-mittens agx-compiler: {error}", file=sys.stderr)
        return 1
    return 0
