"""The command line: ``mlx-mittens`` and one of the commands in `_GROUPS`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from .. import __version__, specs
from . import (
    agx_compiler,
    bench,
    cache,
    calibrate,
    check,
    completion,
    doctor,
    new,
    registers,
    run,
    simulate,
    validate,
    warm,
)
from .options import UsageError
from .parser import Parser
from .runs import Terminated, exit_status, terminated

_GROUPS = {
    "This machine": {
        "doctor": (doctor, "say what is installed and check every case on this machine"),
        "bench": (bench, "time each op beside its mx twin and check both against float64"),
        "cache": (cache, "say what is kept on disk, or delete it"),
        "calibrate": (calibrate, "time ours and mx here, and keep what is faster for each call"),
    },
    "Models of mlx-lm": {
        "run": (run, "run a command of mlx-lm on these kernels, such as mlx_lm.server"),
        "validate": (validate, "compare a model's tokens and logits with mx's, and with float32"),
        "warm": (warm, "compile what a model will use ahead of its first token"),
    },
    "Metal kernels, without a Mac": {
        "check": (check, "say what a Mac's compiler would refuse in a .metal file"),
        "simulate": (simulate, "run a case of an op in the simulator and count its work"),
        "registers": (registers, "say what kernels take of an Apple GPU: registers, spills, loops"),
        "new": (new, "write the files of a new op into a clone of the repository"),
        "agx-compiler": (agx_compiler, "build Mesa's compiler for Apple GPUs, or say where it is"),
    },
}
_COMMANDS = {name: command for group in _GROUPS.values() for name, command in group.items()}
_FIRST_STEPS = ("mlx-mittens doctor", "mlx-mittens bench --quick", "mlx-mittens simulate softmax")


def overview() -> str:
    """What ``mlx-mittens`` alone prints: all commands, and which to begin with."""
    lines = [f"mlx-mittens {__version__}: Metal kernels for MLX, beside mx's own."]
    for title, commands in _GROUPS.items():
        lines += ["", title, *(f"  {name:14}{summary}" for name, (_, summary) in commands.items())]
    lines += ["", "To begin with", *(f"  {line}" for line in _FIRST_STEPS)]
    return "\n".join([*lines, "", "mlx-mittens COMMAND --help shows what a command takes."])


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


class _Overview(Parser):
    """The parser of the command itself, whose help is the overview."""

    def format_help(self) -> str:
        return f"{overview()}\n"


def parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser of the command line, and those of its commands."""
    top = _Overview(prog="mlx-mittens")
    top.add_argument("--version", action="version", version=f"mlx-mittens {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    parsers = {}
    for name, (module, summary) in _COMMANDS.items():
        about = (module.__doc__ or summary).splitlines()[0]
        parsers[name] = commands.add_parser(name, help=summary, description=about)
        module.add_arguments(parsers[name])
    return top, parsers


def _run(argv: Sequence[str] | None) -> int:
    top, parsers = parser()
    completion.answer(top)
    arguments, unknown = top.parse_known_args(argv)
    if unknown:
        parsers.get(arguments.command, top).refuse(unknown, [op.name for op in specs.OPS])
    if arguments.command is None:
        print(overview())
        return 0
    try:
        return _COMMANDS[arguments.command][0].run(arguments)
    except UsageError as error:
        print(f"mlx-mittens {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print("terminated" if isinstance(interrupt, Terminated) else "interrupted", file=sys.stderr)
        return exit_status(interrupt)
