"""The calibrations of this machine, read when the package is imported."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from pathlib import Path

from .. import _ext
from . import store
from .store import CalibrationError

# The files that ops and plans follow now, by device.
loaded: dict[str, Path] = {}


def _candidates() -> list[tuple[str | None, Path]]:
    """The files to read, with their devices: the one that the environment names, or this machine's."""
    if store.is_off():
        return []
    if chosen := store.chosen():
        return [(None, chosen)]
    try:
        folder = store.folder()
        names = os.listdir(folder)
    except (OSError, RuntimeError):  # none was made, or the user has no home
        return []
    # Asking for the GPU's name starts its driver, which nobody should wait for without need.
    devices = [device for device in ("cpu", "gpu") if any(name.startswith(f"{device}-") for name in names)]
    files = [(device, store.path(device)) for device in devices if device == "cpu" or store.has_gpu()]
    return [(device, file) for device, file in files if file.name in names]


def load() -> None:
    """Has ops and plans ask this machine's calibrations; one warning names calibrations that cannot serve.

    It never raises: a package that is imported works without a calibration too.
    """
    problems: list[str] = []
    missing: list[str | None] = []  # the devices of these
    try:
        files = _candidates()
    except Exception as error:
        files, problems, missing = [], [f"No calibration is used ({type(error).__name__}: {error})"], [None]
    for device, file in files:
        try:
            found = store.data(file)
            device = found["machine"]["device"]
            store.activate(found)
            loaded[device] = file
            continue
        except CalibrationError as error:
            device = device or error.device
            problem = str(error)
        except OSError as error:
            problem = f"cannot be read ({error.strerror})"
        except Exception as error:
            problem = f"cannot be read ({type(error).__name__}: {error})"
        problems.append(f"The calibration {file} {problem}")
        missing.append(device)
    if problems:
        _warn(f"{'. '.join(problems)}. It is ignored; {store.how_to_make(*missing)}.")


def _warn(message: str) -> None:
    """Warns of the line that asked for the package, or for the first of its ops."""
    frame = sys._getframe()
    inside = (str(Path(__file__).parents[1]), importlib.__path__[0])
    while frame.f_back and frame.f_code.co_filename.startswith((*inside, "<frozen importlib")):
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    place = (frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__"))
    try:
        warnings.warn_explicit(message, RuntimeWarning, *place, registry)
    except RuntimeWarning:  # warnings are errors here, and importing a package is not to fail for this one
        if sys.stderr:
            print(f"RuntimeWarning: {message}", file=sys.stderr)


def unload() -> None:
    """Undoes `load`."""
    for device in loaded:
        _ext.calibration_load(device, [])
    loaded.clear()


def status(device: str) -> str:
    """Whether there is a calibration of a device of this machine, and whether it is used."""
    if store.is_off():
        return f"off ({store.VARIABLE})"
    try:
        file = loaded.get(device) or store.path(device)
        calibration = store.read(file)
    except CalibrationError as error:
        return f"ignored: {file} {error}; {store.how_to_make(device)}"
    except (OSError, RuntimeError):
        return f"none; {store.how_to_make(device)}"
    if calibration.device != device:
        return f"none, as {store.VARIABLE} names that of the {calibration.device} ({file})"
    what = f"of {calibration.date}, {store.summary(calibration.rows)} ({file})"
    return what if device in loaded else f"not used, as it was made after this process had started: {what}"
