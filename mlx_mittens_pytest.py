"""The pytest plugin: a suite's Metal kernels in the simulator, by ``pytest --metal-simulator``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

_OF_SIMULATOR = ("--metal-seeds", "--metal-subnormals", "--metal-fuse")
_NOTHING_RAN = "metal simulator: no kernel ran. Tests that compute on the CPU prove nothing about kernels."


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("metal")
    group.addoption(
        "--metal-simulator", action="store_true", help="run kernels of mx.fast.metal_kernel in mlx-mittens' simulator"
    )
    group.addoption("--metal-seeds", type=int, metavar="N", help="run each test with N orders of threads (1)")
    group.addoption(
        "--metal-subnormals",
        choices=("keep", "flush"),
        help="whether float32 numbers below 1.2e-38 are kept, or zero as on a GPU (keep)",
    )
    group.addoption(
        "--metal-fuse", action="store_true", help="round a * b + c within an expression once, as MLX's compiler may"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--metal-simulator"):
        config.pluginmanager.register(_Simulated(config), "metal-simulator-run")
    elif unused := [option for option in _OF_SIMULATOR if config.getoption(option)]:
        config.pluginmanager.register(_Unused(unused), "metal-simulator-unused")


class _Unused:
    """Options that do nothing, since the simulator is not asked for."""

    def __init__(self, options: list[str]):
        self.options = options

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        named = " and ".join(self.options)
        do = "do" if len(self.options) > 1 else "does"
        terminalreporter.write_line(
            f"metal simulator: {named} {do} nothing without --metal-simulator: no kernel ran in it", yellow=True
        )


class _Simulated:
    """A session whose kernels run in the simulator, from its collection on."""

    def __init__(self, config: pytest.Config):
        from mlx_mittens import simulator

        self.simulator = simulator
        self.seeds = max(1, config.getoption("--metal-seeds") or 1)
        self.settings = {
            "pretend_metal": True,
            "subnormals": config.getoption("--metal-subnormals") or "keep",
            "fuse": config.getoption("--metal-fuse"),
        }
        self.before = simulator.launched()
        self.elsewhere = 0  # launches of xdist's workers
        self.notes: set[str] = set()  # theirs
        self.stack = contextlib.ExitStack()
        self.stack.enter_context(simulator.enabled(**self.settings))

    @property
    def launches(self) -> int:
        return self.simulator.launched() - self.before + self.elsewhere

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if self.seeds > 1:
            metafunc.fixturenames.append("metal_seed")
            metafunc.parametrize("metal_seed", range(self.seeds), ids=lambda seed: f"seed{seed}")

    @pytest.fixture
    def metal_seed(self) -> int:
        """The order of threads of this test; parametrized."""
        return 0

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        callspec = getattr(item, "callspec", None)
        seed = callspec.params.get("metal_seed", 0) if callspec else 0
        with self.simulator.enabled(seed=seed, **self.settings):
            yield

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        output = getattr(node, "workeroutput", {})
        self.elsewhere += output.get("metal_launches", 0)
        self.notes.update(output.get("metal_notes", ()))

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["metal_launches"], output["metal_notes"] = self.launches, self.simulator.notes()
        elif self.launches == 0 and exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for note in sorted(self.notes.union(self.simulator.notes())):
            terminalreporter.write_line(f"metal simulator: note: {note}")
        if self.launches:
            terminalreporter.write_line(f"metal simulator: {self.launches} launches")
        else:
            terminalreporter.write_line(_NOTHING_RAN, red=True)

    def pytest_unconfigure(self) -> None:
        self.stack.close()
