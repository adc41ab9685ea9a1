"""The examples in the docstrings of what is public, which run as they are written; and the types of all of it."""

import ast
import doctest
import inspect
import pathlib

import mlx.core as mx
import pytest

import mlx_mittens as mm

USES = pathlib.Path(__file__).parents[1] / "typing" / "every_name.py"

# A class of errors is raised, not called; a module is a page of its own.
FUNCTIONS = [name for name in mm.__all__ if not inspect.ismodule(getattr(mm, name)) and name[0].islower()]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_example_runs(name, lenient):
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(getattr(mm, name)) or "")
    assert examples, f"mm.{name} has no example"
    assert any(f"mm.{name}" in example.source for example in examples)
    test = doctest.DocTest(examples, {"mx": mx, "mm": mm}, name, None, None, None)
    said = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    runner.run(test, out=said.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(said)


def test_every_public_name_is_used_where_types_are_checked():
    """mypy checks the file with the package (see pyproject.toml)."""
    used = {
        node.attr
        for node in ast.walk(ast.parse(USES.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "mm"
    }
    assert set(mm.__all__) <= used, sorted(set(mm.__all__) - used)
    assert "tests/typing" in (USES.parents[2] / "pyproject.toml").read_text()
