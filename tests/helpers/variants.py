"""Runs the cases of the table of ops in the simulator."""

import mlx.core as mx

import mlx_mittens as mm
from helpers.support import absences
from mlx_mittens import _ext, specs


def simulate(op, dtype, seed, rng, wanted=None):
    """Simulates the table's shapes, outputs and gradients, with and without weights; yields how each run went.

    A run is a case and the number of a choice of absent arguments; `wanted` says which to simulate, all by default.
    Inputs of a case do not depend on which others are wanted.
    """
    cases = list(op.checks())
    for case, draws in zip(cases, rng.spawn(len(cases)), strict=True):
        numbers = [i for i in range(len(absences(op, op.parameters, case))) if wanted is None or wanted(case, i)]
        if not numbers:
            continue
        choices = absences(op, op.draw(draws, case, dtype), case)
        cotangents = op.cotangents(draws, case, dtype)
        for i in numbers:
            with mm.strict(_ext.strict() and not case.left_to_mx), mm.simulator.enabled(seed=seed, gpu=case.gpu):
                yield case, i, specs.check(op, case, choices[i], cotangents)


def record(call, gpu, dry=False, **options):
    """A call's results on a GPU, and their launches, which do not run if it is dry."""
    with mm.simulator.enabled(gpu=gpu, **options), mx.stream(mx.cpu):
        _ext.simulator_record(True, dry=dry)
        try:
            results = call()
            mx.eval(results)
        finally:
            launches = _ext.simulator_record(False)
    return results, launches


def planned_launches(call, gpu):
    """The launches of a call's results on a GPU, without running any."""
    return record(call, gpu, dry=True)[1]
