"""A child process that runs cases: it says which one before it runs it, so that a crash has a name."""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

# A case that takes longer never ends.
LONGEST_SECONDS = 600.0
COMMAND = (sys.executable, "-m", "verification.fuzz.worker")


@dataclass(frozen=True)
class Chunk:
    """Cases of one subject on one executor that follow each other."""

    subject: str
    executor: str
    seed: int
    first: int
    count: int

    def replay(self, index: int) -> str:
        """The command that runs one of them again."""
        simulate = "" if self.executor == "native" else f" --simulate {self.executor}"
        case = f"--op {self.subject} --seed {self.seed} --case {index}"
        return f"PYTHONPATH=tests python -m verification.fuzz {case}{simulate}"


@dataclass
class Finding:
    """A case that is wrong."""

    wrong: str
    mode: str
    text: str
    replay: str

    def __str__(self) -> str:
        return f"{self.wrong}\n  {self.mode}: {self.text}\n  {self.replay}"


@dataclass
class Outcome:
    """The results of a chunk.

    Attributes:
        modes: How many cases of each kind ran.
        findings: The wrong ones.
        kernels: How many kernels ran.
        left: How many calls went to mx.
        seconds: How long it took.
    """

    modes: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    kernels: int = 0
    left: int = 0
    seconds: float = 0.0

    def count(self, mode: str, cases: int = 1) -> None:
        self.modes[mode] = self.modes.get(mode, 0) + cases

    @property
    def cases(self) -> int:
        return sum(self.modes.values())


class Worker:
    """The parent's end. The child is started when it is needed, and anew after a crash."""

    def __init__(self, command: Sequence[str] = COMMAND, longest_seconds: float = LONGEST_SECONDS):
        self._command, self._longest = command, longest_seconds
        self._process: subprocess.Popen | None = None
        self._errors = tempfile.TemporaryFile()
        self._pending = b""
        self._stopped = False

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_) -> None:
        self._end()
        self._errors.close()

    def run(self, chunk: Chunk) -> Outcome:
        """Runs all cases of a chunk, those after a crash too."""
        outcome, started, index = Outcome(), time.monotonic(), chunk.first
        while index < chunk.first + chunk.count and not self._stopped:
            index = self._run_until_crash(chunk, index, outcome)
        outcome.seconds = time.monotonic() - started
        return outcome

    def stop(self) -> None:
        """Ends `run`, from another thread."""
        self._stopped = True
        if process := self._process:
            process.kill()

    def _run_until_crash(self, chunk: Chunk, index: int, outcome: Outcome) -> int:
        """Returns the index of the next case to run."""
        self._send({**chunk.__dict__, "first": index, "count": chunk.first + chunk.count - index})
        mode, text = "start", "the worker's start"
        while (line := self._line()) is not None:
            told = json.loads(line)
            if "case" in told:
                index, mode, text = told["case"], told["mode"], told["text"]
                continue
            if "right" in told:
                outcome.count(mode)
                if told["wrong"]:
                    outcome.findings.append(Finding(told["wrong"], mode, text, chunk.replay(index)))
                continue
            outcome.kernels += told["kernels"]
            outcome.left += told["left"]
            return chunk.first + chunk.count
        outcome.count(mode)
        outcome.findings.append(Finding(self._end(), mode, text, chunk.replay(index)))
        return index + 1

    def _send(self, task: dict) -> None:
        if self._process is None or self._process.poll() is not None:
            self._end()
            paths = [str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH", "")]
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            )
        if self._stopped:  # before there was a process to kill
            self._process.kill()
        self._process.stdin.write(json.dumps(task).encode() + b"\n")
        self._process.stdin.flush()

    def _line(self) -> bytes | None:
        """The next line of the child, or None where it died or says nothing any more."""
        output = self._process.stdout.fileno()
        while b"\n" not in self._pending:
            if not select.select([output], [], [], self._longest)[0]:
                self._process.kill()
                return None
            received = os.read(output, 65536)
            if not received:
                return None
            self._pending += received
        line, self._pending = self._pending.split(b"\n", 1)
        return line

    def _end(self) -> str:
        """Ends the child; says how it ended, with the last that it printed."""
        if self._process is None:
            return ""
        self._process.stdin.close()
        code = self._process.wait()
        self._process.stdout.close()
        self._process, self._pending = None, b""
        self._errors.seek(0)
        printed = self._errors.read().decode(errors="replace").strip()
        self._errors.seek(0)
        self._errors.truncate()
        how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        return f"the process died: {how}\n{printed[-8000:]}".rstrip()


def _serve() -> None:
    """The child's end: a task on each line of standard input; on standard output the case that runs, and its result."""
    output = os.dup(1)
    os.dup2(2, 1)  # a case's own output must not stand between

    def tell(**told: object) -> None:
        os.write(output, json.dumps(told).encode() + b"\n")

    import mlx.core as mx
    from verification.fuzz.subjects import draw_trial, run_trial

    import mlx_mittens as mm

    faulthandler.enable()
    mx.set_cache_limit(0)  # freed memory goes back to the allocator, where a sanitizer sees it used again
    for line in sys.stdin:
        chunk = Chunk(**json.loads(line))
        mm.stats(reset=True)
        for index in range(chunk.first, chunk.first + chunk.count):
            tell(case=index, mode="drawing", text="")
            trial = draw_trial(chunk.subject, chunk.executor, chunk.seed, index)
            tell(case=index, mode=trial.mode, text=trial.text)
            wrong = run_trial(trial, chunk.executor, index)
            tell(right=wrong is None, wrong=wrong)
        counts = mm.stats(reset=True).values()
        tell(kernels=sum(sum(c["kernels"].values()) for c in counts), left=sum(sum(c["mx"].values()) for c in counts))


if __name__ == "__main__":
    _serve()
