"""A slice of the mutation run (verification/mutate.py): the tests in the simulator see faults planted in kernels."""

import pytest
from verification import mutate

from mlx_mittens import frontend

pytestmark = pytest.mark.skipif(bool(frontend.compiler_problem()), reason="no compiler for the simulator")


@pytest.mark.nightly
def test_planted_faults_are_seen():
    """In one type, on small cases, and so in kernels whose variants these reach."""
    chosen = mutate.sample(12, seed=3, files=("norm/rms_norm.metal", "norm/softmax.metal", "matmul/qmv.metal"))
    assert {mutant.kind for mutant in chosen} == set(mutate.KINDS)
    fates = mutate.run(chosen, jobs=2, scope=mutate.Scope(("float16",), 30_000, suite=False))
    killed = sum(fate == "killed" for _, fate, _ in fates)
    survivors = [mutate.key(mutant) for mutant, fate, _ in fates if fate == "survived"]
    assert killed >= 2 * len(survivors), survivors


def test_every_explanation_is_of_a_mutant_that_there_is():
    known = {mutate.key(mutant) for mutant in mutate.mutants()}
    assert set(mutate.explanations()) <= known


def test_changes_of_a_line():
    line = "  for (uint i = t; i < n; i += threads) { y[i] = x[i * columns] + 2.0f; }"
    changed = {(kind, line[:start] + new + line[end:]) for kind, start, end, new in mutate._changes(line)}
    assert ("index", line.replace("y[i]", "y[i + 1]")) in changed
    assert ("stride", line.replace("+= threads", "+= threads + 1")) in changed
    assert ("stride", line.replace("* columns", "* (columns + 1)")) in changed
    assert ("comparison", line.replace("i < n", "i <= n")) in changed
    assert ("constant", line.replace("2.0f", "3.0f")) in changed
    assert list(mutate._changes("  threadgroup_barrier(mem_flags::mem_threadgroup);")) == [("barrier", 2, 50, "")]
    assert list(mutate._changes("  threadgroup float scratch[64];")) == []
