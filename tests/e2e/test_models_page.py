"""docs/models.md: a model file engages no less than the table says."""

import contextlib
import importlib.metadata
import runpy
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from helpers.tolerances import LAYERS
from mlx_lm.models.cache import make_prompt_cache

import mlx_mittens as mm

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


each_file = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SAMPLE else [pytest.mark.nightly]) for name in ROWS]
)


@each_file
def test_a_file_engages_no_less(name):
    found = MODELS["measured"]([name])[name]
    assert "failed" not in found, found
    for kind, cell in (("prompt", 1), ("token", 2)):
        missing = set(MODELS["counts_of"](ROWS[name][cell])) - set(found[kind]["ours"])
        assert not missing, f"{kind}: {missing} ran before; run python docs/models.py --write if others took over"
    mx_operations = sum(MODELS["counts_of"](ROWS[name][4]).values())
    assert sum(found["token"]["mx"].values()) <= mx_operations, found["token"]["mx"]


@each_file
def test_a_file_s_logits_are_those_of_mx(name):
    """Of prompts in chunks and of tokens, in float32."""
    model = MODELS["build"](name, mx.float32)
    logits = []
    mx.disable_compile()
    try:
        for patched in (mm.patched, contextlib.nullcontext):
            caches = make_prompt_cache(model)
            with patched():
                steps = [model(mx.array([list(range(n))]), cache=caches) for n in (9, 11, 1, 1, 1)]
                logits.append(np.concatenate([np.array(y[0], np.float32) for y in steps]))
    finally:
        mx.enable_compile()
    ours, theirs = logits
    finite = np.isfinite(theirs)
    np.testing.assert_array_equal(np.isfinite(ours), finite)
    np.testing.assert_allclose(ours[finite], theirs[finite], rtol=0, atol=LAYERS * np.abs(theirs[finite]).max())


def test_every_file_has_a_row():
    """And those that cannot be measured say why."""
    text = MODELS["PAGE"].read_text()
    assert [name for name in MODELS["files"]() if f"| {name} |" not in text] == []
    assert set(MODELS["files"]()) - set(ROWS) == set(MODELS["LEFT_OUT"])
    assert set(SAMPLE) <= set(ROWS)
    assert importlib.metadata.version("mlx-lm") in text
