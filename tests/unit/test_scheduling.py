"""Workers of pytest-xdist get every test once, a group of tests on one worker, and never wait for more."""

from types import SimpleNamespace

import pytest

pytest.importorskip("xdist")

from helpers import scheduling

FAST = [f"tests/unit/test_ops.py::test_{i}" for i in range(500)]
SLOW = [f"tests/e2e/test_docs.py::test_{i}" for i in range(40)]
GROUPED = [f"tests/verification/{name}::test_{i}" for name in scheduling.TOGETHER for i in range(3)]


class Worker:
    """One that starts a test only if it knows the next or that there is none, as pytest-xdist's do."""

    def __init__(self):
        self.gateway = SimpleNamespace(id="gw")
        self.got, self.done, self.batches, self.shutting_down = [], [], 0, False

    def send_runtest_some(self, indices):
        self.got += indices
        self.batches += 1

    def shutdown(self):
        self.shutting_down = True

    @property
    def can_run(self):
        left = len(self.got) - len(self.done)
        return left > 1 or (left == 1 and self.shutting_down)


def run(nodeids, count):
    options = {"tx": [f"{count}*popen"], "px": [], "maxschedchunk": None}
    config = SimpleNamespace(getvalue=options.get, getoption=options.get)
    scheduler = scheduling.Scheduling(config)
    workers = [Worker() for _ in range(count)]
    for worker in workers:
        scheduler.add_node(worker)
        scheduler.add_node_collection(worker, nodeids)
    scheduler.schedule()
    while running := [worker for worker in workers if worker.can_run]:
        worker = min(running, key=lambda worker: len(worker.done))
        worker.done.append(worker.got[len(worker.done)])
        scheduler.mark_test_complete(worker, worker.done[-1])
    return workers


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("tests", [[], FAST[:1], FAST[:5], GROUPED, GROUPED[:1] + FAST[:2], GROUPED + SLOW + FAST])
def test_every_test_is_run_once(tests, count):
    workers = run(tests, count)
    assert sorted(i for worker in workers for i in worker.done) == list(range(len(tests)))
    assert all(worker.shutting_down for worker in workers) or not tests


def test_a_group_is_run_by_one_worker():
    nodeids = GROUPED + SLOW + FAST
    workers = run(nodeids, 2)
    homes = {(scheduling.group(nodeids[i]), n) for n, worker in enumerate(workers) for i in worker.done}
    assert sorted(name for name, _ in homes if name) == sorted(scheduling.GROUPS)


def test_batches_are_large_and_the_last_ones_small():
    workers = run(FAST, 2)
    assert sum(worker.batches for worker in workers) < len(FAST) / 3
    assert all(len(worker.done) > len(FAST) / 2 - scheduling.LARGEST_BATCH for worker in workers)


def test_groups_come_first_and_short_tests_last():
    items = [SimpleNamespace(nodeid=nodeid) for nodeid in FAST + SLOW + GROUPED]
    scheduling.sort(items)
    assert [item.nodeid for item in items] == GROUPED + SLOW + FAST
