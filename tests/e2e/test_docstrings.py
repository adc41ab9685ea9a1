"""The examples in the docstrings of public names, which run as they are written; and the types of all names."""

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

# A module has a page. Of `frontend` two names are public (docs/versioning.md).
NAMES = [name for name in mm.__all__ if not inspect.ismodule(getattr(mm, name))]
NAMES += [f"{module.__name__.rpartition('.')[2]}.{name}" for module in MODULES for name in module.__all__]
NAMES += ["simulator.Kernel.predict", "frontend.CompileError", "frontend.flatten"]

# Classes of results, and a method: their examples do not have the name.
RESULTS = (
    "Launch",
    "LineCounts",
    "ProfiledLaunches",
    "PredictedLaunch",
    "EstimatedLaunch",
    "PredictedLaunches",
    "Kernel",
    "Kernel.predict",
)

API = "\n".join(page.read_text() for page in (USES.parents[2] / "docs" / "api").glob("*.md"))

PREDICTING = ("predicted", "Kernel.predict", "PredictedLaunch", "EstimatedLaunch", "PredictedLaunches")


@pytest.mark.parametrize("name", NAMES)
def test_the_example_runs(name, lenient, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write a file
    if name.removeprefix("simulator.") in PREDICTING and (problem := agx_compiler.problem()):
        pytest.skip(problem)
    documented = operator.attrgetter(name)(mm)
    examples = doctest.DocTestParser().get_examples(inspect.getdoc(documented) or "")
    assert examples, f"mm.{name} has no example"
    if name.removeprefix("simulator.") not in RESULTS:
        assert any(f"mm.{name}" in example.source for example in examples)
    test = doctest.DocTest(examples, {"mx": mx, "mm": mm}, name, None, None, None)
    said = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    runner.run(test, out=said.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(said)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_in_the_api_pages(name):
    """A page has the name's module or the name itself; a sentence describes names that are defined in C++."""
    documented = operator.attrgetter(name)(mm)
    module, last = documented.__module__, documented.__qualname__
    shown = {f"::: {module}", f"::: {module}.{last}", f"::: {module}.{last.partition('.')[0]}"}
    lines = set(API.splitlines())
    assert shown & lines or f"`mm.{name}`" in API or f"`mlx_mittens.{name}`" in API, (module, last)


def test_every_public_name_is_used_where_types_are_checked():
    """mypy and pyright check the file (see pyproject.toml)."""
    used = {ast.unparse(node) for node in ast.walk(ast.parse(USES.read_text())) if isinstance(node, ast.Attribute)}
    names = {f"mm.{name}" for name in mm.__all__}
    names |= {f"mm.{module.__name__.rpartition('.')[2]}.{name}" for module in MODULES for name in module.__all__}
    assert names <= used, sorted(names - used)
    assert "tests/typing" in (USES.parents[2] / "pyproject.toml").read_text()
