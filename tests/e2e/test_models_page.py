"""docs/models: a model file engages no less than the table says."""

import contextlib
import importlib.metadata

import mlx.core as mx
import numpy as np
import pytest
from helpers.pages import MODELS
from helpers.tolerances import LAYERS
from mlx_lm.models.cache import make_prompt_cache

import mlx_mittens as mm

ROWS = MODELS["rows_of_pages"]()
SAMPLE = ("gemma3_text", "gpt_oss", "llama", "qwen3_moe")

pytestmark = [
    pytest.mark.usefixtures("lenient"),
    pytest.mark.skipif(
        MODELS["made_with"]() not in MODELS["in_docs"](),
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
    for how, cells in ROWS[name].items():
        for kind in ("first prompt", "prompt", "token"):
            missing = set(MODELS["counts_of"](cells[kind])) - set(found[how][kind]["ours"])
            again = "run python docs/models.py --write if others took over"
            assert not missing, f"{kind}, {how}: {missing} ran before; {again}"
        mx_operations = sum(MODELS["counts_of"](cells["of mx, a token"]).values())
        assert sum(found[how]["token"]["mx"].values()) <= mx_operations, (how, found[how]["token"]["mx"])


@each_file
def test_a_file_s_logits_are_those_of_mx(name):
    """Of prompts in chunks and of tokens, in float32, patched and converted."""
    model = MODELS["build"](name, mx.float32)
    logits = []
    mx.disable_compile()
    try:
        for how in ("plain", "patched", "converted"):
            if how == "converted":
                mm.nn.convert(model)
            caches = make_prompt_cache(model)
            with mm.patched() if how == "patched" else contextlib.nullcontext():
                steps = [MODELS["called"](name, model, mx.array([list(range(n))]), caches) for n in (9, 11, 1, 1, 1)]
                logits.append(np.concatenate([np.array(y[0], np.float32) for y in steps]))
    finally:
        mx.enable_compile()
    theirs, *both = logits
    finite = np.isfinite(theirs)
    for ours in both:
        np.testing.assert_array_equal(np.isfinite(ours), finite)
        np.testing.assert_allclose(ours[finite], theirs[finite], rtol=0, atol=LAYERS * np.abs(theirs[finite]).max())


def test_what_is_converted_has_what_is_patched():
    """No op of a model's is the patch's alone: a converted model may have fewer launches of one, by fusing more."""
    lacks = {}
    for name, row in ROWS.items():
        for kind in ("first prompt", "prompt", "token"):
            patched, converted = (set(MODELS["counts_of"](row[how][kind])) for how in ("patched", "converted"))
            if "quantized_matmul" in converted:  # with matrices that are joined
                patched.discard("quantized_matmuls")
            if patched - converted:
                lacks[name, kind] = patched - converted
    assert not lacks


def test_a_first_prompt_is_appended_as_a_later_one():
    """Layer by layer, but not for the keys in rotating caches."""
    for name, row in ROWS.items():
        for how, cells in row.items():
            first, later = (
                MODELS["counts_of"](cells[kind]).get("rope_append", 0) for kind in ("first prompt", "prompt")
            )
            assert first == later, (name, how)


def test_every_file_has_a_row():
    """And models that cannot be measured say why."""
    text = MODELS["in_docs"]()
    assert [name for name in MODELS["files"]() if f"| {name} |" not in text] == []
    assert set(MODELS["files"]()) - set(ROWS) == set(MODELS["LEFT_OUT"])
    assert set(SAMPLE) <= set(ROWS)
    assert importlib.metadata.version("mlx-lm") in text
