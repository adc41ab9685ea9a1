"""How the tests are dealt out to the workers of pytest-xdist."""

from pathlib import PurePosixPath

from xdist.scheduler import LoadScopeScheduling

# Files whose tests share what takes minutes to make: one worker runs them all, and makes it once. The largest come first.
TOGETHER = {
    "test_macos_recording.py": "the ladder",
    "test_ptx.py": "the ladder",
    "test_levels.py": "the ladder",
    "test_macos_host.py": "the macOS extension",
}


class Scheduling(LoadScopeScheduling):
    """One test at a time to whoever is free, but for those above.

    pytest-xdist's own ``--dist loadgroup`` would do, but 3.8 finds no group under pytest 9.2, and says nothing.
    A test that takes its worker down ends the run (``--max-worker-restart=0``): what is dealt out so is not dealt again.
    """

    def _split_scope(self, nodeid: str) -> str:
        return TOGETHER.get(PurePosixPath(nodeid.partition("::")[0]).name, nodeid)
