"""The processes in which `doctor` examines cases."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Cases = tuple[str, Sequence[int]]  # an op, and the numbers of cases of it


class Child:
    """A process that examines cases. A fault ends this process only.

    It runs Python code that reads the name of an op and the number of a case from each line of its input, and answers
    each with a line of JSON.
    """

    def __init__(self, code: str, arguments: Sequence[str], environment: dict[str, str]) -> None:
        self._errors = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"import sys\nsys.path[:] = {sys.path!r}\n{code}", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
            start_new_session=True,  # Ctrl-C and a time limit are this process's to handle
        )
        assert self._process.stdin is not None and self._process.stdout is not None  # as they are pipes
        self._numbers, self._answers = self._process.stdin, self._process.stdout

    def examine(self, op: str, number: int) -> dict[str, Any] | None:
        """Gives the findings, or None where another case had run the same.

        Raises:
            EOFError: The process ended.
        """
        try:
            self._numbers.write(f"{op} {number}\n")
            self._numbers.flush()
        except BrokenPipeError:
            raise EOFError from None
        answer = self._answers.readline()
        if not answer.endswith("\n"):
            raise EOFError
        found: dict[str, Any] | None = json.loads(answer)
        return found

    def end(self) -> str:
        """Waits for the process's end; how it ended, with the last lines that it wrote."""
        with contextlib.suppress(BrokenPipeError):
            self._numbers.close()
        status = self._process.wait()
        how = f"exit status {status}" if status >= 0 else f"signal {-status} ({signal.strsignal(-status)})"
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace")
        self._close()
        print(text, end="", file=sys.stderr)
        return "\n".join([f"the process was ended by {how}", *text.strip().splitlines()[-3:]])

    def stop(self) -> None:
        """Has the process end at once."""
        self._process.kill()

    def kill(self) -> None:
        self.stop()
        self._process.wait()
        self._close()

    def _close(self) -> None:
        self._answers.close()
        self._errors.close()


class _Ahead:
    """Processes that run cases before it is their turn: NVIDIA's driver compiles a kernel at its first launch, for all.

    Their findings are not kept.
    """

    def __init__(self, parts: Sequence[Cases], start: Callable[[], Child], count: int) -> None:
        self._children = [start() for _ in range(count)]
        self._threads = [
            threading.Thread(target=self._run, args=(child, parts[i + 1 :: count]), daemon=True)
            for i, child in enumerate(self._children)
        ]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _run(child: Child, parts: Sequence[Cases]) -> None:
        with contextlib.suppress(EOFError, OSError, ValueError):  # it has ended, or has been killed
            for op, numbers in parts:
                for number in numbers:
                    child.examine(op, number)

    def end(self) -> None:
        for child in self._children:
            child.stop()
        for thread in self._threads:
            thread.join()
        for child in self._children:
            child.kill()


@contextlib.contextmanager
def run_ahead(parts: Sequence[Cases], start: Callable[[], Child], most: int) -> Iterator[None]:
    """Has other processes run parts but the first ahead of their turn, as long as the block lasts."""
    ahead = _Ahead(parts, start, max(min(most, len(parts) - 1), 0))
    try:
        yield
    finally:
        ahead.end()
