"""The benchmark of requests at once, on models too small for their figures to matter."""

import json

import mlx.core as mx
import pytest
from helpers import tiny

from mlx_mittens.bench import machine, requests
from mlx_mittens.cli.main import main

pytest.importorskip("mlx_lm")

ARGUMENTS = ["--device", "cpu", "--prompt", "9", "--tokens", "4"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(machine, "copy_gb_s", lambda: 10.0)
    monkeypatch.setattr(requests, "_TURNS", 2)
    before = mx.default_device()
    yield
    mx.set_default_device(before)


def bench(tmp_path, name, *arguments):
    folder, file = tiny.save(tmp_path / "model", name, mx.float16, 4), tmp_path / "result.json"
    assert main(["bench", "--model", str(folder), *ARGUMENTS, *arguments, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["complete"] is True and (result["prompt"], result["tokens"]) == (9, 4)
    return result["rows"]


def test_rows_and_table(tmp_path, capsys):
    rows = bench(tmp_path, "llama-3.2-1b", "--requests", "2,9", "--kv-bits", "8")
    assert [(row["requests"], row["cache"]) for row in rows] == [
        *((2, "half"), (2, "8-bit")),
        *((9, "half"), (9, "8-bit")),
    ]
    for row in rows:
        assert (row["weights"], row["dtype"], row["problems"]) == ("4-bit", "float16", {})
        for name in requests.CONTENDERS:
            count = 2 if name == "mx" else row["requests"]  # mx's are for the first number of requests
            assert row[name]["tokens"] == 4 * count and row[name]["tokens_per_s"] > 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    heading = "at once one by one mx one by one at once/one by one at once/mx at once/half"
    assert any(heading in line for line in lines)
    assert sum(" 2 8-bit " in line for line in lines) == 1


def test_without_kv_bits_caches_are_of_half_types(tmp_path):
    assert [row["cache"] for row in bench(tmp_path, "llama-3.2-1b", "--requests", "2")] == ["half"]


def test_a_model_that_refuses_quantized_caches(tmp_path, capsys):
    """It is no failure where mx cannot run it either: gpt-oss, whose attention has sinks."""
    half, packed = bench(tmp_path, "gpt-oss-20b", "--requests", "2", "--kv-bits", "4")
    assert not half["problems"] and set(packed["problems"]) == set(requests.CONTENDERS)
    assert all(packed[name] is None for name in requests.CONTENDERS)
    out = capsys.readouterr().out
    assert out.count("does not support attention sinks") == 2 and "Quantization NYI" in out


def test_windows_are_quantized_in_ours_alone(tmp_path):
    _, packed = bench(tmp_path, "gemma-3-1b", "--requests", "2", "--kv-bits", "8")
    assert packed["at_once"] and packed["one_by_one"] and list(packed["problems"]) == ["mx"]


@pytest.mark.parametrize("name", ["one_by_one", "mx"])
def test_requests_that_take_too_long_end_early(name):
    model = tiny.build("llama-3.2-1b", mx.float16)
    mx.set_default_device(mx.cpu)
    prompts = requests.prompts_of(5, 9, 300)
    speed = requests._RUNS[name](model, prompts, None, 50, 1e-9)
    assert speed.tokens == 2 and speed.tokens_per_s > 0


def test_prompts_have_several_lengths():
    prompts = requests.prompts_of(4, 100, 300)
    assert sorted(len(prompt) for prompt in prompts) == [63, 75, 88, 100] and max(map(max, prompts)) < 300
    assert all(len(prompt) >= 1 for prompt in requests.prompts_of(32, 2, 300))


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--requests", "8,"], "--requests 8,: expected numbers above 0, separated by commas"),
        (["--requests", "0"], "--requests 0: expected numbers above 0"),
        (["--requests", "8", "--kv-bits", "7"], "--kv-bits 7: expected some of 2, 3, 4, 5, 6, 8"),
        (["--requests", "8", "--memory"], "--memory does not go with --requests"),
        (["--requests", "8", "--peer", "llama.cpp"], "--peer does not go with --requests"),
        (["--kv-bits", "8"], "--kv-bits goes with --requests"),
    ],
    ids=str,
)
def test_bad_arguments(tmp_path, capsys, arguments, words):
    folder = str(tiny.save(tmp_path / "model", "llama-3.2-1b", mx.float16, 4))
    assert main(["bench", "--model", folder, *ARGUMENTS, *arguments]) == 2
    assert words in capsys.readouterr().err


def test_requests_need_a_model(capsys):
    assert main(["bench", "--kv-bits", "8"]) == 2
    assert "--kv-bits goes with --model" in capsys.readouterr().err
