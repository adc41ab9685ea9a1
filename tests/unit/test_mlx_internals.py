"""Features on private parts of MLX turn themselves off where MLX or mlx-lm is not the known one; ops keep working."""

import importlib.metadata
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import zipfile

import pytest
from helpers.tolerances import SUMS

import mlx_mittens as mm
from mlx_mittens import _ext
from mlx_mittens.cli import doctor
from mlx_mittens.patching import targets

# The newest mlx-lm that is accepted, whose code is the one that is known.
PROJECT = (pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text()
OLDEST_MLX_LM, NEWEST_MLX_LM = re.search(r'"mlx-lm>=([\d.]+),<=([\d.]+)"', PROJECT).groups()


def is_older(version: str, than: str) -> bool:
    return [int(part) for part in version.split(".")] < [int(part) for part in than.split(".")]


# A token of a tiny model with a cache, patched and not; prints the largest difference, and the kernels that ran.
TOKENS = """
import json
import mlx.core as mx
mx.set_default_device(mx.cpu)
from mlx_lm.models import llama
from mlx_lm.models.cache import make_prompt_cache
import mlx_mittens as mm
from mlx_mittens import _ext
mx.random.seed(1)
args = llama.ModelArgs(model_type="llama", hidden_size=128, num_hidden_layers=2, intermediate_size=256,
                       num_attention_heads=2, num_key_value_heads=1, rms_norm_eps=1e-5, vocab_size=64)
model = llama.Model(args)
def logits():
    cache = make_prompt_cache(model)
    model(mx.array([[1, 2, 3]]), cache=cache)
    return mx.stack([model(mx.array([[i]]), cache=cache) for i in range(4)])
plain = logits()
with mm.patched():
    patched = logits()
    mx.eval(patched)
kernels = {op: sum(counts["kernels"].values()) for op, counts in mm.stats().items()}
print(json.dumps([mx.abs(patched - plain).max().item(), kernels, _ext.mlx_internals_problem()]))
"""


# Imports all models of the mlx-lm that is found first: a patch looks at loaded modules. Importing olmo ends the process
# where its own package is missing.
ALL_MODELS = """
import importlib, pkgutil, mlx_lm.generate, mlx_lm.models, mlx_lm.server
for module in pkgutil.iter_modules(mlx_lm.models.__path__):
    if module.name != "olmo":
        importlib.import_module("mlx_lm.models." + module.name)
assert mlx_lm.__version__ == {version!r}, mlx_lm.__file__
"""


def tokens(internals: str, before: str = "", folder: pathlib.Path | None = None) -> tuple[float, dict[str, int], str]:
    """The output of TOKENS; `before` runs first, with the packages in `folder` before installed ones."""
    environment = {**os.environ, "MLX_MITTENS_INTERNALS": internals, **({"PYTHONPATH": str(folder)} if folder else {})}
    done = subprocess.run([sys.executable, "-c", before + TOKENS], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return tuple(json.loads(done.stdout))


@pytest.mark.parametrize("internals", ["", "off"])
def test_models_work_with_and_without(internals):
    difference, kernels, problem = tokens(internals)
    assert difference < SUMS
    assert kernels["rms_norm"] and kernels["gemv"]
    assert ("rope_append" in kernels) == (internals == "")  # else mx turns and appends
    assert problem == ("MLX_MITTENS_INTERNALS=off" if internals else "")


def test_the_oldest_mlx_lm_is_patched(tmp_path):
    """Functions that take other arguments in some release would refuse the whole patch."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path)]
    subprocess.run([*command, f"mlx-lm=={OLDEST_MLX_LM}"], check=True)
    zipfile.ZipFile(next(tmp_path.glob("*.whl"))).extractall(tmp_path)
    difference, kernels, problem = tokens("", ALL_MODELS.format(version=OLDEST_MLX_LM), tmp_path)
    assert difference < SUMS
    assert kernels["rms_norm"] and kernels["gemv"] and not problem


def test_they_are_on_here():
    """Of an older mlx-lm some layers have other code."""
    assert _ext.mlx_internals_problem() == ""
    unknown, said = targets.unknown(), doctor._internals()
    assert said["mlx internals"] == "on"
    assert said["mlx-lm layers"].startswith(f"off for {', '.join(unknown)}:" if unknown else "on")
    if not is_older(importlib.metadata.version("mlx-lm"), NEWEST_MLX_LM):
        assert unknown == []


def test_a_layer_that_mlx_lm_does_not_have_is_not_off(monkeypatch):
    layer = next(target for target in targets.TARGETS if target.name == "mlx_lm.models.llama.Attention.__call__")
    known = targets.unknown()
    monkeypatch.setitem(layer.__dict__, "module", "mlx_lm.models.no_such_model")
    assert targets.unknown() == known


def test_doctor_names_a_layer_whose_code_is_another(monkeypatch):
    layer = next(target for target in targets.TARGETS if target.name == "mlx_lm.models.llama.Attention.__call__")
    others = targets.unknown()
    monkeypatch.setitem(layer.__dict__, "text", "0123456789abcdef")
    assert set(targets.unknown()) == {layer.name, *others} and layer.name not in others
    assert re.search(rf"off for .*\b{re.escape(layer.name)}\b", doctor._internals()["mlx-lm layers"])
    with mm.patched():  # the others are patched, and it runs as mlx-lm has it
        assert not layer.is_known()


def test_doctor_says_that_they_are_off(monkeypatch):
    monkeypatch.setattr(_ext, "mlx_internals_problem", lambda: "built for mlx 9.9.9, known is 0.32.4")
    assert doctor._internals()["mlx internals"].startswith("off (built for mlx 9.9.9, known is 0.32.4)")


def test_doctor_says_that_mlx_lm_is_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert doctor._internals()["mlx-lm layers"].startswith("mlx-lm is not installed")
