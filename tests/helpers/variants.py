"""Runs the cases of the table of ops in the simulator."""

import mlx_mittens as mm
from helpers.support import absences
from mlx_mittens import specs


def simulate(op, dtype, seed, rng):
    """Simulates the table's shapes, outputs and gradients, with and without weights; yields how each case went."""
    for case in op.checks():
        drawn = op.draw(rng, case, dtype)
        cotangents = op.cotangents(rng, case, dtype)
        for arrays in absences(op, drawn):
            with mm.simulator.enabled(seed=seed, gpu=case.gpu):
                yield case, specs.check(op, case, arrays, cotangents)
