"""`bench --peer llama.cpp`: a stand-in for llama-bench keeps its arguments, and prints results for the tests."""

import json
import sys

import mlx.core as mx
import pytest
from helpers import tiny

from mlx_mittens import _ext
from mlx_mittens.bench import architectures, llama_cpp, machine, models
from mlx_mittens.cli.main import main

ROW = {"model_type": "qwen3 0.6B Q4_0", "build_commit": "abc1234", "n_threads": 2, "avg_ts": 50.0, "stddev_ts": 5.0}
TABLE = [{**ROW, "n_prompt": 6, "n_gen": 0, "avg_ts": 100.0}, {**ROW, "n_prompt": 0, "n_gen": 5}]


@pytest.fixture
def stand_in(tmp_path, monkeypatch, lenient):
    """Writes an executable that prints a text and ends with a status; it leaves its arguments in a file."""
    monkeypatch.setattr(machine, "copy_gb_s", lambda: 10.0)
    monkeypatch.setattr(models, "_TURNS", 1)
    monkeypatch.setitem(architectures.ARCHITECTURES, "qwen3-0.6b", tiny.config("qwen3-0.6b"))

    def write(prints, status=0, complaint=""):
        path = tmp_path / "llama-bench"
        path.write_text(
            f"#!{sys.executable}\nimport json, sys\n"
            f"json.dump(sys.argv[1:], open({str(tmp_path / 'asked.json')!r}, 'w'))\n"
            f"print({prints!r})\nprint({complaint!r}, file=sys.stderr)\nsys.exit({status})\n"
        )
        path.chmod(0o755)
        model = tmp_path / "model.gguf"
        model.write_bytes(b"GGUF")
        monkeypatch.setenv(llama_cpp.EXECUTABLE, str(path))
        monkeypatch.setenv(llama_cpp.MODEL, str(model))
        return path

    return write


def bench(tmp_path, *more):
    model = ["--model", "qwen3-0.6b", "--weights", "4-bit", "--prompt", "6", "--tokens", "5", "--seconds", "1"]
    return main(["bench", *model, "--peer", "llama.cpp", "--json", str(tmp_path / "result.json"), *more])


def test_figures_stand_beside_ours(tmp_path, stand_in, capsys):
    stand_in(json.dumps(TABLE))
    assert bench(tmp_path) == 0
    asked = json.loads((tmp_path / "asked.json").read_text())
    layers = "0" if mx.default_device() == mx.cpu else "99"
    expected = {"-m": str(tmp_path / "model.gguf"), "-p": "6", "-n": "5", "-t": str(_ext.cpu_threads()), "-ngl": layers}
    assert expected.items() <= dict(zip(asked[::2], asked[1::2], strict=True)).items()
    found = json.loads((tmp_path / "result.json").read_text())["peer"]
    assert [(row["phase"], row["tokens_per_s"], row["spread"]) for row in found] == [
        ("decode", 50.0, 0.1),
        ("prefill 6", 100.0, 0.05),
    ]
    said = capsys.readouterr().out
    assert "llama.cpp decode: 50 tokens/s, +- 10% (qwen3 0.6B Q4_0, build abc1234, 2 threads)" in said


@pytest.mark.parametrize(
    ("prints", "status", "complaint", "message"),
    [
        ("", 1, "warning\nerror: failed to load model", "ended with status 1: error: failed to load model"),
        ("| model | size |", 0, "", "printed no table of llama-bench in JSON (JSONDecodeError"),
        (json.dumps([{"n_gen": 5}]), 0, "", "(KeyError: 'avg_ts')"),
        (json.dumps([{**TABLE[1], "avg_ts": 0}]), 0, "", "(ZeroDivisionError"),
    ],
)
def test_what_fails_is_said(tmp_path, stand_in, capsys, prints, status, complaint, message):
    path = stand_in(prints, status, complaint)
    with pytest.raises(llama_cpp.PeerError) as raised:
        llama_cpp.measure(str(path), tmp_path / "model.gguf", 6, 5)
    assert message in str(raised.value) and str(path) in str(raised.value)


def test_what_is_missing_is_said_before_anything_is_timed(tmp_path, stand_in, monkeypatch, capsys):
    def refused(*more):
        assert bench(tmp_path, *more) == 2
        return capsys.readouterr().err

    path = stand_in(json.dumps(TABLE))
    assert f"{llama_cpp.MODEL}: --model, --weights and --dtype name 2" in refused("--weights", "4-bit,8-bit")
    monkeypatch.setenv(llama_cpp.MODEL, str(tmp_path / "no.gguf"))
    assert "no.gguf', which is no file: expected a GGUF file" in refused()
    monkeypatch.delenv(llama_cpp.MODEL)
    assert f"{llama_cpp.MODEL} is not set: expected a GGUF file" in refused()
    path.chmod(0o644)
    assert "which is no executable: expected the path of llama-bench" in refused()
    monkeypatch.delenv(llama_cpp.EXECUTABLE)
    assert f"--peer llama.cpp: {llama_cpp.EXECUTABLE} is not set" in refused()
    assert main(["bench", "--peer", "llama.cpp"]) == 2
    assert "--peer llama.cpp goes with --model" in capsys.readouterr().err
    assert main(["bench", "--peer", "metal", "--model", "qwen3-0.6b"]) == 2
    assert "--peer does not go with --model" in capsys.readouterr().err
