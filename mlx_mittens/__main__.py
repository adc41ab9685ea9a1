"""The command line: ``mlx-mittens bench``, ``check``, ``doctor`` and ``simulate``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from . import __version__, bench, check, doctor, simulate
from .usage import UsageError

_COMMANDS = {
    "bench": (bench, "time each op beside its mx twin and check both against float64"),
    "check": (check, "say what a Mac's compiler would refuse in a .metal file"),
    "doctor": (doctor, "say what is installed and check every case on this machine"),
    "simulate": (simulate, "run a case of an op in the simulator and count what its kernels do"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; the exit status is its result, or 2 for arguments that cannot be served."""
    parser = argparse.ArgumentParser(prog="mlx-mittens", description="Metal kernels for MLX, beside mx's own.")
    parser.add_argument("--version", action="version", version=f"mlx-mittens {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in _COMMANDS.items():
        module.add_arguments(commands.add_parser(name, help=summary, description=module.__doc__.splitlines()[0]))
    arguments = parser.parse_args(argv)
    try:
        return _COMMANDS[arguments.command][0].run(arguments)
    except UsageError as error:
        print(f"mlx-mittens {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
