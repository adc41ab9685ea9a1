"""Models in mlx-lm's format, from a folder or by their name on the Hugging Face hub: checked, then loaded."""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import socket
import urllib.parse
import urllib.request
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

__all__ = ["LoadedModel", "ModelError", "check", "is_one", "load", "mlx_lm_version"]

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_CONNECTION_SECONDS = 3.0  # after which the hub is taken for one that cannot be reached
_FORMAT = "expected a model in mlx-lm's format, as mlx_lm.convert writes it"


class ModelError(Exception):
    """A model that cannot be loaded, with a message for people."""


@dataclass(frozen=True)
class LoadedModel:
    """A model of mlx-lm's with its tokenizer.

    Attributes:
        name: The folder or the name on the hub, as it was given.
        model: The model, in the types of its files.
        tokenizer: mlx-lm's wrapper of the tokenizer.
        family: The model type of its configuration.
        weights: How its weights are stored: ``4-bit``, ``mxfp4``, ``dense``.
        dtype: The type of most of its floating-point numbers, which its activations share.
    """

    name: str
    model: nn.Module
    tokenizer: Any
    family: str
    weights: str
    dtype: str


def mlx_lm_version() -> str:
    """The version of the installed mlx-lm.

    Raises:
        ModelError: There is none.
    """
    if importlib.util.find_spec("mlx_lm") is None:
        raise ModelError('mlx-lm is not installed: pip install "mlx-mittens[lm]"')
    return importlib.metadata.version("mlx-lm")


def is_one(text: str) -> bool:
    """Whether a text is a path that exists, is written as a path, or may be a name on the hub."""
    return os.path.exists(os.path.expanduser(text)) or os.sep in text or text.startswith((".", "~"))


def check(name: str) -> Path:
    """Reads a model's configuration, and downloads nothing else of a model on the hub.

    Returns:
        Path: Its config.json. The weights are beside it, if they are on this machine.

    Raises:
        ModelError: There is no such model, or the installed mlx-lm cannot load it.
    """
    version = mlx_lm_version()
    folder = Path(name).expanduser()
    if folder.is_dir():
        path = folder / "config.json"
        if not path.is_file():
            raise ModelError(f"the folder {name} has no config.json: {_FORMAT}")
    elif folder.exists():
        raise ModelError(f"{name} is a file: expected a folder, or a name on the Hugging Face hub")
    else:
        path = _downloaded(name)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"{path} has no model_type: {_FORMAT}")
    if config.get("model_file") is not None:
        raise ModelError(f"{name} brings its own code, {config['model_file']}, which is not run: only mlx-lm's models")
    try:
        importlib.import_module("mlx_lm.utils")._get_classes(config)  # which imports the model's module alone
    except ValueError:
        raise ModelError(
            f"mlx-lm {version} has no model of the type {config['model_type']!r}, which {name} is: a later mlx-lm may"
        ) from None
    return path


def _downloaded(name: str) -> Path:
    """The configuration of a model on the hub, from the hub's cache where it is there."""
    if not _HUB_NAME.fullmatch(name):
        here = f"there is no folder {name}{_nearest_folder(name)}"
        raise ModelError(f"{here}; a name on the Hugging Face hub is OWNER/NAME")
    from huggingface_hub import errors as hub
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json", local_files_only=not _reaches_hub()))
    except hub.LocalEntryNotFoundError:
        offline = "HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else "the hub cannot be reached"
        reason = f"{offline} and its cache has no model of this name"
    except hub.GatedRepoError:
        reason = "its owner has to give you access on the hub, and `hf auth login` has to be run"
    except hub.RepositoryNotFoundError:
        reason = "the Hugging Face hub has no model of this name, or it is private"
    except hub.EntryNotFoundError:
        raise ModelError(f"{name} on the Hugging Face hub has no config.json: {_FORMAT}") from None
    except (hub.HfHubHTTPError, OSError, ValueError) as error:
        reason = f"the Hugging Face hub said: {_first_line(error)}"
    raise ModelError(f"there is no folder {name}{_nearest_folder(name)}, and {reason}")


def _reaches_hub() -> bool:
    """Whether a connection to the hub can be made. The hub's library tries for half a minute before it says so."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or urllib.request.getproxies():  # a proxy knows hosts that this machine does not
        return not constants.HF_HUB_OFFLINE
    endpoint = urllib.parse.urlsplit(constants.ENDPOINT)
    port = endpoint.port or (80 if endpoint.scheme == "http" else 443)
    try:
        socket.create_connection((endpoint.hostname or "", port), timeout=_CONNECTION_SECONDS).close()
    except OSError:
        return False
    return True


def _nearest_folder(name: str) -> str:
    """A clause that suggests the folder of this machine whose name is most like it, or an empty string."""
    path = Path(name).expanduser()
    try:
        beside = [entry.name for entry in os.scandir(path.parent) if (Path(entry) / "config.json").is_file()]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, beside, n=1)
    return f" (did you mean {path.parent / near[0]}?)" if near else ""


def load(name: str) -> LoadedModel:
    """Loads a model that `check` has let pass; one on the hub is downloaded first.

    Raises:
        ModelError: Files are missing, or do not fit mlx-lm's class.
    """
    version = mlx_lm_version()
    from mlx_lm import load as load_by_mlx_lm

    folder = Path(name).expanduser()
    try:
        loaded: Any = load_by_mlx_lm(str(folder) if folder.is_dir() else name, return_config=True)
        model, tokenizer, config = loaded
    except Exception as error:  # of any kind: it depends on the fault of the files
        raise ModelError(
            f"mlx-lm {version} cannot load {name}: {type(error).__name__}: {_first_line(error)}"
        ) from error
    return LoadedModel(name, model, tokenizer, config["model_type"], _weights(model), _dtype(model))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or "no message").splitlines()[0]


def _weights(model: nn.Module) -> str:
    """The format of most quantized weights, by their number."""
    formats: Counter[str] = Counter()
    for _, module in model.named_modules():
        bits, mode = getattr(module, "bits", None), getattr(module, "mode", "affine")
        if isinstance(bits, int) and "weight" in module:
            formats[f"{bits}-bit" if mode == "affine" else str(mode)] += module["weight"].nbytes
    return formats.most_common(1)[0][0] if formats else "dense"


def _dtype(model: nn.Module) -> str:
    sizes: Counter[str] = Counter()
    for array in dict(tree_flatten(model.parameters())).values():
        if mx.issubdtype(array.dtype, mx.floating):
            sizes[str(array.dtype).removeprefix("mlx.core.")] += array.size
    return sizes.most_common(1)[0][0] if sizes else "none"
