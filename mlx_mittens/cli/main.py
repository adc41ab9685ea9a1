"""The command line: ``mlx-mittens`` and one of the commands in `_COMMANDS`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from .. import __version__
from . import agx_compiler, bench, calibrate, check, doctor, new, registers, run, simulate, validate, warm
from .options import UsageError
from .runs import Terminated, exit_status, terminated

_COMMANDS = {
    "agx-compiler": (agx_compiler, "build Mesa's compiler for Apple GPUs, or say where it is"),
    "bench": (bench, "time each op beside its mx twin and check both against float64"),
    "calibrate": (calibrate, "time ours and mx on this machine, and keep what is faster for ops and the patch"),
    "check": (check, "say what a Mac's compiler would refuse in a .metal file"),
    "doctor": (doctor, "say what is installed and check every case on this machine"),
    "new": (new, "write the files of a new op into a clone of the repository"),
    "registers": (registers, "say what kernels take of an Apple GPU: registers, spills, instructions"),
    "run": (run, "run a command of mlx-lm on these kernels, such as mlx_lm.server"),
    "simulate": (simulate, "run a case of an op in the simulator and count what its kernels do"),
    "validate": (validate, "compare a model's tokens and logits with mx's, and both with float32"),
    "warm": (warm, "compile what a model will use, so that its first token does not wait"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; the exit status is its result, or 2 for arguments that cannot be served."""
    try:
        try:
            with terminated():
                return _run(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # as in `mlx-mittens doctor | head`
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):  # what they still hold is written when Python ends
            os.dup2(nowhere, stream.fileno())
        return 128 + signal.SIGPIPE


def _run(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="mlx-mittens", description="Metal kernels for MLX, beside mx's own.")
    parser.add_argument("--version", action="version", version=f"mlx-mittens {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in _COMMANDS.items():
        about = (module.__doc__ or summary).splitlines()[0]
        module.add_arguments(commands.add_parser(name, help=summary, description=about))
    arguments = parser.parse_args(argv)
    try:
        return _COMMANDS[arguments.command][0].run(arguments)
    except UsageError as error:
        print(f"mlx-mittens {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print("terminated" if isinstance(interrupt, Terminated) else "interrupted", file=sys.stderr)
        return exit_status(interrupt)
