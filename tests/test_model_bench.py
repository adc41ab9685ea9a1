"""The benchmark of whole models, on models too small to measure anything."""

import itertools
import json
import math
import time

import mlx.core as mx
import mlx.nn as nn
import pytest
import tiny
from mlx.utils import tree_flatten

import mlx_mittens as mm
from mlx_mittens import machine, model_bench, models
from mlx_mittens.__main__ import main


@pytest.fixture(autouse=True)
def small(monkeypatch, lenient):
    monkeypatch.setattr(machine, "copy_gb_s", lambda: 10.0)
    for name in tiny.FAMILIES:
        monkeypatch.setitem(models.ARCHITECTURES, name, tiny.config(name))


def bench(tmp_path, *arguments):
    file = tmp_path / "result.json"
    assert main(["bench", *arguments, "--prompt", "6", "--tokens", "5", "--json", str(file)]) == 0
    return json.loads(file.read_text())


def test_rows_shares_and_table(tmp_path, capsys):
    result = bench(tmp_path, "--model", "llama-3.2-1b,qwen3-0.6b", "--dtype", "float16,bfloat16")
    rows = result["rows"]
    assert len(rows) == 2 * 3 * 2 * 2 and {row["phase"] for row in rows} == {"decode", "prefill 6"}
    for row in rows:
        assert row["problem"] is None and row["mittens"]["tokens"] > 1
        assert math.isclose(row["ratio"], row["mittens"]["tokens_per_s"] / row["mx"]["tokens_per_s"])
        assert math.isclose(row["converted_ratio"], row["converted"]["tokens_per_s"] / row["mx"]["tokens_per_s"])
    for what, parts in result["shares"].items():
        product = "gemv" if " half " in what else "quantized_matmul"
        expected = {"rms_norm", "rope", "cache", "scaled_dot_product_attention", product, "other"}
        assert math.isclose(sum(parts.values()), 1) and min(parts.values()) > 0 and expected <= set(parts)
    assert result["machine"]["versions"]["mlx_lm"]
    text = capsys.readouterr().out
    assert "patched tokens/s" in text and "converted / mx" in text and "share of a token's time" in text


def test_the_converted_model_has_the_same_weights():
    model = tiny.build("llama-3.2-1b", mx.float16, 4)
    converted = model_bench._converted(model)
    before, after = dict(tree_flatten(model.parameters())), dict(tree_flatten(converted.parameters()))
    assert before.keys() == after.keys() and all(mx.array_equal(after[name], before[name]) for name in before)
    joined = ("q_proj", "k_proj", "v_proj")  # views of what is multiplied with as one
    assert all(after[name] is before[name] for name in before if name.split(".")[-2] not in joined)
    assert type(model.model.norm) is nn.RMSNorm and isinstance(converted.model.norm, mm.nn.RMSNorm)


def test_what_mx_cannot_run_is_said(tmp_path, capsys):
    rows = bench(tmp_path, "--model", "gpt-oss-20b", "--weights", "8-bit", "--dtype", "bfloat16")["rows"]
    assert all(row["mittens"]["tokens_per_s"] > 0 for row in rows)


def test_a_slow_contender_is_timed_on_fewer_tokens(tmp_path, capsys):
    result = bench(tmp_path, "--model", "llama-3.2-1b", "--weights", "4-bit", "--seconds", "0.0001")
    assert all(row["mx"]["tokens"] == 1 for row in result["rows"])
    decode, prefill = result["rows"]
    assert decode["mittens"]["tokens"] == 1


def test_clocks_are_taken_off_again():
    def timed():
        return [getattr(owner, name) for _, owner, name in model_bench._timed()]

    before, rope = timed(), mx.fast.rope
    with pytest.raises(ZeroDivisionError), model_bench._clocks({}):
        assert mx.fast.rope is not rope
        1 / 0
    assert timed() == before and mx.fast.rope is rope


def test_a_function_within_a_layer_counts_once(monkeypatch):
    seconds, layer = {}, nn.RMSNorm(64)
    ticks = itertools.count()
    with model_bench._clocks(seconds), monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: next(ticks))
        layer(mx.ones((1, 64)))  # which calls mx.fast.rms_norm
    assert seconds == {"rms_norm": 1}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "llama-9"], "--model: llama-9 given; there are llama-3.2-1b"),
        (["--model", "qwen3-0.6b", "--weights", "3-bit"], "--weights: 3-bit given; there are 4-bit"),
        (["--model", "qwen3-0.6b", "--dtype", "float64"], "--dtype: float64 given"),
        (["--model", "qwen3-0.6b", "--tokens", "1"], "--tokens take 2 or more"),
    ],
)
def test_bad_arguments(capsys, arguments, message):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_random_weights_are_of_the_models_own_shapes(rng):
    model = tiny.build("gpt-oss-20b", mx.bfloat16, 4)
    dtypes = {a.dtype for _, a in tree_flatten(model.parameters())}
    assert dtypes == {mx.bfloat16, mx.uint32}
    logits = model(mx.array([[1, 2, 3]])).astype(mx.float32)
    assert 0.1 < logits.std().item() < 10
