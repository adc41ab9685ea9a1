"""Calibrate: times mx and our plans on this machine, and keeps what is faster for the ops and for `patch()`.

A second run measures missing items. The file is whole at any moment.
"""

from __future__ import annotations

import argparse
import datetime
import math
import os
import time
from collections.abc import Container, Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from ..backends import strict
from ..bench import machine
from ..bench.measure import kept_memory
from ..calibration import (
    Calibration,
    CalibrationError,
    Row,
    command_buffers,
    grid,
    inference,
    loading,
    measure,
    store,
)
from ..table import aligned
from .bench import check_executor, op_names, select_device
from .options import UsageError, add_minutes, add_ops, inputs
from .runs import Ending, each, quiet_steps

# Seconds from one writing of the file to the next.
_SAVED_EVERY = 1.0

# Of a run; the items come in the order in which models need them.
_MINUTES = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to a parser."""
    add_ops(parser)
    parser.add_argument("--device", choices=("cpu", "gpu"), help="where to run (mx's default device)")
    parser.add_argument("--quick", action="store_true", help="some shapes of models, about a minute")
    add_minutes(parser, _MINUTES)
    parser.add_argument("--again", action="store_true", help="measure anew what was measured, which counts until then")


class _File:
    """The calibration at work, written once a second and at the end."""

    def __init__(self, path: Path, calibration: Calibration) -> None:
        """
        Raises:
            UsageError: It cannot be written.
        """
        self.path, self.calibration = path, calibration
        self._saved = 0.0
        try:
            self.save()
        except OSError as error:
            advice = f"set MLX_MITTENS_CACHE to a folder or {store.VARIABLE} to a file that can be written to"
            raise UsageError(f"cannot write {path} ({error.strerror}): {advice}") from None

    @property
    def rows(self) -> list[Row]:
        return self.calibration.rows

    def add(self, key: tuple[str, str, str], rows: Sequence[Row]) -> None:
        """Puts rows, perhaps none, in the place of their call's rows and of problems that were to be repeated."""
        problems = {row.problem for row in rows}
        is_replaced = lambda row: row.again and (row.key == key or row.problem in problems)
        left = [row for row in self.rows if not is_replaced(row)]
        changed = bool(rows) or len(left) < len(self.rows)
        self.calibration.rows = [*left, *rows]
        if changed and time.monotonic() - self._saved > _SAVED_EVERY:
            self.save()

    def save(self) -> None:
        store.write(self.path, self.calibration)
        self._saved = time.monotonic()


def _begun(path: Path, device: str, again: Container[tuple[str, str, str]]) -> Calibration:
    """The calibration of this machine and these versions; rows of some calls are marked as to be measured again."""
    new = Calibration(store.machine(device), store.versions(device), datetime.date.today().isoformat())
    try:
        found = store.read(path)
    except FileNotFoundError:
        return new
    except CalibrationError as error:
        if store.chosen() and not isinstance(error, store.OtherVersionsError):  # it may be anything
            advice = f"set {store.VARIABLE} to a file that is not there yet, or delete this one"
            raise UsageError(f"{path} {error}: {advice}") from None
        print(f"{path} {error}: starting over", flush=True)
        return new
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    if found.machine != new.machine:
        raise UsageError(f"{path} is of the {found.device}: set {store.VARIABLE} to another file")
    new.rows = [replace(row, again=True) if row.key in again else row for row in found.rows]
    return new


def _path(device: str) -> Path:
    try:
        return store.path(device)
    except RuntimeError as error:
        raise UsageError(f"there is no folder for the calibration ({error}): set MLX_MITTENS_CACHE to one") from None


def run(arguments: argparse.Namespace) -> int:
    """Measures this machine.

    Returns:
        int: 0, or 1 if something could not be measured.

    Raises:
        UsageError: The arguments cannot be served.
    """
    names = op_names(arguments.ops)
    select_device(arguments.device)
    device = machine.device()
    if machine.executor() == "simulator":
        raise UsageError("the simulator's times say nothing of a machine: unset MLX_MITTENS_SIMULATOR")
    check_executor(machine.executor())
    path = _path(device)
    planned = grid.items(names, device, arguments.quick, _memory(device))
    file = _File(path, _begun(path, device, {item.key for item in planned} if arguments.again else ()))
    print(f"{', '.join(map(str, file.calibration.machine.values()))}; {path}", flush=True)
    rows = [row for row in file.rows if not row.again]
    measured = {row.key for row in rows}
    todo = [item for item in planned if item.key not in measured]
    if measured and todo:
        print(f"goes on: {len(measured)} calls were measured before; --again measures these too", flush=True)
    if todo and hasattr(os, "getloadavg") and os.getloadavg()[0] > machine.cores() / 2:
        load = f"load {os.getloadavg()[0]:.1f} on {machine.cores()} cores"
        print(f"Other programs keep this machine busy ({load}): times will scatter, and may mislead.", flush=True)
    failed: list[str] = []
    ending = Ending()
    if not arguments.ops and device == "gpu":
        _try_command_buffers(file, arguments.again, failed)
    if todo:
        found = inference.Known(planned, rows)
        ending = _measure(todo, found, device, arguments, file, failed)
    print(_table(file.rows))
    print(store.summary(file.rows))
    for problem in failed:
        print(f"not measured: {problem}")
    if ending.complete:
        print("Ops and mm.patch() follow it from the next start of Python on.")
    else:
        print(f"Incomplete: {ending.reason}. The same command{' without --again' * arguments.again} goes on.")
    if store.is_off():
        print(f"{store.VARIABLE} is off: nothing follows it until that is unset.")
    return ending.status or int(bool(failed))


def _try_command_buffers(file: _File, again: bool, failed: list[str]) -> None:
    """Tries other limits of Metal's command buffers, where there are some and none were tried."""
    current = command_buffers.limits()
    if current is None or (file.calibration.command_buffers and not again):
        return
    print("command buffers: a token with MLX's own limits and with others, half a minute", flush=True)
    try:
        trials = command_buffers.try_all()
    except RuntimeError as error:
        failed.append(str(error))
        return
    file.calibration.command_buffers = command_buffers.as_values(trials)
    try:
        file.save()
    except OSError as error:
        failed.append(f"cannot write {file.path} ({error.strerror})")
    lines = [("limits", "us", "+-", "MB")]
    for trial in trials:
        name = f"{trial.limits}, MLX's own" if trial.own else str(trial.limits)
        lines.append((name, f"{trial.us:.0f}", f"{trial.spread:.1%}", f"{trial.peak / 1e6:.0f}"))
    print(aligned(lines, left=1))
    print(f"command buffers: {command_buffers.advice(current, trials)}", flush=True)


def _memory(device: str) -> float:
    """The bytes of memory of a GPU, which Metal and CUDA call by other names; the grid of a CPU needs little."""
    info = mx.device_info(mx.gpu) if device == "gpu" else {}
    return float(info.get("total_memory", info.get("memory_size", math.inf)))


def _measure(
    todo: Sequence[grid.Item],
    found: inference.Known,
    device: str,
    arguments: argparse.Namespace,
    file: _File,
    failed: list[str],
) -> Ending:
    """Measures each item whose result does not follow from earlier ones.

    A failure is kept in words, and does not stop the other items.
    """
    budget = measure.QUICK if arguments.quick else measure.FULL
    known = {row.problem for row in file.rows if not row.again}
    since = time.monotonic()
    loading.unload()  # the tables' plans are timed, not an earlier calibration's

    def is_told(item: grid.Item) -> bool:
        """Whether no measurement of an item is needed."""
        needless = found.is_left_out(item) or found.is_between(item)
        rows = [] if needless else found.by_other_half(item)
        if needless or rows:
            add(item, [row for row in rows if row.problem not in known])
        return needless or bool(rows)

    def measured(item: grid.Item) -> list[Row] | None:
        try:
            return measure.measure(item, device, budget, inputs(0, item.name), known)
        except Exception as error:  # the others can be measured
            failed.append(f"{item.name}: {(str(error) or type(error).__name__).splitlines()[0]}")
            return None
        finally:
            if device == "gpu":
                mx.clear_cache()

    def add(item: grid.Item, rows: Sequence[Row]) -> None:
        known.update(row.problem for row in rows)
        found.add(item, rows)
        file.add(item.key, rows)

    def measure_each(items: Sequence[grid.Item]) -> Ending:
        if not items:
            return Ending()
        with quiet_steps(len(items)) as step:

            def one(item: grid.Item) -> None:
                if not is_told(item) and (rows := measured(item)) is not None:
                    add(item, rows)
                step(item.name)

            return each(items, one, lambda item: item.name, arguments.minutes, since)

    try:
        with strict(), kept_memory(device):
            ending = measure_each([item for item in todo if not item.may_be_told])
            if ending.complete:  # by now it is known which of the others are needed
                ending = measure_each([item for item in todo if item.may_be_told and not is_told(item)])
        file.save()
    except OSError as error:
        return Ending(1, f"cannot write {file.path} ({error.strerror})")
    return ending


def _table(rows: Sequence[Row]) -> str:
    """How many calls of each op go where."""
    lines = [("op", "calls", "tables' plan", "another plan", "mx")]
    for op in dict.fromkeys(row.op for row in rows):
        mine = [row for row in rows if row.op == op]
        to_mx = sum(row.mx for row in mine)
        others = sum(not row.mx and bool(row.schedule or row.parallelism) for row in mine)
        lines.append((op, str(len(mine)), str(len(mine) - to_mx - others), str(others), str(to_mx)))
    return aligned(lines, left=1)
