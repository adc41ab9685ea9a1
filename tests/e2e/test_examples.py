"""The example scripts, run as the README says."""

import importlib.util
import json
import re
import sys

import mlx.core as mx
import pytest
from helpers import scripts, tiny
from mlx_lm import load
from mlx_lm.sample_utils import make_logits_processors

import mlx_mittens as mm


def test_multiplying_with_a_gguf_file():
    lines = scripts.run("gguf_matmul.py").splitlines()
    assert [line.split()[1:3] for line in lines] == [[f"{kind},", "512x1024,"] for kind in ("q4_0", "q8_0", "mxfp4")]


def test_a_missing_gguf_file_is_named():
    result = scripts.try_run("gguf_matmul.py", "no.gguf")
    assert result.returncode == 2 and "no.gguf is not a file" in result.stderr


def test_training_lowers_the_loss_and_writes_both_models(trained):
    printed = (trained / "printed.txt").read_text()
    first, last = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+)", printed).groups())
    assert last < first
    assert "rms_norm_vjp" in printed and "mx:" not in printed
    assert (trained / "loss.png").read_bytes().startswith(b"\x89PNG")
    config = json.loads((trained / "4bit" / "config.json").read_text())
    assert config["quantization"]["bits"] == 4 and config["head_dim"] == 64
    for folder in ("dense", "4bit"):
        assert (trained / folder / "model.safetensors").stat().st_size > 100_000


@pytest.mark.usefixtures("native", "lenient")
@pytest.mark.parametrize("weights", ["4bit", "mxfp4"])
def test_a_mixture_generates_the_same_tokens(trained_mixture, weights):
    """Patched, converted and on mx. After few steps a model repeats itself, unless recent tokens are penalized."""
    model, tokenizer = load(str(trained_mixture / weights))
    assert model.layers[0].mlp.switch_mlp.down_proj.mode == ("affine" if weights == "4bit" else "mxfp4")
    prompt = tokenizer.encode("The for statement is used to iterate over")
    options = {"logits_processors": make_logits_processors(repetition_penalty=100.0)}
    theirs = tiny.tokens(model, prompt, 200, **options)
    mm.stats(reset=True)
    with mm.patched():
        assert tiny.tokens(model, prompt, 200, **options) == theirs
    assert all(tiny.kernels(op) > 0 for op in ("route_top_k", "gather_swiglu", "gather_sum"))
    mm.nn.convert(model)
    assert tiny.tokens(model, prompt, 200, **options) == theirs
    assert len(set(theirs)) > 20


def test_generating_side_by_side(trained):
    for weights, op in (("4bit", "quantized_matmul"), ("dense", "gemv")):
        printed = scripts.run("generate.py", trained / weights, "--tokens", 20, "--prompt", "The if", "--check")
        assert re.search(r"mlx_mittens +\S +[\d.]+ +\S +[\d.]+ +\S +20 ", printed), printed
        assert re.search(rf"{op} +native", printed) and "the same 20 tokens" in printed


@pytest.mark.usefixtures("native", "lenient")
def test_functions_that_mx_compiles_run_on_mx_in_its_run(trained, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("generate", scripts.EXAMPLES / "generate.py")
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "generate", example)  # where its dataclass looks for it
    spec.loader.exec_module(example)
    model, tokenizer = load(str(trained / "dense"))
    compiled = mx.compile(lambda x: mx.softmax(x, axis=-1))

    class Squeezed(type(model)):
        def __call__(self, *arguments, **options):
            return compiled(super().__call__(*arguments, **options))

    model.__class__ = Squeezed
    monkeypatch.setattr(example, "load", lambda name: (model, tokenizer))
    monkeypatch.setattr(sys, "argv", ["generate.py", "it", "--tokens", "4"])
    assert example.main() == 0 and "softmax" in capsys.readouterr().out
    assert not mm.stats(), "those of mx's run"


def test_a_run_of_mx_that_takes_too_long_ends(trained):
    printed = scripts.run("generate.py", trained / "4bit", "--tokens", 40, "--mx-seconds", "0.001", "--kv-bits", 8)
    assert "after 0.001 s" in printed and "the same 1 tokens" in printed


def test_generating_with_a_sampler_and_a_draft(trained):
    sampler = ("--sampler", "temperature=0.8,top_k=20,top_p=0.9,min_p=0.01")
    printed = scripts.run("generate.py", trained / "4bit", "--tokens", 12, *sampler)
    assert re.search(r"sample +native \w+ +\d", printed), printed
    assert "tokens are the same" not in printed
    draft = ("--draft", trained / "4bit", "--kv-bits", 8)
    printed = scripts.run("generate.py", trained / "dense", "--tokens", 12, "--prompt", "The if", *draft, "--check")
    assert "the same 12 tokens" in printed
    (drafted,) = re.findall(r"mlx_mittens +\S +[\d.]+ +\S +[\d.]+ +\S +12, (\d+) drafted", printed)
    assert int(drafted) > 0


@pytest.mark.parametrize(
    "sampler, why",
    [
        ("top_q=1", "'top_q=1': expected NAME=NUMBER, NAME one of temperature, top_k"),
        ("temperature=1,top_p=7", "'top_p=7': expected top_p between 0 and 1"),
    ],
)
def test_a_sampler_that_is_not_understood_is_named(sampler, why):
    result = scripts.try_run("generate.py", "tiny", "--sampler", sampler)
    assert result.returncode == 2 and why in result.stderr
