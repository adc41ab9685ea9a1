"""Infers the schedule of a call that was not measured: from the points around it, or from the other half type."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from . import grid, measure
from .store import Row


class Known:
    """The rows so far, by the items that they are of.

    Args:
        items: All that may be measured.
        rows: Those measured before.
    """

    def __init__(self, items: Iterable[grid.Item], rows: Iterable[Row]) -> None:
        self._rows: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
        self._items: dict[tuple[str, str], list[grid.Item]] = defaultdict(list)  # with rows, by op and type
        self._sampled = defaultdict(list)
        planned = {item.key: item for item in items}
        for item in planned.values():
            if item.sampled and item.dtype == grid.OTHER_HALF:
                self._sampled[item.op.name].append(item)
        for row in rows:
            self._rows[row.key].append(row)
            if row.key in planned and len(self._rows[row.key]) == 1:
                self._items[row.op, row.dtype].append(planned[row.key])

    def add(self, item: grid.Item, rows: Sequence[Row]) -> None:
        """Takes in the measurements of an item."""
        if rows:
            self._rows[item.key] += rows
            self._items[item.op.name, item.dtype].append(item)

    def _of(self, item: grid.Item, dtype: str) -> list[Row]:
        return self._rows.get((item.op.name, item.case.name, dtype), [])

    def is_left_out(self, item: grid.Item) -> bool:
        """Whether an item is larger than one for which mx takes long and is far slower."""
        return any(
            grid.is_larger(item.case, other.case) and any(map(measure.is_hopeless, self._rows[other.key]))
            for other in self._items[item.op.name, item.dtype]
        )

    def is_between(self, item: grid.Item) -> bool:
        """Whether the points around a fine item agree, so that calls there are answered without it."""
        others = self._items[item.op.name, item.dtype]
        return item.fine and grid.agree(
            item.case, [(other.case, _faster_than_mx(row)) for other in others for row in self._rows[other.key]]
        )

    def by_other_half(self, item: grid.Item) -> list[Row]:
        """The rows of an item that the other half type's stand for: of an op whose half types have one winner."""
        if item.dtype != grid.OTHER_HALF or item.sampled:
            return []
        pairs = [
            (self._of(sample, grid.HALF), self._of(sample, grid.OTHER_HALF)) for sample in self._sampled[item.op.name]
        ]
        pairs = [(a, b) for a, b in pairs if a and b]
        if not pairs or any(list(map(_winner, a)) != list(map(_winner, b)) for a, b in pairs):
            return []
        return [replace(row, dtype=item.dtype, timed=grid.HALF) for row in self._of(item, grid.HALF)]


def _faster_than_mx(row: Row) -> Hashable:
    """A schedule of ours that mx does not beat: none, the plan of the tables, or another one by its name."""
    if row.mx:
        return None
    tables_serve = row.ours_us <= row.mx_us * (1 + row.spread)
    return measure.TABLES if tables_serve else _winner(row)


def _winner(row: Row) -> tuple[bool, str, int]:
    return row.mx, row.schedule, row.parallelism
