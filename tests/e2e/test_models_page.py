"""docs/models.md: a model file engages no less than the table says."""

import importlib.metadata
import runpy
from pathlib import Path

import pytest

MODELS = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "models.py"))
ROWS = MODELS["rows_of_page"]()
SAMPLE = ("gemma3_text", "gpt_oss", "llama", "qwen3_moe")

pytestmark = [
    pytest.mark.usefixtures("lenient"),
    pytest.mark.skipif(
        MODELS["made_with"]() not in MODELS["PAGE"].read_text(),
        reason="the table is of another mlx-lm or mlx: run python docs/models.py --write",
    ),
]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SAMPLE else [pytest.mark.nightly]) for name in ROWS]
)
def test_a_file_engages_no_less(name):
    found = MODELS["measured"]([name])[name]
    assert "failed" not in found, found
    for kind, cell in (("prompt", 1), ("token", 2)):
        missing = set(MODELS["counts_of"](ROWS[name][cell])) - set(found[kind]["ours"])
        assert not missing, f"{kind}: {missing} ran before; run python docs/models.py --write if others took over"
    mx_operations = sum(MODELS["counts_of"](ROWS[name][4]).values())
    assert sum(found["token"]["mx"].values()) <= mx_operations, found["token"]["mx"]


def test_every_file_has_a_row():
    text = MODELS["PAGE"].read_text()
    assert [name for name in MODELS["files"]() if f"| {name} |" not in text] == []
    assert set(SAMPLE) <= set(ROWS)
    assert importlib.metadata.version("mlx-lm") in text
