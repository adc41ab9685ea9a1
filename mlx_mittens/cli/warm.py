"""Compiles what a model will use: its kernels are compiled ahead, so that its first token does not wait for them.

A prompt and a few tokens of the model run patched. A compiler's cache then has the kernels: macOS's own for Metal, the
front end's for NVIDIA GPUs and in the simulator.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .. import _ext
from ..bench import architectures, machine, model_folders
from ..bench.models import DTYPES, FORMATS, layers_for_memory
from ..patching.patches import patched
from ..table import Column, show
from .bench import check_executor, select_device
from .completion import offer
from .options import UsageError, listed
from .runs import quiet_steps

_COLUMNS = (Column("file", left=True), Column("kernel", left=True), Column("seconds"))

# More tokens than the kernels of few rows take, and enough keys that attention is split and its shares are combined.
_PROMPTS = "32,600"

_DTYPES = {**DTYPES, "float32": mx.float32}

Build = Callable[[], nn.Module]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to a parser."""
    names = ", ".join(architectures.ARCHITECTURES)
    model = parser.add_argument(
        "model", metavar="MODEL", help=f"a folder or a hub's name of a model of mlx-lm, or {names}"
    )
    offer(model, lambda _: architectures.ARCHITECTURES)
    parser.add_argument("--device", choices=("cpu", "gpu"), help="where it will run (mx's default device)")
    parser.add_argument("--weights", choices=FORMATS, help="of an architecture that is named (4-bit)")
    parser.add_argument("--dtype", choices=DTYPES, help="of what is not quantized in it (bfloat16)")
    parser.add_argument("--prompt", metavar="N,M", default=_PROMPTS, help=f"tokens of the prompts ({_PROMPTS})")
    parser.add_argument("--tokens", type=int, metavar="N", default=4, help="tokens to decode after each (4)")
    parser.add_argument("--kv-bits", type=int, choices=(4, 8), help="quantize keys and values, as mlx-lm's option does")


def _lengths(text: str) -> list[int]:
    try:
        lengths = [int(length) for length in text.split(",")]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 1:
        raise UsageError(f"--prompt {text}: expected numbers of tokens, 1 or more, such as {_PROMPTS}")
    return lengths


def _has_weights(folder: Path) -> bool:
    """Whether all weights of a model are there: a download may have got no further than some."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return any(folder.glob("model*.safetensors"))
    try:
        return all((folder / name).is_file() for name in json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, AttributeError):  # cut off
        return False


def _dtype(config: dict[str, Any]) -> mx.Dtype:
    inner = config.get("text_config", {})
    names = [part.get(key) for part in (config, inner) for key in ("dtype", "torch_dtype")]
    return next((_DTYPES[name] for name in names if name in _DTYPES), mx.bfloat16)


def _found(arguments: argparse.Namespace) -> tuple[str, Build]:
    """A description of the model's weights, and a function that makes it.

    Raises:
        UsageError: There is no such model, or it cannot be made.
    """
    name, options = arguments.model, [option for option in ("weights", "dtype") if getattr(arguments, option)]
    if name in architectures.ARCHITECTURES:
        weights, dtype = arguments.weights or "4-bit", arguments.dtype or "bfloat16"

        def build() -> nn.Module:
            try:
                layers = layers_for_memory(name, DTYPES[dtype], FORMATS[weights])
            except MemoryError as error:
                raise UsageError(f"{error}: choose smaller --weights, or a smaller model") from None
            return architectures.build(name, DTYPES[dtype], **FORMATS[weights], num_hidden_layers=layers)

        return f"random weights, {weights} {dtype}", build
    if options:
        raise UsageError(f"--{options[0]} is for the name of an architecture: {name} says itself what its weights are")
    if not model_folders.is_one(name):
        known = listed(name, architectures.ARCHITECTURES)
        raise UsageError(f"{name} is no folder and no name of the hub such as mlx-community/NAME; {known}")
    try:
        path = model_folders.check(name)
    except model_folders.ModelError as error:
        raise UsageError(str(error)) from None
    folder, config = path.parent, json.loads(path.read_text(encoding="utf-8"))
    if _has_weights(folder):
        from mlx_lm.utils import load_model

        return "its own weights", lambda: load_model(folder)[0]
    quantization = config.get("quantization")
    if quantization is None and config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method")
        raise UsageError(f"{name} has no weights here, and which layers are {method} is known from them: download it")
    return "random weights", lambda: architectures.from_config(config, _dtype(config), quantization)


def _generate(model: nn.Module, prompts: Sequence[int], tokens: int, kv_bits: int | None) -> None:
    """Runs mlx-lm's loop over prompts of these lengths."""
    from mlx_lm.generate import generate_step

    with quiet_steps(len(prompts) * tokens) as step:
        for length in prompts:
            prompt = mx.arange(length) % 64 + 1
            for _ in generate_step(prompt, model, max_tokens=tokens, kv_bits=kv_bits, quantized_kv_start=0):
                step(f"prompt of {length} tokens")


def run(arguments: argparse.Namespace) -> int:
    """Compiles the kernels of a model.

    Returns:
        int: 0.

    Raises:
        UsageError: The arguments cannot be served.
    """
    prompts = _lengths(arguments.prompt)
    if arguments.tokens < 1:
        raise UsageError(f"--tokens {arguments.tokens}: expected 1 or more")
    try:
        model_folders.mlx_lm_version()
    except model_folders.ModelError as error:
        raise UsageError(str(error)) from None
    select_device(arguments.device)
    weights, build = _found(arguments)
    executor = machine.executor()
    if executor == "native":
        print(f"On the CPU {arguments.model} runs native code: nothing needs compiling.")
        return 0
    check_executor(executor)
    os.environ.setdefault("MLX_MITTENS_QUIET", "1")  # the line would recommend this command
    print(f"{arguments.model}, {weights}, on {executor}", flush=True)
    try:
        model = build()
    except UsageError:
        raise
    except Exception as error:  # mlx-lm's words on a configuration or on weights that it cannot read
        raise UsageError(f"mlx-lm cannot make {arguments.model}: {error}") from None
    before = len(_ext.compiled_kernels())
    start = time.perf_counter()
    try:
        with patched():
            _generate(model, prompts, arguments.tokens, arguments.kv_bits)
    except Exception as error:
        raise UsageError(f"{arguments.model} does not run: {error}") from None
    mx.synchronize()
    total = time.perf_counter() - start
    compiled = _ext.compiled_kernels()[before:]
    if compiled:
        rows = sorted([file, kernel, f"{seconds:.2f}"] for file, kernel, seconds in compiled)
        show(_COLUMNS, rows, [""] * len(rows))
    waited = sum(seconds for _, _, seconds in compiled)
    print(f"{len(compiled)} kernels: waited {waited:.1f} s for the compiler, of {total:.1f} s in all.")
    if (folder := machine.mlx_kernel_cache()) is not None:
        print(f"MLX keeps kernels that it compiled itself in {folder}.")
    return 0
