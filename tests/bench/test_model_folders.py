"""Models of the user's: from folders and from the hub's cache, and messages on models that cannot be loaded."""

import importlib.util
import io
import json
import os
import pathlib
import shutil
import subprocess

import huggingface_hub
import mlx.core as mx
import pytest
from helpers import scripts, tiny
from huggingface_hub import errors as hub

from mlx_mittens.bench import model_folders, models
from mlx_mittens.bench.model_folders import ModelError
from mlx_mittens.cli.main import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.save(tmp_path_factory.mktemp("models") / "4bit", "qwen3-0.6b", mx.bfloat16, 4)


def said(capsys, *arguments):
    """The commands' message on a model that they refuse: the same from both."""
    texts = []
    for command in (["validate", *arguments], ["bench", "--model", *arguments]):
        assert main(command) == 2
        texts.append(capsys.readouterr().err.strip())
    reason = texts[0].removeprefix("mlx-mittens validate: ")
    assert texts[1] == f"mlx-mittens bench: --model {arguments[0]}: {reason}"
    return reason


def test_what_a_folder_holds(folder, tmp_path):
    model_folders.check(str(folder))
    loaded = model_folders.load(str(folder))
    assert (loaded.family, loaded.weights, loaded.dtype) == ("qwen3", "4-bit", "bfloat16")
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("a model")) == "a model"
    dense = model_folders.load(str(tiny.save(tmp_path / "dense", "llama-3.2-1b", mx.float16)))
    assert (dense.family, dense.weights, dense.dtype) == ("llama", "dense", "float16")


def test_a_name_on_the_hub(folder, tmp_path):
    repository = tmp_path / "hub" / "models--someone--small"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    (repository / "snapshots").mkdir()
    (repository / "snapshots" / ("0" * 40)).symlink_to(folder)
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    command = scripts.command("validate", "someone/small", "--tokens", 4)
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("someone/small: qwen3, 4-bit, bfloat16; ") and "as good as mx" in done.stdout


def changed(folder, tmp_path, **changes):
    """A copy of a folder whose configuration is another; without a key where it is None."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).symlink_to(path)
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    (copy / "config.json").unlink()
    (copy / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return copy


def test_a_folder_without_a_configuration(tmp_path, capsys):
    assert said(capsys, str(tmp_path)).startswith(
        f"the folder {tmp_path} has no config.json: expected a model in mlx-lm"
    )


def test_a_configuration_that_is_none(folder, tmp_path, capsys):
    assert "config.json has no model_type" in said(capsys, str(changed(folder, tmp_path, model_type=None)))
    (tmp_path / "copy" / "config.json").write_text("{")
    assert "config.json cannot be read" in said(capsys, str(tmp_path / "copy"))


def test_an_architecture_that_mlx_lm_lacks(folder, tmp_path, capsys):
    text = said(capsys, str(changed(folder, tmp_path, model_type="llama_9")))
    assert "has no model of the type 'llama_9'" in text and text.startswith("mlx-lm ")


def test_code_of_the_model_is_not_run(folder, tmp_path, capsys):
    copy = changed(folder, tmp_path, model_file="model.py")
    (copy / "model.py").write_text("raise SystemExit('it ran')")
    assert "brings its own code, model.py, which is not run" in said(capsys, str(copy))


def test_weights_that_are_missing_or_do_not_fit(folder, tmp_path, capsys):
    copy = changed(folder, tmp_path, hidden_size=192)
    assert main(["validate", str(copy)]) == 2
    assert f"cannot load {copy}: ValueError: " in capsys.readouterr().err
    (copy / "model.safetensors").unlink()
    assert main(["validate", str(copy)]) == 2
    assert "No safetensors found" in capsys.readouterr().err


def test_a_file_and_paths_that_lead_nowhere(tmp_path, capsys):
    (tmp_path / "model.gguf").touch()
    assert said(capsys, str(tmp_path / "model.gguf")).endswith(
        "is a file: expected a folder, or a name on the Hugging Face hub"
    )
    assert said(capsys, "./no/model").startswith(
        "there is no folder ./no/model; a name on the Hugging Face hub is OWNER/NAME"
    )
    assert main(["validate", "model"]) == 2
    assert "there is no folder model;" in capsys.readouterr().err


def test_the_nearest_folder_is_suggested(folder, tmp_path, capsys, monkeypatch):
    """Of the folders that hold a model."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    for name in ("tiny/4bit", "tiny/4bits"):
        pathlib.Path(name).mkdir(parents=True)
    shutil.copy(folder / "config.json", "tiny/4bit")
    assert said(capsys, "tiny/4bitt").startswith("there is no folder tiny/4bitt (did you mean tiny/4bit?), and ")
    assert said(capsys, "./tiny/4bitt").startswith("there is no folder ./tiny/4bitt (did you mean tiny/4bit?); a name")
    assert "did you mean" not in said(capsys, "tiny/else")


def test_the_hub_without_a_network(monkeypatch, capsys):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    expected = "there is no folder someone/none, and HF_HUB_OFFLINE is set and its cache has no model of this name"
    assert said(capsys, "someone/none") == expected


@pytest.mark.parametrize(
    "error, reason",
    [
        (hub.LocalEntryNotFoundError, "the hub cannot be reached and its cache has no model of this name"),
        (hub.GatedRepoError, "its owner has to give you access on the hub"),
        (hub.RepositoryNotFoundError, "the Hugging Face hub has no model of this name, or it is private"),
        (hub.RemoteEntryNotFoundError, "on the Hugging Face hub has no config.json"),
        (hub.HfHubHTTPError, "the Hugging Face hub said: "),
    ],
)
def test_what_the_hub_says(monkeypatch, capsys, error, reason):
    def refuse(*_, **__):
        raise error.__new__(error)  # its arguments differ between versions

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    monkeypatch.setattr(model_folders, "_reaches_hub", lambda: True)
    assert reason in said(capsys, "someone/none")


@pytest.mark.parametrize("reached", [True, False])
def test_a_hub_that_cannot_be_reached_is_not_asked(monkeypatch, capsys, tmp_path, reached):
    """Its library would try for half a minute before anybody learns that a folder was misspelt."""
    asked = []

    def connect(address, timeout):
        assert address == ("huggingface.co", 443) and timeout < 10
        if not reached:
            raise OSError
        return io.BytesIO()  # which can be closed

    def download(name, file, local_files_only):
        asked.append((name, local_files_only))
        raise hub.LocalEntryNotFoundError.__new__(hub.LocalEntryNotFoundError)

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "https://huggingface.co")
    monkeypatch.setattr(model_folders.urllib.request, "getproxies", dict)
    monkeypatch.setattr(model_folders.socket, "create_connection", connect)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    expected = "there is no folder tiny/5bit, and the hub cannot be reached and its cache has no model of this name"
    assert said(capsys, "tiny/5bit") == expected
    assert asked == [("tiny/5bit", not reached)] * 2


def test_without_mlx_lm(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "mlx_lm" else find(name, *rest)
    )
    assert said(capsys, "someone/none") == 'mlx-lm is not installed: pip install "mlx-mittens[lm]"'
    assert main(["run", "mlx_lm.generate"]) == 2
    assert capsys.readouterr().err == 'mlx-mittens run: mlx-lm is not installed: pip install "mlx-mittens[lm]"\n'


def test_how_many_tokens_a_model_knows(folder):
    loaded = model_folders.load(str(folder)).model
    assert models.vocabulary(loaded) == 320
    del loaded.args.vocab_size
    assert models.vocabulary(loaded) == 320


def test_the_errors_are_for_people():
    with pytest.raises(ModelError, match="OWNER/NAME"):
        model_folders.check("a b")
