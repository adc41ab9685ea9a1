"""Work of whole products, from threadgroups that were simulated at two numbers of columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import mlx.core as mx

import mlx_mittens as mm
from mlx_mittens.apple.chips import Chip, find_chip
from mlx_mittens.apple.model import Instructions, Work
from mlx_mittens.simulator import PredictedLaunch

# By name: the type, and its name in Metal.
TYPES = {"float16": (mx.float16, "half"), "bfloat16": (mx.bfloat16, "bfloat16_t")}
# Columns that are simulated: work grows by a constant with each more.
SIMULATED = (256, 512)
# Microseconds, and the note behind them.
Noted = tuple[float, str]
_ANY_CHIP = "m1"  # the launches that are extended do not depend on it


def launches(y: mx.array) -> Sequence[PredictedLaunch]:
    """The launches of an array of ours."""
    with mm.simulator.enabled(gpu=_ANY_CHIP), mm.simulator.predicted(_ANY_CHIP) as found, mm.strict():
        mx.eval(y)
    return list(found)


def work_on(found: PredictedLaunch, chip: Chip) -> Work:
    """The work of a launch on a chip."""
    work = found.on(chip).work
    if work is None:
        raise RuntimeError(f"{found.launch.kernel} does not compile")
    return work


def at_columns(pair: Sequence[Work], columns: int) -> list[tuple[float, Work]]:
    """Works at the simulated columns, with the weights by which they make the work at others."""
    first, second = SIMULATED
    share = (columns - first) / (second - first)
    return [(1 - share, pair[0]), (share, pair[1])]


def blend(parts: Sequence[tuple[float, Work]], threadgroups: float, lines: float) -> Work:
    """The work of one launch over several kinds of threadgroups.

    Args:
        parts: The number of threadgroups of each kind, with a work of that kind.
        threadgroups: Of the launch.
        lines: Distinct lines of memory that it moves.
    """
    total = Instructions()
    summed = rounds = 0.0
    for count, work in parts:
        total = total + work.instructions * (count / work.threadgroups)
        summed += work.summed_lines * count / work.threadgroups
        rounds += work.rounds * count / threadgroups
    return replace(
        parts[0][1], threadgroups=threadgroups, instructions=total, summed_lines=summed, lines=lines, rounds=rounds
    )


def extended(found: Sequence[PredictedLaunch], chip: Chip, columns: int, threadgroups: float, lines: float) -> Work:
    """The work of a whole product, by a launch at each of the simulated numbers of columns."""
    pair = [work_on(launch, chip) for launch in found]
    parts = [(share * threadgroups, work) for share, work in at_columns(pair, columns)]
    return blend(parts, threadgroups, lines)


def percent_of_peak(flop: float, microseconds: float, chip: Chip) -> float:
    """Of the ALU's peak in half types."""
    return 100 * flop / (chip.cores * chip.clock_GHz * 1e3 * 256 * microseconds)


def beside(
    title: str,
    heads: tuple[str, str, str],
    chips: Sequence[str],
    rows: Iterable[tuple[str, Callable[[Chip], tuple[Noted, Noted]]]],
) -> list[str]:
    """The lines of a section with a table, which prints each row as it is made.

    Args:
        title: Of the section.
        heads: Of the rows' names, of our times and of the times that stand beside them.
        chips: Three columns each: both times and the speed.
        rows: A name, and a function that gives both times on a chip.
    """
    lines = [f"## {title}", "", f"| {heads[0]} |"]
    lines[-1] += "".join(f" {chip}: {heads[1]} | {heads[2]} | speed |" for chip in chips)
    lines.append("|---|" + "--:|--:|--:|" * len(chips))
    print(*lines, sep="\n", flush=True)
    for name, times in rows:
        cells = [name]
        for chip in map(find_chip, chips):
            (ours, of_ours), (theirs, of_theirs) = times(chip)
            cells += [f"{ours:,.0f}{of_ours}", f"{theirs:,.0f}{of_theirs}", f"{theirs / ours:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return [*lines, ""]
