"""The notebook runs, and prints the output that is kept in it.

PYTHONPATH=tests python -m e2e.test_notebook --write    runs it, and keeps the output of its cells
"""

import contextlib
import io
import json
import pathlib
import sys

NOTEBOOK = pathlib.Path(__file__).parents[2] / "examples" / "simulator.ipynb"


def printed(notebook: dict) -> list[str]:
    """The output of each code cell, run one after the other in one namespace."""
    names: dict[str, object] = {}
    found = []
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            text = io.StringIO()
            with contextlib.redirect_stdout(text):
                exec(compile("".join(cell["source"]), NOTEBOOK.name, "exec"), names)
            found.append(text.getvalue())
    return found


def kept(notebook: dict) -> list[str]:
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return ["".join("".join(output["text"]) for output in cell["outputs"]) for cell in cells]


def test_the_notebook_prints_what_is_kept_in_it(native):
    notebook = json.loads(NOTEBOOK.read_text())
    assert "no barrier between" in "".join(kept(notebook))
    assert printed(notebook) == kept(notebook)


def write() -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    for number, (cell, text) in enumerate(zip(cells, printed(notebook)), 1):
        lines = text.splitlines(keepends=True)
        cell["execution_count"] = number
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": lines}] if text else []
    NOTEBOOK.write_text(json.dumps(notebook, indent=1) + "\n")


if __name__ == "__main__" and "--write" in sys.argv:
    write()
