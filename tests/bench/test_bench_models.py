"""The benchmark of whole models, on models too small to measure anything."""

import functools
import itertools
import json
import math
import time

import mlx.core as mx
import mlx.nn as nn
import pytest
from helpers import tiny
from mlx.utils import tree_flatten

import mlx_mittens as mm
from mlx_mittens import table
from mlx_mittens.bench import architectures, machine, models
from mlx_mittens.cli import bench_models
from mlx_mittens.cli.main import main


@pytest.fixture(autouse=True)
def small(monkeypatch, lenient):
    monkeypatch.setattr(machine, "copy_gb_s", lambda: 10.0)
    monkeypatch.setattr(models, "_TURNS", 2)  # the better one counts
    for name in (*tiny.FAMILIES, "qwen3-30b-a3b", "qwen3-next-80b-a3b"):
        monkeypatch.setitem(architectures.ARCHITECTURES, name, tiny.config(name))


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
    assert result["complete"] is True and result["measured"] == result["planned"] == 12
    lines = capsys.readouterr().out.splitlines()
    heading = "model weights dtype phase patched converted mx patched/mx converted/mx"
    assert heading in [" ".join(line.split()) for line in lines]
    assert sum(line.startswith("qwen3-0.6b") and "prefill 6" in line for line in lines) == 6
    assert "share of a token's time, each op waited for:" in lines


def test_a_folder_beside_an_architecture(tmp_path, capsys):
    folder = str(tiny.save(tmp_path / "own", "qwen3-0.6b", mx.float16, 4))
    result = bench(tmp_path, "--model", f"{folder},llama-3.2-1b", "--weights", "8-bit", "--seconds", "2")
    found = [(row["model"], row["weights"], row["dtype"]) for row in result["rows"]]
    assert found == [(folder, "4-bit", "float16")] * 2 + [("llama-3.2-1b", "8-bit", "bfloat16")] * 2
    assert all(row["mittens"]["tokens_per_s"] > 0 and row["ratio"] > 0 for row in result["rows"])
    assert list(result["shares"]) == [f"{folder} 4-bit float16", "llama-3.2-1b 8-bit bfloat16"]
    assert f"{folder} 4-bit float16 decode" in " ".join(capsys.readouterr().out.split())


def test_a_folder_with_a_comma(tmp_path, monkeypatch):
    folder = str(tiny.save(tmp_path / "own,4-bit", "llama-3.2-1b", mx.float32, 4))
    seen = []
    monkeypatch.setattr(bench_models, "measure", lambda subject, *_: seen.append(subject) or subject.load() and 1 / 0)
    assert main(["bench", "--model", folder]) == 1 and seen == [models.Subject(folder)]


def test_a_folder_whose_weights_do_not_fit(tmp_path, capsys):
    folder = tiny.save(tmp_path / "own", "llama-3.2-1b", mx.float32)
    (folder / "model.safetensors").unlink()
    assert main(["bench", "--model", str(folder)]) == 1
    assert f"{folder}: ModelError: mlx-lm " in capsys.readouterr().err


def test_formats_are_of_random_weights(tmp_path, capsys):
    folder = tiny.save(tmp_path / "own", "llama-3.2-1b", mx.float32)
    for option, value in (("--weights", "4-bit"), ("--dtype", "float16")):
        assert main(["bench", "--model", str(folder), option, value]) == 2
        assert f"{option} is of random weights: {folder} has its own" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error, status", [(RuntimeError("no kernel for this"), 1), (KeyboardInterrupt(), 130)], ids=repr
)
def test_what_was_measured_is_kept(monkeypatch, tmp_path, capsys, error, status):
    measure, done = models.measure, []

    def limited(*arguments):
        if done:
            raise error
        done.append(arguments)
        return measure(*arguments)

    monkeypatch.setattr(bench_models, "measure", limited)
    file = tmp_path / "result.json"
    arguments = ["--model", "llama-3.2-1b", "--prompt", "6", "--tokens", "5", "--json", str(file)]
    assert main(["bench", *arguments]) == status
    printed = capsys.readouterr()
    result = json.loads(file.read_text())
    assert result["complete"] is False and (result["measured"], result["planned"]) == (1, 3)
    assert len(result["rows"]) == 2 and len(result["shares"]) == 1
    assert "Incomplete: 1 of 3 measured." in printed.out and "prefill 6" in printed.out
    assert "llama-3.2-1b 8-bit bfloat16" in printed.err and "Traceback" not in printed.err


def test_a_model_that_mlx_lm_lacks_is_said_before_it_begins(monkeypatch, capsys):
    monkeypatch.setitem(architectures.ARCHITECTURES, "llama-9", {"model_type": "llama_9"})
    monkeypatch.setattr(bench_models, "measure", None)
    assert main(["bench", "--model", "llama-3.2-1b,llama-9"]) == 2
    assert "--model llama-9: mlx-lm" in capsys.readouterr().err


def test_the_table_fits_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(table, "terminal_width", lambda: 80)
    speed = lambda value: models.Speed(value, 64)
    rows = [
        models.Row("gpt-oss-20b", weights, "bfloat16", "cpu", phase, speed(12345.6), speed(12345.6), mx)
        for weights in ("4-bit", "8-bit", "half")
        for phase, mx in (("decode", models.Speed(0.0692, 1)), ("prefill 2048", None))
    ]
    table.show(bench_models._COLUMNS, [bench_models._cells(row) for row in rows], [""] * len(rows))
    lines = [line.replace("\x1b[1m", "").replace("\x1b[0m", "") for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 1 + len(rows) and max(map(len, lines)) <= 80
    assert lines[0].split() == ["gpt-oss-20b", "dtype", "phase", "patched", "converted", "mx", "patched/mx"]


def test_the_converted_model_has_the_same_weights():
    model = tiny.build("llama-3.2-1b", mx.float16, 4)
    converted = models.converted_copy(model)
    before, after = dict(tree_flatten(model.parameters())), dict(tree_flatten(converted.parameters()))
    assert before.keys() == after.keys() and all(mx.array_equal(after[name], before[name]) for name in before)
    joined = ("q_proj", "k_proj", "v_proj")  # views of the joined weights
    assert all(after[name] is before[name] for name in before if name.split(".")[-2] not in joined)
    assert type(model.model.norm) is nn.RMSNorm and isinstance(converted.model.norm, mm.nn.RMSNorm)


def test_what_mx_cannot_run_is_said(tmp_path, capsys):
    rows = bench(tmp_path, "--model", "gpt-oss-20b", "--weights", "8-bit", "--dtype", "bfloat16")["rows"]
    assert all(row["mittens"]["tokens_per_s"] > 0 for row in rows)


def test_a_mixture_of_fewer_layers_says_so(tmp_path, monkeypatch, capsys):
    model = tiny.build("qwen3-30b-a3b", mx.bfloat16, 4, group_size=32, mode="mxfp4")
    whole = sum(a.nbytes for _, a in tree_flatten(model.parameters()))
    monkeypatch.setattr(machine, "available_bytes", lambda: 2 * (whole - 1))
    rows = bench(tmp_path, "--model", "qwen3-30b-a3b", "--weights", "mxfp4")["rows"]
    assert [(row["weights"], row["layers"], row["published_layers"]) for row in rows] == [("mxfp4", 1, 2)] * 2
    assert all(row["mittens"]["tokens_per_s"] > 0 for row in rows)
    assert sum(line.endswith("1 of 2") for line in capsys.readouterr().out.splitlines()) == 2
    monkeypatch.setattr(machine, "available_bytes", lambda: 2 * whole)
    rows = bench(tmp_path, "--model", "qwen3-30b-a3b", "--weights", "mxfp4")["rows"]
    assert [(row["layers"], row["published_layers"]) for row in rows] == [(2, 2)] * 2
    rows = bench(tmp_path, "--model", "qwen3-30b-a3b", "--weights", "mxfp4", "--layers", "1")["rows"]
    assert [row["layers"] for row in rows] == [1, 1]
    monkeypatch.setattr(machine, "available_bytes", lambda: 1000)
    assert main(["bench", "--model", "qwen3-30b-a3b", "--weights", "mxfp4"]) == 1
    said = capsys.readouterr().err
    assert "1 of the layers of qwen3-30b-a3b need more than half of the memory" in said and "or --layers" in said


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b", "qwen3-next-80b-a3b", "llama-3.2-1b"])
@pytest.mark.parametrize("weights", ["half", "4-bit", "mxfp4"])
def test_layers_that_fit_are_those_that_are_built(name, weights, monkeypatch):
    build = functools.partial(architectures.build, name, mx.float16, **models.FORMATS[weights])
    size = lambda layers: sum(a.nbytes for _, a in tree_flatten(build(num_hidden_layers=layers).parameters()))
    fitting = lambda nbytes: architectures.fitting_layers(name, mx.float16, nbytes, **models.FORMATS[weights])
    period = architectures.period(name)
    monkeypatch.setitem(architectures.ARCHITECTURES[name], "num_hidden_layers", 2 * period)
    one, two = size(period), size(2 * period)
    assert [fitting(n) for n in (one - 1, one, two - 1, two, 10 * two)] == [0, period, period, 2 * period, 2 * period]


def test_the_memory_available_is_known_here():
    assert machine.available_bytes() is None or machine.available_bytes() > 1 << 20


def test_a_slow_contender_is_timed_on_fewer_tokens(tmp_path, capsys):
    result = bench(tmp_path, "--model", "llama-3.2-1b", "--weights", "4-bit", "--seconds", "0.0001")
    assert all(row["mx"]["tokens"] == 1 for row in result["rows"])
    decode, prefill = result["rows"]
    assert decode["mittens"]["tokens"] == 1


def timed_calls(monkeypatch, tokens, prompt, seconds=30.0):
    """The tokens that each contender's model is called with, in the order of the calls, as [contender, tokens]."""
    calls = []
    build = functools.partial(tiny.build, "llama-3.2-1b", mx.float32)

    class Recorded(type(build())):
        def __call__(self, tokens, *arguments, **options):
            patch = mx.fast.rms_norm is not plain
            name = "mittens" if patch else "mx" if type(self.model.norm) is nn.RMSNorm else "converted"
            calls.append((name, tokens.shape[1]))
            return super().__call__(tokens, *arguments, **options)

    plain, model = mx.fast.rms_norm, build()
    model.__class__ = Recorded
    monkeypatch.setattr(models.Subject, "load", lambda self: (self, model))
    begun = {}
    step = lambda text: begun.setdefault(text.rpartition(": ")[2], len(calls))
    rows, _ = models.measure(models.Subject("llama-3.2-1b", "half", "float32"), tokens, prompt, seconds, step)
    return rows, calls, begun


def test_every_contender_is_warmed_before_the_first_is_timed(monkeypatch):
    """MLX compiles kernels at run time, too: its first product of many rows may take a minute."""
    _, calls, begun = timed_calls(monkeypatch, 4, 6)
    before = calls[: begun["loaded and compiled"]]
    for name in ("mittens", "converted", "mx"):
        assert (name, 5) in before and (name, 1) in before, name


def test_all_read_the_same_prompt_as_mlx_lm_does(monkeypatch):
    """All tokens but the last fill the cache, and one gives logits."""
    rows, calls, begun = timed_calls(monkeypatch, 4, 6)
    of_prompts = calls[begun["decode"] :]
    for name in ("mittens", "converted", "mx"):
        mine = [tokens for one, tokens in of_prompts if one == name]
        assert mine == [5, 1] * (len(mine) // 2) and mine, name
    assert rows[1].phase == "prefill 6"
    assert {speed.tokens for speed in (rows[1].mittens, rows[1].converted, rows[1].mx)} == {6}


def test_one_that_is_slow_shortens_the_prompt_of_all(monkeypatch):
    seconds = {"mittens": 0.001, "converted": 0.001, "mx": 1.0}
    prefill, lengths = models._prefill, []

    def timed(model, tokens):
        _, caches = prefill(model, tokens)
        name = "mittens" if mx.fast.rms_norm is not plain else "mx" if type(model.model.norm) is nn.RMSNorm else "other"
        lengths.append((name, tokens))
        return (seconds.get(name, 0.001) * tokens, caches)

    plain = mx.fast.rms_norm
    monkeypatch.setattr(models, "_prefill", timed)
    rows, _, _ = timed_calls(monkeypatch, 4, 64, seconds=9.0)
    assert rows[1].phase == "prefill 8"
    assert {speed.tokens for speed in (rows[1].mittens, rows[1].converted, rows[1].mx)} == {8}
    assert lengths[-1][1] == 8 and ("mittens", 64) in lengths


def test_clocks_are_taken_off_again():
    def timed():
        return [getattr(owner, name) for _, owner, name in models._timed()]

    before, rope = timed(), mx.fast.rope
    with pytest.raises(ZeroDivisionError), models._clocks({}):
        assert mx.fast.rope is not rope
        raise ZeroDivisionError
    assert timed() == before and mx.fast.rope is rope


def test_a_function_within_a_layer_counts_once(monkeypatch):
    seconds, layer = {}, nn.RMSNorm(64)
    ticks = itertools.count()
    with models._clocks(seconds), monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: next(ticks))
        layer(mx.ones((1, 64)))  # which calls mx.fast.rms_norm
    assert seconds == {"rms_norm": 1}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--model", "llama-9"], "--model: llama-9 given; did you mean llama-3."),
        (
            ["--model", "qwen3-0.6b", "--weights", "3-bit"],
            "--weights: 3-bit given; did you mean ",
        ),
        (["--model", "qwen3-0.6b", "--dtype", "float64"], "--dtype: float64 given"),
        (["--model", "qwen3-0.6b", "--tokens", "1"], "--tokens take 2 or more"),
        (["--model", "qwen3-0.6b", "--layers", "0"], "--layers 0: expected 1 or more"),
        (["--model", "gpt-oss-20b", "--layers", "1"], "--layers 1: expected a multiple of 2 for gpt-oss-20b"),
        (["--model", "qwen3-0.6b", "--seconds", "nan"], "--seconds more than 0"),
        (["--model", ""], "--model: nothing given; there are llama-3.2-1b"),
        (["--model", "qwen3-0.6b", "--ops", "softmax"], "--ops does not go with --model"),
        (["--model", "qwen3-0.6b", "--peer", "metal"], "--peer does not go with --model"),
        (["--model", "qwen3-0.6b", "--plot", "x.png"], "--plot does not go with --model"),
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


def test_functions_that_mx_compiles_run_on_mx_in_its_turns(monkeypatch):
    compiled = mx.compile(lambda x: mx.softmax(x, axis=-1))
    model = tiny.build("llama-3.2-1b", mx.float32)

    class Squeezed(type(model)):
        def __call__(self, *arguments, **options):
            return compiled(super().__call__(*arguments, **options))

    model.__class__ = Squeezed
    monkeypatch.setattr(models.Subject, "load", lambda self: (self, model))
    found = []

    def in_turns(contenders):
        for name, run in contenders.items():
            mm.stats(reset=True)
            found.append((name, bool(run()) and "softmax" in mm.stats()))
        return {name: models.Speed(1.0, 1) for name in contenders}, None

    monkeypatch.setattr(models, "_in_turns", in_turns)
    models.measure(models.Subject("llama-3.2-1b", "half", "float16"), 4, 6, 5.0, lambda text: None)
    assert found == [("mittens", True), ("converted", False), ("mx", False)] * 2
