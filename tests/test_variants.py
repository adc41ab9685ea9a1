"""Every variant of every kernel is reached by the ops' own launches, right in several thread orders."""

import pytest
from support import absences

import mlx_mittens as mm
from mlx_mittens import _ext, cases, frontend

# Thread orders; 0 is the natural one. A third one is that of the macOS code's launches.
SEEDS = (0, 1)

pytestmark = pytest.mark.usefixtures("native")


def simulate(op, dtype, seed, rng):
    """Simulates the table's shapes, outputs and gradients, with and without weights; yields how each case went."""
    for case in op.checks():
        drawn = op.draw(rng, case, dtype)
        cotangents = op.cotangents(rng, case, dtype)
        for arrays in absences(op, drawn):
            with mm.simulator.enabled(seed=seed, gpu=case.gpu):
                yield case, cases.check(op, case, arrays, cotangents)


@pytest.mark.parametrize("op", cases.OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_launch_is_right(op, dtype, seed, rng):
    for case, check in simulate(op, dtype, seed, rng):
        assert check.passed, f"{op.name} {case.name}: {check.detail}"


def launches() -> dict[str, tuple[int, int] | None]:
    """Every variant of ours to the threads launched and declared, None where it was not launched."""
    launched = _ext.launched_kernels()  # those of tests too, in whatever process they ran
    names = [f"{file}:{variant.name}" for file in frontend.files() for variant in frontend.variants(file)]
    return {name: launched.get(name) for name in names}


def test_every_variant_is_launched_with_the_threads_that_it_declares(rng):
    """More than 256 cost a thread registers on Apple's GPUs: what declares them is launched with more than 256.

    A launch with more threads than declared is a fault already.
    """
    if None in launches().values():  # as they are where the tests above ran in another process
        for op in cases.OPS:
            for dtype in cases.DTYPES.values():
                for _ in simulate(op, dtype, 0, rng):
                    pass
    found = launches()
    assert [name for name, threads in found.items() if not threads] == [], "cases.py lacks a shape that reaches them"
    idle = {name: threads for name, threads in found.items() if threads[0] <= 256 < threads[1]}
    assert idle == {}, "launched and declared threads"
