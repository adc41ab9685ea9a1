"""Run: a command of mlx-lm on these kernels, in this process, with its own arguments and exit status."""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import signal
import socketserver
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from .. import _ext
from ..bench.model_folders import ModelError, mlx_lm_version
from ..patching.patches import patched
from ..patching.target import PatchError
from ..stats import stats
from .options import UsageError, listed

_PREFIX = "mlx_lm."
# Connections that wait until a server takes them. Python's default of 5 has others reset while a model computes.
_QUEUE = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to a parser; arguments after mlx-lm's command go to that command."""
    exact = "as mm.patch(exact=True): several tokens get the bits of one, as far as docs/patching.md says"
    parser.add_argument("--exact", action="store_true", help=exact)
    parser.add_argument("--activations", choices=("int8",), help="as of mm.patch(activations=...), on a CPU or an M5")
    parser.add_argument("--stats", action="store_true", help="at the end print on stderr which kernels ran")
    parser.add_argument(
        "words",
        metavar="mlx_lm.NAME",
        nargs=argparse.PARSER,  # not REMAINDER, which loses a -- at the start
        help="a command of mlx-lm, such as mlx_lm.generate or mlx_lm.server, with its arguments",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; its exit status, unless it ends the process itself.

    Raises:
        UsageError: There is no such command.
    """
    point = _find(*arguments.words)
    if arguments.activations:
        try:
            _ext.check_int8_activations("run")
        except ValueError as error:
            raise UsageError(str(error)) from None
    try:
        with patched(exact=arguments.exact, activations=arguments.activations), _process(list(arguments.words)):
            function = point.load()
            stats(reset=True)
            try:
                return _status(function())
            finally:
                if arguments.stats:
                    sys.stdout.flush()
                    print(stats() or "no kernel ran, and no call went to mx", file=sys.stderr, flush=True)
    except PatchError as error:
        print(f"mlx-mittens run: {error}", file=sys.stderr)
        return 1


def _find(name: str, *given: str) -> importlib.metadata.EntryPoint:
    """The command's entry point; ``mlx_lm`` is one too, whose first argument is the name of another."""
    try:
        version = mlx_lm_version()
    except ModelError as error:
        raise UsageError(str(error)) from None
    points = importlib.metadata.distribution("mlx-lm").entry_points
    found = {point.name: point for point in points if point.group == "console_scripts"}
    asked = name
    if name == _PREFIX[:-1]:
        option = bool(given) and given[0].startswith("-")
        asked = name if option else f"{_PREFIX}{given[0]}" if given else f"{_PREFIX}NAME"
    if name not in found or asked not in found:
        names = sorted(one for one in found if one.startswith(_PREFIX))
        raise UsageError(f"mlx-lm {version} has no command {asked}; {listed(asked, names)}")
    return found[name]


@contextlib.contextmanager
def _process(argv: list[str]) -> Iterator[None]:
    """Prepares the process for the command: its arguments, a SIGTERM that ends it, and room for clients."""
    before, sys.argv = sys.argv, argv
    queue = socketserver.TCPServer.request_queue_size
    socketserver.TCPServer.request_queue_size = max(queue, _QUEUE)
    main = threading.current_thread() is threading.main_thread()
    handler: Callable[..., Any] | int | None = signal.signal(signal.SIGTERM, signal.SIG_DFL) if main else None
    try:
        yield
    finally:
        sys.argv = before
        socketserver.TCPServer.request_queue_size = queue
        if main:
            signal.signal(signal.SIGTERM, handler)


def _status(result: Any) -> int:
    """The exit status that ``sys.exit`` makes of the result, as an installed command does."""
    if result is None or isinstance(result, int):
        return result or 0
    print(result, file=sys.stderr)
    return 1
