"""The benchmark of memory, on models too small for their figures to matter."""

import json

import mlx.core as mx
import pytest
from helpers import tiny

from mlx_mittens.bench import machine
from mlx_mittens.cli import bench_memory
from mlx_mittens.cli.main import main

pytest.importorskip("mlx_lm")

ARGUMENTS = ["--memory", "--device", "cpu", "--prompt", "40", "--tokens", "4"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(machine, "copy_gb_s", lambda: 10.0)
    before = mx.default_device()
    yield
    mx.set_default_device(before)


def bench(tmp_path, monkeypatch, name, *caches):
    monkeypatch.setattr(bench_memory, "CACHES", dict.fromkeys(caches))
    folder, file = tiny.save(tmp_path / "model", name, mx.float16, 4), tmp_path / "result.json"
    assert main(["bench", "--model", str(folder), *ARGUMENTS, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["complete"] is True and (result["prompt"], result["tokens"]) == (40, 4)
    return result["rows"]


def test_rows_and_table(tmp_path, monkeypatch, capsys):
    rows = bench(tmp_path, monkeypatch, "llama-3.2-1b", "half", "4-bit")
    assert [(row["cache"], row["side"]) for row in rows] == [
        *(("half", "patched"), ("half", "mx"), ("4-bit", "patched"), ("4-bit", "mx"))
    ]
    for row in rows:
        assert row["problem"] is None and row["keys"] == 44 and (row["weights"], row["dtype"]) == ("4-bit", "float16")
        for phase in (row["prompt"], row["tokens"]):
            assert row["loaded"] < phase["held"] <= phase["peak"] and 0 < phase["resident"] <= phase["resident_peak"]
    half, packed = ([row["tokens"]["held"] for row in rows if row["cache"] == cache] for cache in ("half", "4-bit"))
    assert all(a > b for a, b in zip(half, packed, strict=True))
    assert "prompt peak" in capsys.readouterr().out


def test_a_cache_that_mlx_lm_has_not(tmp_path, monkeypatch, capsys):
    """Where mx cannot run it either, it is no failure."""
    rows = bench(tmp_path, monkeypatch, "gemma-3-1b", "8-bit")
    assert len(rows) == 2 and all("RotatingKVCache" in row["problem"] and row["prompt"] is None for row in rows)
    assert capsys.readouterr().out.count("cannot: NotImplementedError") == 2


@pytest.mark.parametrize("others", [["--seconds", "5"], ["--peer", "llama.cpp"]])
def test_what_does_not_go_with_it(tmp_path, capsys, others):
    folder = str(tiny.save(tmp_path / "model", "llama-3.2-1b", mx.float16, 4))
    assert main(["bench", "--model", folder, *ARGUMENTS, *others]) == 2
    assert f"{others[0]} does not go with --memory, which times nothing" in capsys.readouterr().err
