"""The random inputs of the tests, and every op test on every executor that is here."""

import math
import os
import signal
import zlib
from collections import Counter
from dataclasses import replace

# The tables' plans are tested, not this machine's calibration. It is read when the package is imported.
os.environ["MLX_MITTENS_CALIBRATION"] = "off"

import mlx.core as mx
import numpy as np
import pytest
from helpers import scripts
from helpers.support import DEVICES, EXECUTORS

import mlx_mittens as mm
from mlx_mittens import _ext, specs

# mx must compute in float32 on an NVIDIA GPU too, and so must the gradients of ours that use its products.
os.environ["MLX_ENABLE_TF32"] = "0"

SEED = "MLX_MITTENS_TEST_SEED"

# Tests that name no device run on the CPU, also on a machine with a GPU. mlx-lm reads the default when it is imported.
mx.set_default_device(mx.cpu)

# A process that a shell starts in the background ignores Ctrl-C, and so would processes that tests interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption("--draw-seed", action="store_true", help=f"draw the seed of random inputs; {SEED}=N sets it (0)")


def pytest_configure(config):
    # In the environment, so that the workers of pytest-xdist draw the same numbers.
    drawn = int.from_bytes(os.urandom(4), "little") if config.getoption("--draw-seed") else 0
    os.environ.setdefault(SEED, str(drawn))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from helpers.scheduling import Scheduling  # needs pytest-xdist

    return Scheduling(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if hasattr(config, "workerinput"):
        from helpers import scheduling

        scheduling.sort(items)


def pytest_terminal_summary(terminalreporter):
    """Names the ten files that take longest."""
    seconds = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if hasattr(report, "duration") and hasattr(report, "nodeid"):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    if len(seconds) > 1:
        terminalreporter.write_sep("=", "slowest 10 files")
        for name, duration in seconds.most_common(10):
            terminalreporter.write_line(f"{duration:.0f}s {name}")


def pytest_report_header(config):
    return f"random seed: {SEED}={os.environ[SEED]}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        report.sections.append(("random inputs", f"repeat with {SEED}={os.environ[SEED]}"))
    return report


@pytest.fixture
def rng(request):
    """A generator of this test's own, from the run's seed and the test's name."""
    return np.random.default_rng([int(os.environ[SEED]), zlib.crc32(request.node.nodeid.encode())])


@pytest.fixture(autouse=True)
def mx_random(request):
    """Seeds MLX's generator, which draws the weights of new modules, from the same two."""
    mx.random.seed(int(os.environ[SEED]) ^ zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def strict():
    """No test passes because mx did the work."""
    with mm.strict():
        yield


@pytest.fixture
def lenient(strict):
    """Calls that no kernel covers go to mx, as they do for users."""
    with mm.strict(False):
        yield


@pytest.fixture(params=EXECUTORS)
def executor(request, rng):
    """Runs a test on each executor in turn; the simulator in a thread order drawn anew."""
    before = mx.default_device()
    mx.set_default_device(mx.gpu if request.param == "gpu" else mx.cpu)
    try:
        if request.param == "simulator":
            with mm.simulator.enabled(seed=int(rng.integers(1, 2**31))):
                yield request.param
        else:
            yield request.param
    finally:
        mx.set_default_device(before)


@pytest.fixture(params=DEVICES)
def device(request):
    """Runs a test on each device that is here, as its users do."""
    mx.set_default_device(getattr(mx, request.param))
    yield request.param
    mx.set_default_device(mx.cpu)


@pytest.fixture
def counted(rng):
    """Runs a call in the simulator; returns the counts of its launches, with the counts of their threadgroups."""

    def run(call, gpu="apple"):
        with mx.stream(mx.cpu), mm.simulator.enabled(seed=int(rng.integers(1, 2**31)), gpu=gpu):
            _ext.simulator_record(True)
            try:
                mx.eval(call())
            finally:
                launches = _ext.simulator_record(False)
        for launch in launches:
            launch["counts"]["device_bytes_loaded"] -= launch["counts"]["params_bytes_loaded"]
            launch["counts"]["threadgroups"] = math.prod(launch["threadgroups"])
        return [launch["counts"] for launch in launches]

    return run


@pytest.fixture
def native():
    """The native code alone, for tests that gain nothing from other executors."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)


@pytest.fixture
def nvidia_kernels(native, rng):
    """The simulator in the place of an NVIDIA GPU; a call gives the launches."""
    with mm.simulator.enabled(seed=int(rng.integers(1, 2**31)), gpu="nvidia"):
        _ext.simulator_record(True)
        yield lambda: [launch["kernel"] for launch in _ext.simulator_record(True)]
        _ext.simulator_record(False)


@pytest.fixture(params=specs.ROW_OPS, ids=lambda op: op.name)
def op(request):
    """Each op of the table that works along rows; mx's twin of it runs on the CPU.

    On an NVIDIA GPU mx's gradient of layer_norm is no measure.
    """

    def twin(*arguments, **options):
        with mx.stream(mx.cpu):
            return request.param.twin(*arguments, **options)

    return replace(request.param, twin=twin)


@pytest.fixture(params=specs.DTYPES.values(), ids=specs.DTYPES)
def dtype(request):
    """Each element type."""
    return request.param


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The folder of a short training by examples/train_tiny.py: the model as it is and in 4 bits."""
    folder = tmp_path_factory.mktemp("trained")
    printed = scripts.run("train_tiny.py", "--out", folder, "--steps", 12, "--layers", 2, "--batch", 4, "--length", 64)
    (folder / "printed.txt").write_text(printed)
    return folder


@pytest.fixture(scope="session")
def trained_mixture(tmp_path_factory):
    """The same of a mixture of experts: as it is, in 4 bits and in mxfp4."""
    folder = tmp_path_factory.mktemp("mixture")
    printed = scripts.run("train_tiny.py", "--moe", "--out", folder, "--steps", 8, "--width", 128, "--batch", 2)
    (folder / "printed.txt").write_text(printed)
    return folder
