"""The command line: ``mlx-mittens`` and one of the commands in `_GROUPS`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Collection, Sequence
from importlib import import_module
from types import ModuleType

from .. import __version__
from . import completion
from .options import UsageError
from .parser import Parser
from .runs import Terminated, exit_status, terminated

# A command's module has its name, and is imported where the command is meant.
_GROUPS = {
    "This machine": {
        "doctor": "say what is installed and check every case on this machine",
        "bench": "time each op beside its mx twin and check both against float64",
        "cache": "say what is kept on disk, or delete it",
        "calibrate": "time ours and mx here, and keep what is faster for each call",
    },
    "Models of mlx-lm": {
        "run": "run a command of mlx-lm on these kernels, such as mlx_lm.server",
        "validate": "compare a model's tokens and logits with mx's, and with float32",
        "warm": "compile what a model will use ahead of its first token",
    },
    "Metal kernels, without a Mac": {
        "check": "say what a Mac's compiler would refuse in a .metal file",
        "simulate": "run a case of an op in the simulator and count its work",
        "registers": "say what kernels take of an Apple GPU: registers, spills, loops",
        "new": "write the files of a new op into a clone of the repository",
        "agx-compiler": "build Mesa's compiler for Apple GPUs, or say where it is",
    },
}
_COMMANDS = {name: summary for group in _GROUPS.values() for name, summary in group.items()}
_FIRST_STEPS = ("mlx-mittens doctor", "mlx-mittens bench --quick", "mlx-mittens simulate softmax")


def overview() -> str:
    """The output of ``mlx-mittens`` alone: all commands, and which to begin with."""
    lines = [f"mlx-mittens {__version__}: Metal kernels for MLX, beside mx's own."]
    for title, commands in _GROUPS.items():
        lines += ["", title, *(f"  {name:14}{summary}" for name, summary in commands.items())]
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
        for stream in (sys.stdout, sys.stderr):  # Python writes their buffers when it ends
            os.dup2(nowhere, stream.fileno())
        return 128 + signal.SIGPIPE


class _Overview(Parser):
    """The parser of the command itself, whose help is the overview."""

    def format_help(self) -> str:
        return f"{overview()}\n"


def _module(command: str) -> ModuleType:
    return import_module(f"{__package__}.{command.replace('-', '_')}")


def _meant(argv: Sequence[str] | None) -> list[str]:
    return [word for word in (sys.argv[1:] if argv is None else argv) if word in _COMMANDS]


def import_commands(argv: Sequence[str] | None = None) -> None:
    """Imports the modules of the commands that are named, and with them the parts of the package that they use."""
    for command in _meant(argv):
        _module(command)


def parser(meant: Collection[str] = tuple(_COMMANDS)) -> tuple[Parser, dict[str, Parser]]:
    """The parser of the command line, and its commands' parsers.

    Args:
        meant: The commands whose arguments the parsers take.
    """
    top = _Overview(prog="mlx-mittens")
    top.add_argument("--version", action="version", version=f"mlx-mittens {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    parsers = {}
    for name, summary in _COMMANDS.items():
        parsers[name] = commands.add_parser(name, help=summary)
        if name in meant:
            module = _module(name)
            parsers[name].description = (module.__doc__ or summary).splitlines()[0]
            module.add_arguments(parsers[name])
    return top, parsers


def _run(argv: Sequence[str] | None) -> int:
    if completion.is_asked():
        completion.answer(parser()[0])
    top, parsers = parser(_meant(argv))
    arguments, unknown = top.parse_known_args(argv)
    if unknown:
        from .. import specs

        parsers.get(arguments.command, top).refuse(unknown, [op.name for op in specs.OPS])
    if arguments.command is None:
        print(overview())
        return 0
    try:
        return int(_module(arguments.command).run(arguments))
    except UsageError as error:
        print(f"mlx-mittens {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as interrupt:
        print("terminated" if isinstance(interrupt, Terminated) else "interrupted", file=sys.stderr)
        return exit_status(interrupt)
