"""The warm command, on models that are small enough to simulate."""

import json
import pathlib
import subprocess
import sys

import mlx.core as mx
import pytest
from helpers import tiny
from mlx_lm.utils import save_model

import mlx_mittens as mm
from mlx_mittens import _ext
from mlx_mittens.bench import architectures, machine
from mlx_mittens.cli import warm
from mlx_mittens.cli.main import main

SHORT = ["--prompt", "20", "--tokens", "2"]


@pytest.fixture
def llama(tmp_path, lenient):
    """A folder with the configuration of a tiny Llama of 4 bits, without weights."""
    config = {**tiny.config("llama-3.2-1b"), "torch_dtype": "float16"}
    config["quantization"] = {"group_size": 64, "bits": 4, "lm_head": False}
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def kernels(text):
    """The kernels of the table that was printed."""
    lines = [line.split() for line in text.splitlines()]
    return {f"{line[0]}:{line[1]}" for line in lines if len(line) == 3 and line[0].endswith(".metal")}


# Warms a model in a process of its own, in the simulator: prints the launches there.
WARM = """
import json, sys
import mlx_mittens as mm
from mlx_mittens import _ext
from mlx_mittens.cli.main import main
with mm.simulator.enabled():
    status = main(["warm", *sys.argv[1:]])
    launched = sorted(_ext.launched_kernels())
print(json.dumps({"status": status, "launched": launched}), file=sys.stderr)
"""


def in_simulator(*arguments):
    command = [sys.executable, "-c", WARM, *map(str, arguments)]
    done = subprocess.run(command, cwd=pathlib.Path(__file__).parents[1], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(done.stderr.splitlines()[-1])


def test_the_kernels_of_a_model_are_compiled_and_listed(llama):
    text, found = in_simulator(llama, *SHORT)
    assert found["status"] == 0
    assert kernels(text) == set(found["launched"])
    ops = {name.partition(":")[0] for name in found["launched"]}
    assert {"matmul/qmv.metal", "norm/rms_norm.metal", "cache/rope_append.metal"} <= ops
    assert all(name.endswith("_float16") for name in found["launched"]), "the type of the configuration"
    lines = text.splitlines()
    assert lines[0] == f"{llama}, random weights, on simulator"
    assert lines[-1].startswith(f"{len(found['launched'])} kernels: waited ")


def test_quantized_keys_and_few_rows_take_other_kernels(llama):
    text, _ = in_simulator(llama, "--prompt", "4", "--tokens", "2", "--kv-bits", "4")
    found = kernels(text)
    assert any("attention_packed.metal" in name for name in found)
    assert "matmul/qmv.metal:quantized_matmul_qmv_4bit_4_float16" in found, found


def test_on_a_cpu_nothing_needs_compiling(llama, capsys):
    before = _ext.compiled_kernels()
    assert main(["warm", str(llama), "--device", "cpu"]) == 0
    assert capsys.readouterr().out == f"On the CPU {llama} runs native code: nothing needs compiling.\n"
    assert _ext.compiled_kernels() == before


def test_weights_that_are_there_are_taken(llama, monkeypatch):
    arguments = lambda *more: warm_arguments(str(llama), *more)
    said, build = warm._found(arguments())
    assert said == "random weights"
    model = build()
    assert (
        model.model.layers[0].mlp.up_proj.bits == 4 and model.model.layers[0].input_layernorm.weight.dtype == mx.float16
    )
    model.model.norm.weight = mx.full(model.model.norm.weight.shape, 3.0, mx.float16)
    save_model(llama, model)
    said, build = warm._found(arguments())
    assert said == "its own weights" and build().model.norm.weight[0].item() == 3
    index = llama / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}))
    assert warm._found(arguments())[0] == "random weights", "half of a download"


def warm_arguments(*arguments):
    import argparse

    parser = argparse.ArgumentParser()
    warm.add_arguments(parser)
    return parser.parse_args(arguments)


@pytest.mark.parametrize(("weights", "dtype"), [("8-bit", "float16"), ("half", "bfloat16")])
def test_architectures_have_the_format_that_is_asked_for(monkeypatch, weights, dtype):
    monkeypatch.setitem(architectures.ARCHITECTURES, "llama-3.2-1b", tiny.config("llama-3.2-1b"))
    said, build = warm._found(warm_arguments("llama-3.2-1b", "--weights", weights, "--dtype", dtype))
    assert said == f"random weights, {weights} {dtype}"
    model = build()
    assert getattr(model.model.layers[0].mlp.up_proj, "bits", None) == {"8-bit": 8, "half": None}[weights]
    assert model.model.norm.weight.dtype == getattr(mx, dtype)


def test_an_architecture_that_does_not_fit(native, monkeypatch, capsys):
    monkeypatch.setattr(machine, "available_bytes", lambda: 2 << 20)
    with mm.simulator.enabled():
        assert main(["warm", "llama-3.2-1b"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("mlx-mittens warm: 1 of the layers of llama-3.2-1b need more than half of the memory")
    assert said.endswith(", 0.0 GB: choose smaller --weights, or a smaller model\n")


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_random_weights_of_other_quantizations_are_finite(mode):
    bits, group_size = (8 if mode == "mxfp8" else 4), (16 if mode == "nvfp4" else 32)
    quantization = {"bits": bits, "group_size": group_size, "mode": mode}
    model = architectures.from_config(tiny.config("llama-3.2-1b"), mx.float16, quantization)
    assert model.model.layers[0].mlp.up_proj.mode == mode
    assert mx.isfinite(model(mx.array([[1, 2, 3]]))).all().item()


def test_a_name_of_the_hub_takes_its_configuration_alone(llama, monkeypatch):
    import huggingface_hub

    asked = []

    def fetch(name, file, local_files_only):
        asked.append((name, file))
        return str(llama / file)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fetch)
    assert warm._found(warm_arguments("someone/tiny-llama"))[0] == "random weights"
    assert asked == [("someone/tiny-llama", "config.json")]


def unsupported(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "llama_9"}))
    return folder


def without_sizes(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def packed_elsewhere(folder):
    config = {**tiny.config("llama-3.2-1b"), "quantization_config": {"quant_method": "awq"}}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "nowhere is no folder and no name of the hub such as mlx-community/NAME; there are llama-3.2-1b"),
        (["FOLDER/.."], "has no config.json"),
        (["FOLDER", "--weights", "4-bit"], "--weights is for the name of an architecture"),
        (["FOLDER", "--prompt", "0"], "--prompt 0: expected numbers of tokens"),
        (["FOLDER", "--prompt", "a,2"], "--prompt a,2: expected numbers of tokens"),
        (["FOLDER", "--tokens", "0"], "--tokens 0: expected 1 or more"),
        ([unsupported], "has no model of the type 'llama_9', which FOLDER is"),
        ([without_sizes], "mlx-lm cannot make FOLDER: "),
        ([packed_elsewhere], "which layers are awq is known from them: download it"),
    ],
)
def test_what_cannot_be_served_is_said(llama, arguments, words, capsys):
    given = [str(one(llama)) if callable(one) else one.replace("FOLDER", str(llama)) for one in arguments]
    with mm.simulator.enabled():
        assert main(["warm", *given]) == 2
    assert words.replace("FOLDER", str(llama)) in capsys.readouterr().err


@pytest.mark.parametrize("folder", [None, "/of/mine"])
def test_where_mlx_keeps_its_kernels(monkeypatch, capsys, llama, folder):
    """MLX compiles some at run time for an NVIDIA GPU, and by default keeps them where a restart deletes them."""
    monkeypatch.delenv("MLX_PTX_CACHE_DIR", raising=False)
    assert machine.mlx_kernel_cache() is None
    if folder:
        monkeypatch.setenv("MLX_PTX_CACHE_DIR", folder)
    monkeypatch.setattr(machine, "executor", lambda: "cuda")
    monkeypatch.setattr(warm, "check_executor", lambda executor: None)
    assert main(["warm", str(llama), *SHORT]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("MLX keeps kernels that it compiled itself in ")
    assert folder in line if folder else "set MLX_PTX_CACHE_DIR" in line
