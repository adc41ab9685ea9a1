"""Runs that may end early, by a person, by a time limit or by a failure: measurements until then are kept."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from .options import UsageError, writable

T = TypeVar("T")

# Seconds that need no forecast.
_SHORT = 5.0


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a command as Ctrl-C does."""


def exit_status(interrupt: KeyboardInterrupt) -> int:
    """Exit status that a shell gives for a process that the signal ended."""
    return 128 + (signal.SIGTERM if isinstance(interrupt, Terminated) else signal.SIGINT)


# Whether SIGTERM arrived. A C++ callback may swallow the exception or turn it into another.
_received = False


@contextlib.contextmanager
def terminated() -> Iterator[None]:
    """SIGTERM raises `Terminated` in the main thread, once: `timeout` sends it to the process and then to its group."""
    global _received
    _received = False
    if threading.current_thread() is not threading.main_thread():
        yield  # Python lets no other thread choose a handler
        return

    def handle(*_: object) -> None:
        global _received
        _received = True
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        if not _received:  # After a SIGTERM keep ignoring it: the process is exiting, and `timeout` sends a second one.
            signal.signal(signal.SIGTERM, before)


@dataclass(frozen=True)
class Ending:
    """How a run ended.

    Attributes:
        status: The exit status: 0 if it was done to the end, 1 if something failed, 130 for Ctrl-C, 143 for SIGTERM.
        reason: Why it was not done to the end, and where.
    """

    status: int = 0
    reason: str | None = None

    @property
    def complete(self) -> bool:
        return self.reason is None


def each(
    todo: Sequence[T],
    do: Callable[[T], None],
    name: Callable[[T], str],
    minutes: float | None = None,
    since: float | None = None,
) -> Ending:
    """Does each in turn, one at least, up to the first that fails or is interrupted; the reason names that one.

    Args:
        todo: The items, one at least.
        do: A function that takes each.
        name: The name of one.
        minutes: Time after which no item is begun, which is no failure.
        since: Their beginning, by ``time.monotonic``; now without it.
    """
    interrupt: KeyboardInterrupt
    item = todo[0]
    end = math.inf if minutes is None else (time.monotonic() if since is None else since) + 60 * minutes
    try:
        for number, item in enumerate(todo):
            if number and time.monotonic() > end:
                return Ending(0, f"the time limit of {minutes:g} minutes came before {name(item)}")
            do(item)
            if _received:
                raise Terminated
        return Ending()
    except KeyboardInterrupt as error:
        interrupt = error
    except BrokenPipeError:  # nobody reads the command's output: not this item's failure
        raise
    except Exception as error:
        if not _received:
            return Ending(1, f"{name(item)}: {type(error).__name__}: {error}")
        interrupt = Terminated()
    word = "terminated" if isinstance(interrupt, Terminated) else "interrupted"
    return Ending(exit_status(interrupt), f"{word} in {name(item)}")


class JsonFile:
    """The file of ``--json``, which is whole and valid whenever it is read, and whatever ends the process.

    In a folder that cannot be written to, a file is written in place, and whole only between writes. A write that
    fails, as on a full disk, is kept for the end as ``problem``: it does not stop the measurements.
    """

    def __init__(self, path: str | None) -> None:
        """
        Raises:
            UsageError: It cannot be written.
        """
        writable("--json", path)
        self.problem: str | None = None
        self._path = path
        self._file = path is not None and (os.path.isfile(path) or not os.path.exists(path))
        self._replaced = False
        if path is not None and self._file:
            self._path = os.path.realpath(path)  # not of a pipe in /dev/fd, which has no path that can be opened
            self._replaced = os.access(os.path.dirname(self._path), os.W_OK)
            if not self._replaced and not os.path.exists(path):
                folder = os.path.dirname(self._path)
                raise UsageError(f"--json: cannot write {path}: choose another file, or make {folder} writable")

    def write(self, head: dict[str, Any], key: str, rows: Sequence[str], last: bool = False) -> None:
        """Writes an object: its head, and under a key rows that are JSON already.

        A pipe, or another path that is no file, gets the ``last`` one alone.
        """
        if self._path is None or not (last or self._file):
            return
        listed = "[\n  " + ",\n  ".join(rows) + "\n ]" if rows else "[]"
        text = f"{json.dumps(head, indent=1)[:-2]},\n {json.dumps(key)}: {listed}\n}}\n"
        temporary = f"{self._path}.{os.getpid()}.tmp" if self._replaced else self._path
        try:
            with open(temporary, "w") as file:
                file.write(text)
                if self._file:
                    file.flush()
                    os.fsync(file.fileno())
            if self._replaced:
                os.replace(temporary, self._path)
            self.problem = None
        except OSError as error:
            self.problem = f"--json: cannot write {self._path}: {error.strerror}"
        finally:
            if self._replaced:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)


@contextlib.contextmanager
def _bar(total: int) -> Iterator[Callable[[str], None] | None]:
    """A step of rich's bar on stderr; None where that is no terminal or rich is missing."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    except ImportError:
        yield None
        return
    columns = (BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}"))
    console = Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    # Other output goes above the bar, but not into it where stdout is a file.
    with Progress(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty()) as bar:
        left = _Left(total)
        task = bar.add_task("", total=total)
        yield lambda text: bar.update(task, advance=1, description=f"{left.step()} {text}".lstrip())


class _Left:
    """The time that a number of steps still takes, by the time of finished ones."""

    def __init__(self, total: int) -> None:
        self._total, self._done, self._start = total, 0, time.monotonic()

    def step(self) -> str:
        """Counts a step; how long the others will take, or an empty string where that is a matter of seconds."""
        self._done += 1
        seconds = (time.monotonic() - self._start) / self._done * (self._total - self._done)
        return f"{duration(seconds)} left" if seconds > _SHORT else ""


def duration(seconds: float) -> str:
    """Seconds in a unit that suits them: ``40 s``, ``3 min``, ``1.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"


@contextlib.contextmanager
def steps(total: int) -> Iterator[Callable[[str], None]]:
    """Shows progress and the time left on stderr: by a bar of rich's on a terminal, else in lines."""
    with _bar(total) as step:
        yield step or _lines(total)


def _lines(total: int) -> Callable[[str], None]:
    numbers, left = itertools.count(1), _Left(total)

    def line(text: str) -> None:
        rest = left.step()
        print(f"[{next(numbers)}/{total}] {text}{rest and f', {rest}'}", file=sys.stderr, flush=True)

    return line


@contextlib.contextmanager
def quiet_steps(total: int) -> Iterator[Callable[[str], None]]:
    """The same for commands that print results as they come: without a bar a line every few seconds, not each step."""
    numbers, left, said = itertools.count(1), _Left(total), time.monotonic()

    def line(text: str) -> None:
        nonlocal said
        number, rest, now = next(numbers), left.step(), time.monotonic()
        if rest and now - said > _SHORT:
            said = now
            print(f"[{number}/{total}] {text}, {rest}", file=sys.stderr, flush=True)

    with _bar(total) as step:
        yield step or line


@contextlib.contextmanager
def launch_progress(look: Callable[[], tuple[int, int, int]], seconds: float = _SHORT) -> Iterator[None]:
    """Says on stderr every few seconds how far the launch is that runs, and how long the rest of it will take.

    Args:
        look: Gives the launch's number in this process, its threadgroups that are done, and all of them.
        seconds: How often.
    """
    ended = threading.Event()
    before = look()[0]

    def say() -> None:
        said = time.monotonic()
        seen, start, first = before, said, 0  # the launch, and when and how far it was seen first
        while not ended.wait(seconds / 10):
            now, (number, done, total) = time.monotonic(), look()
            if number != seen:
                seen, start, first = number, now, done
            if number == before or done >= total or now - said < seconds:
                continue
            said = now
            rest = f", {duration((now - start) / (done - first) * (total - done))} left" if done > first else ""
            text = f"launch {number - before}: {done:,} of {total:,} threadgroups{rest}"
            print(text, file=sys.stderr, flush=True)

    thread = threading.Thread(target=say, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def each_saved(
    todo: Sequence[T],
    do: Callable[[T, Callable[[str], None]], None],
    name: Callable[[T], str],
    save: Callable[[Ending | None], None],
    minutes: float | None = None,
    total: int | None = None,
) -> Ending:
    """Does each as `each`, with progress on stderr; saves before the first, after each, and at the end.

    `do` takes an item and a function that shows a step; `total` counts its steps. Without `total` an item is a step.
    """
    save(None)
    with steps(total or len(todo)) as step:

        def one(item: T) -> None:
            do(item, step)
            save(None)
            if total is None:
                step(name(item))

        ending = each(todo, one, name, minutes)
    save(ending)
    return ending


def progress(ending: Ending | None, measured: int, planned: int) -> dict[str, Any]:
    """Progress of a run as a JSON file has it; without an ending it is still at work."""
    said = {"complete": ending is not None and ending.complete, "measured": measured, "planned": planned}
    return said if ending is None or ending.complete else {**said, "reason": ending.reason}


def finish(command: str, ending: Ending, file: JsonFile, passed: bool) -> int:
    """Reports problems beside the results on stderr; the exit status."""
    if not ending.complete:
        print(f"mlx-mittens {command}: {ending.reason}", file=sys.stderr)
    if file.problem:
        print(f"mlx-mittens {command}: {file.problem}", file=sys.stderr)
    return ending.status or (0 if passed and not file.problem else 1)
