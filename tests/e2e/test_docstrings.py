"""The examples in the docstrings of what is public, which run as they are written; and the types of all of it."""

import ast
import doctest
import inspect
import operator
import pathlib

import mlx.core as mx
import pytest

import mlx_mittens as mm
from mlx_mittens.apple import agx_compiler

USES = pathlib.Path(__file__).parents[1] / "typing" / "every_name.py"

MODULES = (mm.nn, mm.simulator)

# A class of errors is raised, not called; the simulator's classes are results of its functions; a module has a page.
FUNCTIONS = [name for name in mm.__all__ if not inspect.ismodule(getattr(mm, name)) and name[0].islower()]
FUNCTIONS += [f"nn.{name}" for name in mm.nn.__all__]
FUNCTIONS += [f"simulator.{name}" for name in mm.simulator.__all__ if name[0].islower()]
FUNCTIONS += ["simulator.Kernel.predict"]

PREDICTING = ("simulator.predicted", "simulator.Kernel.predict")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_example_runs(name, lenient):
    if name in PREDICTING and (problem := agx_compiler.problem()):
        pytest.skip(problem)
    documented = operator.attrgetter(name)(mm)
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(documented) or "")
    assert examples, f"mm.{name} has no example"
    called = "kernel.predict" if name == "simulator.Kernel.predict" else f"mm.{name}"
    assert any(called in example.source for example in examples)
    test = doctest.DocTest(examples, {"mx": mx, "mm": mm}, name, None, None, None)
    said = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    runner.run(test, out=said.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(said)


def test_every_public_name_is_used_where_types_are_checked():
    """mypy and pyright check the file (see pyproject.toml)."""
    used = {ast.unparse(node) for node in ast.walk(ast.parse(USES.read_text())) if isinstance(node, ast.Attribute)}
    names = {f"mm.{name}" for name in mm.__all__}
    names |= {f"mm.{module.__name__.rpartition('.')[2]}.{name}" for module in MODULES for name in module.__all__}
    assert names <= used, sorted(names - used)
    assert "tests/typing" in (USES.parents[2] / "pyproject.toml").read_text()
