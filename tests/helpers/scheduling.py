"""How the tests are dealt out to the workers of pytest-xdist."""

from pathlib import PurePosixPath

from xdist.scheduler import LoadScopeScheduling

# Files whose tests share a result that takes minutes: one worker runs them all, and computes it once. Largest first.
TOGETHER = {
    "test_macos_recording.py": "the levels",
    "test_levels.py": "the levels",
    "test_macos_host.py": "the macOS extension",
    "test_distributed.py": "the sharded models",
}


class Scheduling(LoadScopeScheduling):
    """Deals out one test at a time to whoever is free, and the files above as groups.

    pytest-xdist's own ``--dist loadgroup`` would do, but 3.8 finds no group under pytest 9.2, and says nothing.
    A test that kills its worker ends the run (``--max-worker-restart=0``): xdist does not deal out its tests again.
    """

    def _split_scope(self, nodeid: str) -> str:
        return TOGETHER.get(PurePosixPath(nodeid.partition("::")[0]).name, nodeid)
