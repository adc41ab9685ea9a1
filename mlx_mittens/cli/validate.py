"""Validate: whether a model's tokens on our kernels are as good as on mx's, by what float32 takes.

The greedy tokens of mlx-lm's generation loop are compared with and without the patch, and the logits along mx's tokens.
Where tokens differ, the same model in float32 decides.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from dataclasses import asdict
from typing import Any

from .. import _ext
from ..bench import machine, model_folders
from ..bench.model_folders import LoadedModel, ModelError
from ..bench.validation import Difference, Failure, OurFailure, Validation, validate
from .bench import check_executor, select_device
from .options import UsageError
from .runs import JsonFile

# With 200 tokens after it, it is longer than the 256 tokens that mlx-lm's cache has room for at first.
_PROMPT = (
    "A lighthouse keeper writes in her journal about the weather, the ships that pass, and the birds that rest on the "
    "rail. Every evening she lights the lamp, and every morning she puts it out. Today the fog is so thick that she "
    "cannot see the water, but she hears a bell, three times, and then a voice that calls her name. She opens the door "
    "and"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to a parser."""
    parser.add_argument("model", metavar="MODEL", help="a folder in mlx-lm's format, or a name on the Hugging Face hub")
    parser.add_argument("--convert", action="store_true", help="compare mm.nn.convert(model) with mx, not the patch")
    parser.add_argument("--activations", choices=("int8",), help="as of mm.patch(), for ours on a CPU or an M5")
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="to generate (200)")
    parser.add_argument("--prompt", default=_PROMPT, metavar="TEXT", help="what the text begins with (some sentences)")
    parser.add_argument("--device", choices=("cpu", "gpu"), help="where to run (mx's default device)")
    parser.add_argument("--seconds", type=float, default=600.0, metavar="S", help="mx generates about so long (600)")
    parser.add_argument("--json", metavar="FILE", help="write what was found to FILE")


def run(arguments: argparse.Namespace) -> int:
    """Compares, and prints the verdict.

    Returns:
        int: 0 if the tokens are as good as mx's, else 1.

    Raises:
        UsageError: The arguments cannot be served.
    """
    if arguments.tokens < 1 or not arguments.seconds > 0:
        raise UsageError("--tokens takes 1 or more, --seconds more than 0")
    if arguments.activations and arguments.convert:
        raise UsageError("--activations is of the patch: leave out --convert")
    file = JsonFile(arguments.json)
    select_device(arguments.device)
    if arguments.activations:
        try:
            _ext.check_int8_activations("validate")
        except ValueError as error:
            raise UsageError(str(error)) from None
    check_executor(machine.executor())
    os.environ.setdefault("MLX_ENABLE_TF32", "0")  # else mx's products of float32 numbers have 10 bits on some GPUs
    try:
        model_folders.check(arguments.model)
        loaded = model_folders.load(arguments.model)
    except ModelError as error:
        raise UsageError(str(error)) from None
    prompt = list(loaded.tokenizer.encode(arguments.prompt))
    if not prompt:
        raise UsageError(f"--prompt: the tokenizer of {arguments.model} makes no token of {arguments.prompt!r}")
    head: dict[str, Any] = {
        "model": loaded.name,
        "model_type": loaded.family,
        "weights": loaded.weights,
        "dtype": loaded.dtype,
        "compared": "convert" if arguments.convert else "patch",
        "activations": arguments.activations,
        "device": machine.device(),
        "executor": machine.executor(),
        "versions": {**machine.versions(), "mlx_lm": model_folders.mlx_lm_version()},
        "prompt": arguments.prompt,
    }
    print(f"{loaded.name}: {loaded.family}, {loaded.weights}, {loaded.dtype}; {machine.executor()}", flush=True)
    say = lambda text: print(text, file=sys.stderr, flush=True)
    ours = "converted" if arguments.convert else "patched"
    try:
        found = validate(
            loaded.model, prompt, arguments.tokens, arguments.convert, arguments.seconds, say, arguments.activations
        )
    except Failure as failure:
        raise UsageError(f"mx cannot run {loaded.name} on the {machine.device()}: {failure}") from None
    except OurFailure as failure:
        print(f"verdict: worse than mx: the {ours} model failed: {failure}")
        return _status(file, {**head, "passed": False, "failure": str(failure)}, [], passed=False)
    for line in report(found, loaded, ours):
        print(line)
    return _status(file, {**head, **_as_json(found)}, found.differences, found.passed)


def _status(file: JsonFile, head: dict[str, Any], differences: list[Difference], passed: bool) -> int:
    rows = [json.dumps(_finite(asdict(found)) | {"passed": found.passed}) for found in differences]
    file.write(head, "differences", rows, last=True)
    if file.problem:
        print(f"mlx-mittens validate: {file.problem}", file=sys.stderr)
    return 0 if passed and not file.problem else 1


def _as_json(found: Validation) -> dict[str, Any]:
    values = {key: value for key, value in asdict(found).items() if key != "differences"}
    return {"passed": found.passed, **_finite(values)}


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """Values with None in place of numbers that JSON does not have."""
    is_none = lambda value: isinstance(value, float) and not math.isfinite(value)
    return {key: None if is_none(value) else value for key, value in values.items()}


def report(found: Validation, loaded: LoadedModel, ours: str) -> list[str]:
    """Text of a validation; ``ours`` is patched or converted."""
    ran = f"{found.kernels} kernels ran, {found.left_to_mx} calls went to mx"
    lines = [f"{found.prompt_tokens} tokens of the prompt, {found.tokens} generated; {ran}"]
    first = found.first
    if first is None:
        lines.append(f"tokens: the same {found.tokens}")
    else:
        word = lambda token: f"{token} {loaded.tokenizer.decode([token])!r}"
        same = f"tokens: the first {found.same} are the same" if found.same else "tokens: the first one differs"
        lines.append(f"{same}; then {word(first.ours)} {ours}, {word(first.mx)} by mx")
        lines.append(f"float32 takes {_taken(first, word(first.float32), ours)}")
        if not found.repeatable:
            lines.append(f"the {ours} model does not repeat its own tokens: a second run gave others")
    others = [one for one in found.differences if one is not first]
    if others:
        lines.append(f"along mx's tokens {len(others)} more differ: {_counts(others, ours)}")
    lines.append(
        f"logits: at most {found.difference:.2g} apart; from float32's at most {found.error:.2g} {ours}, "
        f"{found.mx_error:.2g} by mx; typically {found.typical_error:.2g} {ours}, {found.typical_mx_error:.2g} by mx"
    )
    return [*lines, f"verdict: {_verdict(found, ours)}"]


def _taken(one: Difference, word: str, ours: str) -> str:
    """Whom float32 agrees with, and how clearly."""
    side = f"the {ours} token" if one.float32 == one.ours else "mx's token" if one.float32 == one.mx else None
    nearer = f"the {ours} one" if one.ahead > 0 else "mx's"
    taken = f"{side}, which is" if side else f"neither, but {word}; of the two {nearer} is"
    settled = ", which is within rounding" if one.ahead < 0 and one.within_rounding else ""
    return f"{taken} {abs(one.ahead):.2g} ahead{settled}"


def _counts(others: list[Difference], ours: str) -> str:
    """How float32 decides on the differences after the first."""
    with_us = sum(one.ahead >= 0 for one in others)
    rounded = sum(one.ahead < 0 and one.within_rounding for one in others)
    counts = ((with_us, f"for the {ours} token"), (rounded, "for mx's within rounding"))
    texts = [f"{count} {what}" for count, what in counts if count]
    failed = len(others) - with_us - rounded
    return "float32 is " + ", ".join(texts + [f"{failed} for mx's clearly"] * (failed > 0))


def _verdict(found: Validation, ours: str) -> str:
    if found.passed:
        nothing = "; none of the kernels ran" if not found.kernels else ""
        return f"as good as mx{nothing}"
    if found.worst is not None:
        place, behind = found.worst.position + 1, -found.worst.ahead
        return (
            f"worse than mx: float32 has the {ours} token {place} {behind:.2g} below mx's, more than rounding explains"
        )
    return (
        f"worse than mx: the {ours} logits are typically {found.typical_error:.2g} from float32's, "
        f"more than {found.allowed_error:.2g}, which twice mx's error or rounding allows"
    )
