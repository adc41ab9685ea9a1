"""`bench --predict`: the benchmark's cases on Apple GPUs that are not here, ours beside MLX's own Metal kernels."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from .. import frontend, simulator, specs
from ..apple.chips import Chip
from ..apple.machine_code import NOT_COMPILED
from ..bench.measure import plan
from ..prediction.launches import MARK, MARKED
from ..simulator import EstimatedLaunch, PredictedLaunch, PredictedLaunches
from ..table import Column, show
from .options import UsageError, drawn
from .predictions import Side, as_json, chosen_chips
from .runs import Ending, JsonFile, each_saved, finish, progress
from .simulate import own_launches, peer_side

_COLUMNS = (
    Column("op", left=True),
    Column("case", left=True),
    Column("dtype", left=True),
    Column("chip", left=True),
    Column("us", 1),
    Column("MLX us", 2),
    Column("speedup"),
    Column("limited by", 3),
    Column("MLX by", 4),
)
_ESTIMATED = "~"
_SAYS_ESTIMATED = (
    f"{_ESTIMATED} launches of mx whose kernels MLX's wheel lacks are estimated from their bytes, "
    "and large products from one of their tiles."
)
_REFUSED = ("device", "peer", "resume")


@dataclass(frozen=True)
class Row:
    """A case on a chip; None where a kernel does not compile, or no launch of mx's is known.

    Attributes:
        marks: `MARK` where counts of our launches are missed.
        mlx_marks: The same of MLX's, and `_ESTIMATED` where launches are estimated.
    """

    op: str
    case: str
    dtype: str
    chip: str
    microseconds: float | None
    mlx_microseconds: float | None
    limit: str
    mlx_limit: str
    marks: str = ""
    mlx_marks: str = ""

    @property
    def speedup(self) -> float | None:
        if self.microseconds is None or self.mlx_microseconds is None:
            return None
        return self.mlx_microseconds / self.microseconds


def check(arguments: argparse.Namespace) -> None:
    """Refuses options that would have no effect.

    Raises:
        UsageError: One is given.
    """
    if not arguments.predict:
        if arguments.chip:
            raise UsageError("--chip goes with --predict")
        return
    if not arguments.chip and arguments.model is None:
        raise UsageError("--predict needs --chip NAME, such as m2-max, or all")
    given = [name for name in _REFUSED if getattr(arguments, name) is not None]
    if given:
        raise UsageError(f"--{given[0]} does not go with --predict, which shows MLX's Metal kernels beside ours")


def run(arguments: argparse.Namespace, file: JsonFile, names: Sequence[str]) -> int:
    """Predicts the cases.

    Returns:
        int: The exit status.

    Raises:
        UsageError: The arguments cannot be served.
    """
    if frontend.compiler_problem():
        raise UsageError(frontend.compiler_problem())
    chips = chosen_chips(arguments.chip)
    todo = [item for item in plan(names, "cpu", arguments.quick) if item[1].gpu == "apple" and not item[1].vjp]
    if not todo:
        raise UsageError(
            f"none of the cases of {', '.join(names)} can be predicted" + " with --quick" * arguments.quick
        )
    seed = drawn(arguments.seed)
    rows: list[Row] = []
    entries: list[str] = []

    def save(ending: Ending | None) -> None:
        head = {"predicted": True, "chips": [chip.name for chip in chips], "seed": seed}
        file.write({**head, **progress(ending, len(entries), len(todo))}, "rows", entries, last=ending is not None)

    def name(item: tuple[specs.Op, specs.Case, str]) -> str:
        return f"{item[0].name} {item[1].name} {item[2]}"

    def one(item: tuple[specs.Op, specs.Case, str], _: object) -> None:
        found, entry = _predicted(*item, chips, seed)
        rows.extend(found)
        entries.append(json.dumps(entry))
        mx.clear_cache()

    ending = each_saved(todo, one, name, save, arguments.minutes)
    if rows:
        show(_COLUMNS, [_cells(row) for row in rows], ["33" if (row.speedup or 1) < 1 else "" for row in rows])
        print(_summary(rows, chips))
    if arguments.plot and rows:
        from ..bench.plot import draw_predictions

        shown = [(r.op, r.case, r.dtype, r.chip, r.speedup) for r in rows if r.speedup is not None]
        draw_predictions(shown, arguments.plot, "" if ending.complete else f", {len(entries)} of {len(todo)} cases")
    return finish("bench", ending, file, passed=True)


def _predicted(
    op: specs.Op, case: specs.Case, dtype: str, chips: Sequence[Chip], seed: int
) -> tuple[list[Row], dict[str, Any]]:
    kind = specs.DTYPES[dtype]
    ours = Side.of(own_launches(op, case, kind, chips, seed))
    theirs = peer_side(op, case, kind, chips, seed)
    estimated = _of_mx(op, case, kind, chips, seed) if theirs is None else None
    rows = []
    for chip in chips:
        own, other, marks = ours.predictions.get(chip.name), None, ""
        if theirs is not None:
            other, marks = theirs.predictions.get(chip.name), MARK * theirs.is_missed(chip.name)
        elif estimated is not None:
            launches = estimated.on(chip)
            other, marks = launches.total, _ESTIMATED * any(isinstance(one, EstimatedLaunch) for one in launches)
        rows.append(
            Row(
                op.name,
                case.name,
                dtype,
                chip.name,
                own.microseconds if own else None,
                other.microseconds if other else None,
                own.limit if own else NOT_COMPILED,
                other.limit if other else NOT_COMPILED if theirs is not None else "",
                MARK * ours.is_missed(chip.name),
                marks,
            )
        )
    entry: dict[str, Any] = {"op": op.name, "case": case.name, "dtype": dtype, "mlx_mittens": ours.json()}
    if theirs is not None:
        entry["mlx"] = theirs.json()
    elif estimated is not None:
        times = {chip.name: as_json(estimated.on(chip).total) for chip in chips}
        entry["mlx"] = {"estimated": [str(launch) for launch in estimated], "chips": times}
    return rows, entry


def _of_mx(
    op: specs.Op, case: specs.Case, dtype: mx.Dtype, chips: Sequence[Chip], seed: int
) -> PredictedLaunches[PredictedLaunch | EstimatedLaunch] | None:
    """MLX's launches for the op's twin; None where no launch is known for a part of it."""
    arrays = op.draw(np.random.default_rng(seed), case, dtype)
    mx.eval([array for array in arrays if array is not None])
    with simulator.predicted(chips[0].name, peer="metal") as launches, mx.stream(mx.cpu):
        mx.eval(specs.run(op, op.twin, case, arrays))
    return launches if launches and not launches.left_out and launches.total is not None else None


def _cells(row: Row) -> list[str]:
    number = lambda value, marks: "" if value is None else f"{value:.1f}{marks}"
    speedup = "" if row.speedup is None else f"{row.speedup:.2f}x"
    times = [number(row.microseconds, row.marks), number(row.mlx_microseconds, row.mlx_marks), speedup]
    return [row.op, row.case, row.dtype, row.chip, *times, row.limit, row.mlx_limit]


def _summary(rows: Sequence[Row], chips: Sequence[Chip]) -> str:
    lines = []
    for chip in chips:
        speedups = [row.speedup for row in rows if row.chip == chip.name and row.speedup is not None]
        if speedups:
            mean = statistics.geometric_mean(speedups)
            lines.append(f"{chip.name}: geometric mean {mean:.2f}x MLX's kernels over {len(speedups)} rows")
    marks = {mark for row in rows for mark in (*row.marks, *row.mlx_marks)}
    lines += [text for mark, text in ((MARK, f"{MARKED}."), (_ESTIMATED, _SAYS_ESTIMATED)) if mark in marks]
    return "\n".join([*lines, "Predicted, not measured: docs/apple.md has the errors that were seen."])
