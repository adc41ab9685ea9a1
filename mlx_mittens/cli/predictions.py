"""Predicted times on Apple GPUs, ours beside MLX's: the part that `simulate` and `bench --predict` share."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..apple import agx_compiler, shipped
from ..apple.chips import Chip, chips, find_chip
from ..apple.expected import expected_error
from ..apple.machine_code import NOT_COMPILED
from ..apple.model import Prediction
from ..prediction.launches import MARK, MARKED, PredictedLaunch, predict_launches, total
from ..prediction.matrix_units import COUNTED
from ..simulator import Launch
from ..table import aligned
from .completion import offer_list
from .options import UsageError


def add_chip_argument(parser: argparse.ArgumentParser) -> None:
    action = parser.add_argument(
        "--chip", metavar="NAME", help="predict the time on an Apple GPU: m1, m2-max, ..., some with commas, or all"
    )
    offer_list(action, lambda _: [*chips(), "all"])


def chosen_chips(text: str, ours_alone: bool = False) -> list[Chip]:
    """The chips that a command line names.

    Args:
        text: Names, with commas, or ``all``.
        ours_alone: Whether kernels of this package alone are asked for, whose machine code it has.

    Raises:
        UsageError: There is no such chip, or nothing here compiles for Apple GPUs.
    """
    try:
        found = list(chips().values()) if text == "all" else [find_chip(name) for name in text.split(",")]
    except ValueError as error:
        raise UsageError(f"{error}, or all") from None
    if agx_compiler.problem() and not (ours_alone and shipped.is_there()):
        raise UsageError(agx_compiler.problem())
    return found


@dataclass(frozen=True)
class Side:
    """The launches of one call, by us or by MLX, on each chip.

    Attributes:
        launches: The launches by chip, each on its chip.
        predictions: The time of all of them, by chip; none where one does not compile.
    """

    launches: dict[str, list[PredictedLaunch]]
    predictions: dict[str, Prediction]

    @classmethod
    def of(cls, planned: Sequence[tuple[Sequence[Chip], Sequence[dict[str, Any]]]]) -> Side:
        """Compiles the kernels once, and predicts for each chip.

        Args:
            planned: Chips whose plans come to the same launches, and these as the simulator recorded them.
        """
        launches, predictions = {}, {}
        for chosen, recorded in planned:
            compiled = predict_launches([*map(Launch.of, recorded)], chosen[0])
            for chip in chosen:
                launches[chip.name] = [launch.on(chip) for launch in compiled]
                prediction = total(launches[chip.name])
                if prediction is not None:
                    predictions[chip.name] = prediction
        return cls(launches, predictions)

    def is_missed(self, chip: str) -> bool:
        """Whether the counts of a launch are missed by so much that the time is marked."""
        return any(launch.is_missed for launch in self.launches.get(chip, ()))

    def kernels(self) -> list[dict[str, PredictedLaunch]]:
        """One entry for each kernel and number of threads, with its launch on each chip that has it."""
        found: dict[tuple[tuple[str, int], int], dict[str, PredictedLaunch]] = {}
        for chip, launches in self.launches.items():
            times: Counter[tuple[str, int]] = Counter()
            for launch in launches:
                kernel = launch.launch.kernel, math.prod(launch.launch.threads)  # which its registers depend on
                found.setdefault((kernel, times[kernel]), {})[chip] = launch
                times[kernel] += 1
        return [*found.values()]

    def json(self) -> dict[str, Any]:
        """The kernels and the times, as JSON has them."""
        kernels = []
        for by_chip in self.kernels():
            launch = next(iter(by_chip.values()))
            entry: dict[str, Any] = {"file": launch.launch.file, "kernel": launch.launch.kernel}
            if launch.code is None:
                entry["problem"] = COUNTED if launch.is_counted else launch.problem
                if launch.is_counted:
                    entry["chips"] = {name: as_json(each.prediction) for name, each in by_chip.items()}
            else:
                code = launch.code
                entry |= {
                    "half_registers": code.half_registers,
                    "threads_a_core": code.threads_a_core,
                    "spills": code.spills,
                    "fills": code.fills,
                    "loops_taken_to_run_once": launch.uncounted,
                    "counts_missed_by": launch.mismatch,
                    "chips": {name: as_json(each.prediction) for name, each in by_chip.items()},
                }
            kernels.append(entry)
        return {"kernels": kernels, "chips": {name: as_json(p) for name, p in self.predictions.items()}}


def as_json(prediction: Prediction | None) -> dict[str, Any]:
    """A prediction as JSON has it."""
    if prediction is None:
        return {}
    return {"microseconds": prediction.microseconds, "limit": prediction.limit, "terms": prediction.terms.named()}


def _kernel_lines(by: str, side: Side, chosen: Sequence[Chip]) -> list[str]:
    lines = []
    kernels = side.kernels()
    for by_chip in kernels:
        launch = next(iter(by_chip.values()))
        some = f" ({', '.join(by_chip)})" if len(by_chip) < len(chosen) else ""
        lines.append(f"{by}: {launch.launch.kernel}{some}")
        if launch.code is None:
            known = [COUNTED] if launch.is_counted else [NOT_COMPILED, *launch.problem.splitlines()[1:4]]
            lines += [f"  {line}" for line in known]
            continue
        code = launch.code
        spilled = f", {code.spills} spills, {code.fills} fills" if code.spills or code.fills else ""
        lines.append(f"  {code.half_registers} half registers, {code.threads_a_core} threads a core{spilled}")
        if len(chosen) == 1 and launch.prediction is not None and len(kernels) > 1:
            lines.append(f"  {launch.prediction.microseconds:.1f} us, limited by {launch.prediction.limit}")
        if launch.uncounted:
            lines.append(f"  loops that only compute, taken to run once: {launch.uncounted}")
        if launch.is_missed:
            lines.append(f"  the simulator's counts are missed by {launch.mismatch:.0%}")
    return lines


def _cells(side: Side, chip: str) -> list[str]:
    prediction = side.predictions.get(chip)
    if prediction is None:
        return [NOT_COMPILED if side.launches.get(chip) else "", ""]
    return [f"{prediction.microseconds:.1f}{MARK * side.is_missed(chip)}", prediction.limit]


def show(op: str, chosen: Sequence[Chip], ours: Side, theirs: Side | None) -> None:
    """Prints registers, and a line for each chip.

    Args:
        op: The op's name, whose kind of work has errors that were seen.
        chosen: The chips.
        ours: Our launches.
        theirs: MLX's; None if they were not asked for.
    """
    print("\nPredicted, not measured:")
    lines = _kernel_lines("mlx_mittens", ours, chosen) + (_kernel_lines("MLX", theirs, chosen) if theirs else [])
    print("\n".join(f"  {line}" for line in lines))
    rows = [["chip", "limited by", "us"]]
    if theirs:
        rows = [["chip", "ours limited by", "MLX's by", "us", "MLX us", "speedup"]]
    for chip in chosen:
        own = ours.predictions.get(chip.name)
        us, limit = _cells(ours, chip.name)
        if theirs is None:
            rows.append([chip.name, limit, us])
            continue
        other = theirs.predictions.get(chip.name)
        their_us, their_limit = _cells(theirs, chip.name)
        ratio = f"{other.microseconds / own.microseconds:.2f}" if own and other else ""
        rows.append([chip.name, limit, their_limit, us, their_us, ratio])
    print("\n" + aligned(rows, left=3 if theirs else 2))
    if any(side.is_missed(chip.name) for side in (ours, theirs) if side for chip in chosen):
        print(MARKED)
    try:
        error = expected_error(op)
    except ValueError:  # an op of a kind that nobody has published measurements of
        return
    seen = f"The model's errors on published times, {error.kind}:\n"
    seen += f"half of {error.points} within {error.median:.0f} %, nine in ten within {error.nine_in_ten:.0f} %"
    if theirs and error.ratio is not None:
        seen += f";\nhalf of the ratios within {error.ratio:.0f} %"
    print(seen + ".")
