"""How the tests are dealt out to the workers of pytest-xdist."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from xdist.scheduler import LoadScheduling
from xdist.workermanage import WorkerController

# Files whose tests share a result that takes minutes: one worker runs them all, and computes it once. Largest first.
TOGETHER = {
    "test_macos_recording.py": "the levels",
    "test_levels.py": "the levels",
    "test_macos_host.py": "the macOS extension",
    "test_distributed.py": "the sharded models",
}
GROUPS = list(dict.fromkeys(TOGETHER.values()))
# Folders whose tests take seconds each: they come next, so that the last tests are short and all workers end together.
SLOW = ("verification", "e2e", "bench")

LARGEST_BATCH = 16  # tests
FEWEST_WAITING = 3  # tests, the one that runs among them: a worker starts the next only if it knows another
ROUNDS = 16  # of batches for each worker, at least


def _file(nodeid: str) -> PurePosixPath:
    return PurePosixPath(nodeid.partition("::")[0])


def group(nodeid: str) -> str | None:
    """The group that a test belongs to, if any."""
    return TOGETHER.get(_file(nodeid).name)


def place(nodeid: str) -> int:
    """Tests are sorted by it: groups, then slow tests, then the others."""
    name = group(nodeid)
    if name is not None:
        return GROUPS.index(name)
    slow = any(folder in SLOW for folder in _file(nodeid).parts)
    return len(GROUPS) + (0 if slow else 1)


class Scheduling(LoadScheduling):
    """Deals out a few tests at a time to whoever is free, and the files above as groups.

    pytest-xdist's own ``--dist loadgroup`` would do, but 3.8 finds no group under pytest 9.2, and says nothing; and the
    controller looks through all tests that a worker has had for each test that ends.
    A test that kills its worker ends the run (``--max-worker-restart=0``): xdist does not deal out its tests again.
    """

    def schedule(self) -> None:
        """Sends the first tests, to each worker two at least: it does not start the last that it has."""
        if self.maxschedchunk is None:
            self.maxschedchunk = LARGEST_BATCH
        super().schedule()
        for node in self.nodes:
            self.check_schedule(node)

    def check_schedule(self, node: WorkerController, duration: float = 0) -> None:
        """Sends a worker that is about to run out of tests the next ones."""
        if node.shutting_down:
            return
        if not self.pending:
            node.shutdown()
        elif len(self.node2pending[node]) < FEWEST_WAITING:
            share = len(self.pending) // (ROUNDS * len(self.nodes))
            self._send_tests(node, max(1, min(self.maxschedchunk, share)))

    def _send_tests(self, node: WorkerController, num: int) -> None:
        """Sends the next `num` tests, or the whole group that comes next."""
        first = group(self.collection[self.pending[0]]) if self.pending else None
        if first is not None:
            num = sum(group(self.collection[i]) == first for i in self.pending)
        super()._send_tests(node, num)


def sort(items: list[pytest.Item]) -> None:
    """Brings a worker's tests into the order in which they are dealt out."""
    items.sort(key=lambda item: place(item.nodeid))
