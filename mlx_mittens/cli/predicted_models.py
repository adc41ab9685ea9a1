"""`bench --predict --model`: a token, or a prompt, of whole models on Apple GPUs, under `patched()` beside mx.

A model has as few layers as its kinds of layers take to repeat, and a short vocabulary. Their launches are then taken
as often as the published model has layers, and the head has its length.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import mlx.core as mx

from .. import frontend, simulator
from ..apple import agx_compiler
from ..apple.chips import Chip
from ..apple.model import CONSTANTS, Constants, Work, chain
from ..bench import architectures
from ..bench.models import DTYPES, FORMATS
from ..patching.patches import patched
from ..table import Column, show
from .options import UsageError, chosen
from .predictions import chosen_chips
from .runs import Ending, JsonFile, each_saved, finish, progress

CONTEXT = 64  # tokens before the one that is predicted
VOCABULARY = 24832  # rows of the head that are simulated: enough for a plan to know it by
_CHIPS = "m2-max,m4-max"
_TAKEN = ("chip", "json", "minutes", "weights", "dtype", "prompt")
_REFUSED = ("layers", "tokens", "seconds", "memory", "requests", "kv_bits", "quick", "ops", "plot", "seed")
_COLUMNS = (
    Column("model", left=True),
    Column("weights", left=True),
    Column("dtype", left=True),
    Column("phase", left=True),
    Column("chip", left=True),
    Column("us"),
    Column("mx us", 1),
    Column("speedup"),
    Column("launches", 2),
    Column("mx launches", 3),
)


@dataclass(frozen=True)
class Row:
    """A token or a prompt of a model on a chip: launches and microseconds, ours and mx's.

    mx's are None without Mesa's compiler: the package has machine code of its own kernels alone.
    """

    model: str
    weights: str
    dtype: str
    phase: str
    chip: str
    launches: int
    microseconds: float
    mx_launches: int | None
    mx_microseconds: float | None


@dataclass(frozen=True)
class Launched:
    """The launches of a step of the short model.

    A layer may have launches that depend on the one before it. So a token has the layers once and twice.

    Attributes:
        whole: Without its head, with the layers once more than `ends`.
        ends: With the layers `before` times.
        head: The same with the head; None for a prompt, whose last token alone needs one.
        before: How often `ends` has the layers, 0 or 1.
    """

    whole: Sequence[Any]
    ends: Sequence[Any]
    head: Sequence[Any] | None
    before: int

    def of_published(self, name: str, chip: Chip, constants: Constants = CONSTANTS) -> tuple[int, float]:
        """Launches of the published model, and its time in microseconds.

        Args:
            name: The architecture.
            chip: The chip.
            constants: The model's numbers.
        """
        vocabulary = architectures.ARCHITECTURES[name]["vocab_size"]
        time = lambda works: chain(works, chip, constants).microseconds
        whole, ends = (_works(launches, chip) for launches in (self.whole, self.ends))
        outer = ends
        if self.head is not None:
            outer = _works(self.head, chip)
            first = next((i for i, work in enumerate(ends) if work != outer[i]), len(ends))  # of the head's
            longest = max(range(first, len(outer)), key=lambda i: outer[i].lines)
            outer[longest] = times(outer[longest], vocabulary / min(vocabulary, VOCABULARY))
        return self.count(name), time(outer) + self._repeats(name) * (time(whole) - time(ends))

    def count(self, name: str) -> int:
        """Launches of the published model."""
        outer = self.ends if self.head is None else self.head
        return round(len(outer) + self._repeats(name) * (len(self.whole) - len(self.ends)))

    def _repeats(self, name: str) -> float:
        """How often the published model has the layers of the short one, not counting the layers of `ends`."""
        layers = architectures.ARCHITECTURES[name]["num_hidden_layers"]
        return float(layers / architectures.period(name)) - self.before


def _works(launches: Sequence[Any], chip: Chip) -> list[Work]:
    works = [launch.on(chip).work for launch in launches]
    if None in works:
        raise RuntimeError("a kernel does not compile")
    return works


def times(work: Work, factor: float) -> Work:
    """The same work by more threadgroups, or fewer."""
    names = ("threadgroups", "lines", "fragment_lines", "summed_lines")
    return replace(
        work, instructions=factor * work.instructions, **{name: factor * getattr(work, name) for name in names}
    )


def recorded(step: Callable[[], Any], chip: Chip) -> list[Any]:
    """The launches for the arrays that a step gives, by the plan for a chip.

    Raises:
        RuntimeError: An operation has no launch that is known.
    """
    with (
        simulator.enabled(gpu=chip.name, pretend_metal=True),
        simulator.predicted(chip.name, peer="metal") as found,
    ):
        mx.eval(step())
    if found.left_out:
        raise RuntimeError(f"no launch is known for {dict(found.left_out)}: the prediction would lack them")
    return list(found)


def token(model: Any, chip: Chip, is_short: bool = True) -> Launched:
    """The launches of a token after `CONTEXT` others; a model that is not short needs its layers once alone."""
    from mlx_lm.models.cache import make_prompt_cache

    once = len(make_prompt_cache(model))

    def after_context(times: int = 1) -> Any:
        cache = make_prompt_cache(model)
        if len(cache) < times * once:  # as many as the configuration has layers
            cache += [one for _ in range(times - 1) for one in make_prompt_cache(model)]
        with patched():  # on a CPU mx takes minutes
            for tokens in (CONTEXT - 1, 1):  # after the first token no rotating cache grows
                mx.eval(_body(model)(mx.array([[1] * tokens]), cache=cache))
        return cache

    one = mx.array([[1]])
    caches = [after_context() for _ in range(2)]
    ends = recorded(lambda: _body(model)(one, cache=caches[0]), chip)
    head = recorded(lambda: model(one, cache=caches[1]), chip)
    if not is_short:
        return Launched(ends, ends, head, before=1)
    with _layers_of(model, [*_body(model).layers] * 2):
        cache = after_context(2)
        whole = recorded(lambda: _body(model)(one, cache=cache), chip)
    if len(whole) <= len(ends):
        raise RuntimeError("layers that are there twice have no more launches: the prediction would lack them")
    return Launched(whole, ends, head, before=1)


def prompt(model: Any, chip: Chip, tokens: int) -> Launched:
    """The launches of a prompt but for the head, which mlx-lm computes of the last token alone."""
    from mlx_lm.models.cache import make_prompt_cache

    with patched():  # frequencies and masks are computed once
        mx.eval(model(mx.array([[1, 1]]), cache=make_prompt_cache(model)))
    caches = [make_prompt_cache(model) for _ in range(2)]  # while it has its layers
    step = lambda: _body(model)(mx.array([[1] * tokens]), cache=caches.pop())
    whole = recorded(step, chip)
    with _layers_of(model, []):
        return Launched(whole, recorded(step, chip), None, before=0)


@contextlib.contextmanager
def _layers_of(model: Any, given: list[Any]) -> Iterator[None]:
    body = _body(model)
    layers, kinds = body.layers, getattr(body, "layer_types", None)  # a few models go through both side by side
    body.layers = given
    if kinds is not None:
        body.layer_types = [*kinds] * (len(given) // len(layers))
    try:
        yield
    finally:
        body.layers = layers
        if kinds is not None:
            body.layer_types = kinds


def _body(model: Any) -> Any:
    """A model without its head, as mlx-lm's classes name it."""
    return model.backbone if "backbone" in model else model.model


def usual_dtype(weights: str) -> str:
    """The dtype of a model's activations by the format of its weights."""
    return "bfloat16" if weights == "mxfp4" else "float16"  # an embedding of mxfp4 gives bfloat16; both make float32


def short_model(name: str, weights: str, dtype: mx.Dtype) -> Any:
    """The model with few layers and a short head."""
    config = architectures.ARCHITECTURES[name]
    short = {"num_hidden_layers": architectures.period(name), "vocab_size": min(VOCABULARY, config["vocab_size"])}
    return architectures.build(name, dtype, **FORMATS[weights], **short)


def sides(
    name: str, weights: str, dtype: mx.Dtype, chip: Chip, tokens: int = 0, with_mx: bool = True
) -> tuple[Launched, ...]:
    """The launches of a token under `patched()`, and by mx, planned for a chip; of a prompt if it has tokens."""
    model = short_model(name, weights, dtype)
    is_short = len(model.layers) < architectures.ARCHITECTURES[name]["num_hidden_layers"]
    launched = lambda: prompt(model, chip, tokens) if tokens else token(model, chip, is_short)
    with patched():
        ours = launched()
    return (ours, launched()) if with_mx else (ours,)


def run(arguments: argparse.Namespace, file: JsonFile) -> int:
    """Predicts the models that were asked for.

    Returns:
        int: The exit status.

    Raises:
        UsageError: The arguments cannot be served.
    """
    given = vars(arguments)
    unused = [name for name in _REFUSED if given.get(name) not in (None, False)]
    if unused:
        taken = ", ".join(f"--{name}" for name in _TAKEN)
        raise UsageError(f"--{unused[0].replace('_', '-')} does not go with --predict --model, which takes {taken}")
    if frontend.compiler_problem():
        raise UsageError(frontend.compiler_problem())
    chips = chosen_chips(arguments.chip or _CHIPS, ours_alone=True)
    without_mx = agx_compiler.problem()
    names = chosen("--model", arguments.model, architectures.ARCHITECTURES)
    formats = chosen("--weights", given.get("weights", "4-bit"), FORMATS)
    dtypes = chosen("--dtype", given["dtype"], DTYPES) if "dtype" in given else [""]
    tokens = given.get("prompt", 0)
    if "prompt" in given and tokens < 2:
        raise UsageError(f"--prompt {tokens}: expected 2 or more")
    phases = [("a token", 0), *([(f"a prompt of {tokens}", tokens)] if tokens else [])]
    todo = [
        (name, weights, dtype or usual_dtype(weights), phase)
        for name, weights, dtype, phase in itertools.product(names, formats, dtypes, phases)
    ]
    rows: list[Row] = []
    done: list[str] = []

    def save(ending: Ending | None) -> None:
        head = {"predicted": True, "chips": [chip.name for chip in chips], **progress(ending, len(done), len(todo))}
        file.write(head, "rows", [json.dumps(asdict(row)) for row in rows], last=ending is not None)

    def label(item: tuple[str, str, str, tuple[str, int]]) -> str:
        return " ".join((*item[:3], item[3][0]))

    def one(item: tuple[str, str, str, tuple[str, int]], _: object) -> None:
        name, weights, dtype, (phase, count) = item
        found = sides(name, weights, DTYPES[dtype], chips[0], count, with_mx=not without_mx)
        for chip in chips:
            ours, *others = (side.of_published(name, chip) for side in found)
            mx_own = others[0] if others else (None, None)
            rows.append(Row(name, weights, dtype, phase, chip.name, *ours, *mx_own))
        done.append(label(item))
        mx.clear_cache()

    ending = each_saved(todo, one, label, save, arguments.minutes)
    if rows:
        styles = ["33" if (row.mx_microseconds or math.inf) < row.microseconds else "" for row in rows]
        show(_COLUMNS, [_cells(row) for row in rows], styles)
        print(
            f"Under mm.patch(), planned for {chips[0].name}. mx's small operations are estimated from their bytes.\n"
            "Predicted, not measured: docs/apple.md has the errors that were seen."
        )
        if without_mx:
            print(f"mx's own kernels are not predicted: {without_mx}, on Linux.")
    return finish("bench", ending, file, passed=True)


def _cells(row: Row) -> list[str]:
    of_mx = ["", ""]
    if row.mx_microseconds is not None:
        of_mx = [f"{row.mx_microseconds:.0f}", f"{row.mx_microseconds / row.microseconds:.2f}x"]
    counts = [str(row.launches), "" if row.mx_launches is None else str(row.mx_launches)]
    return [row.model, row.weights, row.dtype, row.phase, row.chip, f"{row.microseconds:.0f}", *of_mx, *counts]
