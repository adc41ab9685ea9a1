"""The command: runs cases in child processes, keeps a log, and writes the summary of a nightly run."""

from __future__ import annotations

import argparse
import datetime
import queue
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from helpers import log
from verification.fuzz.worker import Chunk, Finding, Outcome, Worker

ROOT = Path(__file__).resolve().parents[3]
RESULT = ROOT / "bench" / "results" / "fuzz.md"
LOG = ROOT / "build" / "fuzz.jsonl"
CHUNK = 250

# The nightly run.
NIGHTLY = {"native": 10_000, "apple": 1_000, "nvidia": 1_000}


def commit() -> str:
    """The commit that is checked out, marked where files differ from it."""
    options = {"cwd": ROOT, "capture_output": True, "text": True}
    found = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"], **options)
    return found.stdout.strip() or "unknown"


def chunks(subjects: Iterable[str], cases: dict[str, int], seed: int) -> Iterator[Chunk]:
    """All cases in pieces, the same ones for the same request."""
    from verification.fuzz.subjects import cases_of, executors_of

    for subject in subjects:
        for executor in executors_of(subject):
            count = cases_of(subject, cases[executor]) if cases.get(executor) else 0
            for first in range(0, count, CHUNK):
                yield Chunk(subject, executor, seed, first, min(CHUNK, count - first))


class Log:
    """A line of JSON for each chunk that is done, so that a run that was cut off goes on where it stopped."""

    def __init__(self, path: Path):
        self._path, self._commit = path, commit()
        self.done: dict[Chunk, Outcome] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        for entry in log.entries(path):
            if entry["commit"] == self._commit and "dirty" not in self._commit:
                outcome = entry["outcome"]
                outcome["findings"] = [Finding(**finding) for finding in outcome["findings"]]
                self.done[Chunk(**entry["chunk"])] = Outcome(**outcome)

    def add(self, chunk: Chunk, outcome: Outcome) -> None:
        self.done[chunk] = outcome
        log.add(self._path, {"commit": self._commit, "chunk": asdict(chunk), "outcome": asdict(outcome)})


def run(wanted: list[Chunk], log: Log, jobs: int) -> dict[Chunk, Outcome]:
    """Runs the chunks that are not in the log, each in one of several child processes."""
    missing = [chunk for chunk in wanted if chunk not in log.done]
    free: queue.SimpleQueue[Worker] = queue.SimpleQueue()

    def work(chunk: Chunk) -> tuple[Chunk, Outcome]:
        worker = free.get()
        try:
            return chunk, worker.run(chunk)
        finally:
            free.put(worker)

    with ExitStack() as stack, ThreadPoolExecutor(jobs) as pool:
        workers = [stack.enter_context(Worker()) for _ in range(jobs)]
        for worker in workers:
            free.put(worker)
        try:
            for done, future in enumerate(as_completed([pool.submit(work, chunk) for chunk in missing]), 1):
                chunk, outcome = future.result()
                log.add(chunk, outcome)
                place = f"{chunk.subject} {chunk.executor} {chunk.first}..{chunk.first + chunk.count - 1}"
                found = f"{len(outcome.findings)} findings, {outcome.seconds:.1f} s"
                print(f"{done}/{len(missing)} {place}: {found}", flush=True)
                for finding in outcome.findings:
                    print(f"{finding}\n", flush=True)
        except BaseException:  # Ctrl-C among them
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in workers:
                worker.stop()
            raise
    return {chunk: log.done[chunk] for chunk in wanted}


def summary(outcomes: dict[Chunk, Outcome], seed: int, request: str) -> str:
    """The log in a page of Markdown."""
    from mlx_mittens import _ext
    from mlx_mittens.bench import machine

    rows: dict[tuple[str, str], Outcome] = {}
    for chunk, outcome in outcomes.items():
        row = rows.setdefault((chunk.subject, chunk.executor), Outcome())
        for mode, count in outcome.modes.items():
            row.count(mode, count)
        row.findings += outcome.findings
        row.kernels += outcome.kernels
        row.left += outcome.left
        row.seconds += outcome.seconds
    total: dict[str, int] = {}
    for (_, executor), row in rows.items():
        total[executor] = total.get(executor, 0) + row.cases
    where = f"{machine.processor()}, {machine.cores()} cores, native code for {_ext.cpu_instructions}"
    lines = [
        "# Fuzz run",
        "",
        f"`{request}` on {datetime.date.today()}, commit {commit()}, seed {seed}.",
        f"{where}.",
        "",
        f"{', '.join(f'{count} cases {executor}' for executor, count in total.items())};"
        f" {sum(row.seconds for row in rows.values()):.0f} seconds of all processes;"
        f" {sum(len(row.findings) for row in rows.values())} findings.",
        "",
        "| subject | executor | cases | kernels run | calls left to mx | findings | seconds | of which |",
        "|---|---|--:|--:|--:|--:|--:|---|",
    ]
    for (subject, executor), row in rows.items():
        kinds = ", ".join(f"{mode} {count}" for mode, count in sorted(row.modes.items()))
        lines.append(
            f"| {subject} | {executor} | {row.cases} | {row.kernels} | {row.left} | {len(row.findings)}"
            f" | {row.seconds:.0f} | {kinds} |"
        )
    lines += ["", "## Findings", ""]
    found = [f"- `{f.replay}`: {f.mode}: {f.wrong.splitlines()[0]}" for row in rows.values() for f in row.findings]
    return "\n".join(lines + (found or ["None."])) + "\n"


def replay(subject: str, executor: str, seed: int, index: int) -> int:
    """Runs one case in this process."""
    from verification.fuzz.subjects import draw_trial, run_trial

    trial = draw_trial(subject, executor, seed, index)
    print(f"{trial.mode}: {trial.text}", flush=True)
    wrong = run_trial(trial, executor, index)
    print(wrong or "right")
    return 1 if wrong else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m verification.fuzz", description="Differential fuzzing of every op."
    )
    parser.add_argument("--op", help="subjects, separated by commas (default: all)")
    parser.add_argument("--simulate", choices=("apple", "nvidia"), help="in the simulator, rather than natively")
    parser.add_argument("--cases", type=int, default=100, help="cases of each op; of slow subjects fewer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run this one case again, in this process")
    parser.add_argument("--nightly", action="store_true", help=f"cases of each op: {NIGHTLY}")
    parser.add_argument("--jobs", type=int, default=1, help="child processes")
    parser.add_argument("--log", type=Path, default=LOG, help="what a run that was cut off goes on from")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.relative_to(ROOT)}")
    return parser.parse_args()


def main() -> None:
    arguments = parse()
    from verification.fuzz.subjects import SUBJECTS

    subjects = arguments.op.split(",") if arguments.op else list(SUBJECTS)
    unknown = [subject for subject in subjects if subject not in SUBJECTS]
    if unknown:
        sys.exit(f"no subject is called {', '.join(unknown)}; there are {', '.join(SUBJECTS)}")
    executor = arguments.simulate or "native"
    if arguments.case is not None:
        sys.exit(max(replay(subject, executor, arguments.seed, arguments.case) for subject in subjects))
    cases = NIGHTLY if arguments.nightly else {executor: arguments.cases}
    outcomes = run(list(chunks(subjects, cases, arguments.seed)), Log(arguments.log), arguments.jobs)
    text = summary(outcomes, arguments.seed, " ".join(["PYTHONPATH=tests python -m verification.fuzz", *sys.argv[1:]]))
    print(text)
    if arguments.write:
        RESULT.write_text(text)
    sys.exit(1 if any(outcome.findings for outcome in outcomes.values()) else 0)
