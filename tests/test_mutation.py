"""A slice of the mutation run (tests/mutate.py): the tests in the simulator see faults that are planted in kernels."""

import mutate
import pytest

from mlx_mittens import frontend

pytestmark = pytest.mark.skipif(bool(frontend.compiler_problem()), reason="no compiler for the simulator")


def test_planted_faults_are_seen():
    """In one type, on small cases; a quarter may be such as take others, or change nothing."""
    chosen = mutate.sample(12, seed=3)
    assert {mutant.kind for mutant in chosen} == set(mutate.KINDS)
    fates = mutate.run(chosen, jobs=2, scope=mutate.Scope(("float16",), 30_000))
    survivors = [mutate.key(mutant) for mutant, fate, _ in fates if fate == "survived"]
    unexplained = [text for text in survivors if text not in mutate.explanations()]
    assert len(unexplained) <= 3, unexplained


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
