"""The file of a calibration: where it is, for which machine and versions it holds, its rows."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from .. import _ext
from ..frontend.cache import cache_folder

# Names the file, or is "off".
VARIABLE = "MLX_MITTENS_CALIBRATION"

# Of the file; one with another number is not read.
_SCHEMA = 1

# Fields of a row that the extension takes, in its order.
KEYS = ("op", "dtype", "format", "sizes", "mx", "schedule", "parallelism")


def how_to_make(*devices: str | None) -> str:
    """The advice for calibrations that cannot serve, of these devices; None stands for one that is not known."""
    default = "gpu" if mx.default_device() == mx.gpu else "cpu"
    options = ("" if device in (None, default) else f" --device {device}" for device in devices)
    commands = dict.fromkeys(f"`mlx-mittens calibrate{option}`" for option in options)
    return f"{' and '.join(commands)} {'measure' if len(commands) > 1 else 'measures'} this machine anew"


class CalibrationError(Exception):
    """A file that is no calibration, or none for this machine and these versions; the message says which.

    Attributes:
        device: The device to make a calibration of instead, where it is known.
    """

    def __init__(self, message: str, device: str | None = None) -> None:
        super().__init__(message)
        self.device = device


class OtherVersionsError(CalibrationError):
    """The calibration was made with other versions than those installed."""


@dataclass(frozen=True)
class Row:
    """A problem, its fastest plan, and the times in microseconds.

    Attributes:
        op: The op.
        case: The call that was timed.
        dtype: Its element type.
        format: Number of the format in the extension, which distinguishes kernels.
        sizes: Sizes that its speed depends on, as the extension asks for it.
        mx: Whether mx is the fastest.
        schedule: The plan that is the fastest of ours; empty for that which the tables give.
        parallelism: Its parallelism; 0 for that which the tables give.
        mx_us: Median time of mx.
        ours_us: Median time of the plan that the tables give.
        best_us: Median time of the plan that is the fastest of ours.
        spread: Half the interquartile range of the times, relative; the largest of the three.
        timed: The element type that was timed, where it is the other half type; else empty.
        again: Whether it is to be measured anew; it counts until it was.
    """

    op: str
    case: str
    dtype: str
    format: int
    sizes: tuple[int, int, int, int]
    mx: bool
    schedule: str
    parallelism: int
    mx_us: float
    ours_us: float
    best_us: float
    spread: float
    timed: str = ""
    again: bool = False

    @property
    def key(self) -> tuple[str, str, str]:
        """The call that it is of."""
        return self.op, self.case, self.dtype

    @property
    def problem(self) -> tuple[str, str, int, tuple[int, int, int, int]]:
        """Key of the row in the extension."""
        return self.op, self.dtype, self.format, self.sizes


@dataclass
class Calibration:
    """The rows of a device, and the versions that they hold for; of a Mac's GPU also the command buffers tried."""

    machine: dict[str, Any]
    versions: dict[str, str]
    date: str
    rows: list[Row] = field(default_factory=list)
    command_buffers: list[dict[str, Any]] = field(default_factory=list)

    @property
    def device(self) -> str:
        """``cpu`` or ``gpu``."""
        return str(self.machine["device"])


def versions(device: str) -> dict[str, str]:
    """Versions that the times depend on beside the machine: of a Mac's GPU also macOS.

    With macOS comes the compiler of Metal's kernels, and by its version MLX tells whether to use matrix units.
    """
    from .. import __version__

    found = {"mlx_mittens": __version__, "mlx": mx.__version__}  # type: ignore[attr-defined]  # mlx's stub leaves it out
    if device == "gpu" and mx.metal.is_available():
        import platform

        found["macos"] = ".".join(platform.mac_ver()[0].split(".")[:2])
    return found


def machine(device: str) -> dict[str, Any]:
    """Versions installed here, as far as they cost nothing to ask: of the CPU also how it is used."""
    info = mx.device_info(mx.gpu if device == "gpu" else mx.cpu)
    found: dict[str, Any] = {"device": device, "name": str(info.get("device_name", "unknown"))}
    found["architecture"] = str(info.get("architecture", "unknown"))
    if device == "cpu":
        found["threads"] = _ext.cpu_threads()
        found["instructions"] = _ext.cpu_instructions
    elif found["architecture"].startswith("applegpu"):  # of two sizes by one name
        from .. import gpus

        found["cores"] = gpus.of_this_mac().cores
    return found


def has_gpu() -> bool:
    """Whether mx can use a GPU here."""
    return bool(mx.is_available(mx.gpu))


def folder() -> Path:
    """Where calibrations are, beside the compiled kernels; it need not be there.

    Raises:
        RuntimeError: The user has no home.
    """
    return cache_folder() / "calibration"


def chosen() -> Path | None:
    """The file that the environment names."""
    name = os.environ.get(VARIABLE, "")
    return Path(name) if name not in ("", "off") else None


def is_off() -> bool:
    """Whether the environment turns calibrations off."""
    return os.environ.get(VARIABLE) == "off"


def path(device: str) -> Path:
    """The file of a device of this machine: the one that the environment names, or one of its own name.

    Raises:
        RuntimeError: The user has no home.
    """
    words = [str(word) for word in machine(device).values()]
    return chosen() or folder() / (re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-") + ".json")


def data(file: Path) -> dict[str, Any]:
    """Contents of a file of this machine and these versions; its rows are as they come.

    Raises:
        CalibrationError: It is not a calibration, or not for this machine and these versions.
        OSError: It cannot be read.
    """
    import json

    try:
        found = json.loads(file.read_bytes())
        made_with, made_on = dict(found["versions"]), dict(found["machine"])
        schema, device, _, rows = found["schema"], made_on["device"], found["date"], found["rows"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CalibrationError(f"is not a calibration ({type(error).__name__}: {error})") from None
    if device == "gpu" and not has_gpu():
        raise CalibrationError(f"was made on {_listed(made_on)}, and mx has no GPU here")
    if device not in ("cpu", "gpu"):
        raise CalibrationError("is not a calibration of this version")
    if made_with != versions(device):
        raise OtherVersionsError(
            f"was made with {_listed(made_with)}, installed is {_listed(versions(device))}", device
        )
    if schema != _SCHEMA or type(rows) is not list:
        raise CalibrationError("is not a calibration of this version", device)
    if made_on != machine(device):
        raise CalibrationError(f"was made on {_listed(made_on)}, this is {_listed(machine(device))}", device)
    return dict(found)


def activate(found: dict[str, Any]) -> None:
    """Has ops and plans ask the contents of a file. Makes no `Row` of it, which would take ten times as long.

    Raises:
        CalibrationError: A row is none that the extension can read.
    """
    try:
        rows = [tuple([row[key] for key in KEYS]) for row in found["rows"]]
        _ext.calibration_load(found["machine"]["device"], rows)
    except (KeyError, ValueError) as error:
        raise CalibrationError(f"has a row that cannot be read ({type(error).__name__}: {error})") from None
    except TypeError:  # nanobind's message lists all that it would take
        raise CalibrationError("has a row that cannot be read (a value of another type than expected)") from None


def read(file: Path) -> Calibration:
    """Reads a file.

    Raises:
        CalibrationError: It is not a calibration, or not for this machine and these versions.
        OSError: It cannot be read.
    """
    found = data(file)
    try:
        rows = [_row(values) for values in found["rows"]]
    except (KeyError, TypeError, ValueError) as error:
        raise CalibrationError(f"has a row that cannot be read ({type(error).__name__}: {error})") from None
    buffers = found.get("command_buffers", [])
    return Calibration(
        found["machine"], found["versions"], str(found["date"]), rows, buffers if type(buffers) is list else []
    )


def _row(values: dict[str, Any]) -> Row:
    row = Row(**{**values, "sizes": tuple(values["sizes"])})
    natural = lambda value: type(value) is int and 0 <= value < 2**32
    if not (
        all(type(value) is str for value in (row.op, row.case, row.schedule, row.timed))
        and row.dtype in ("float32", "float16", "bfloat16")
        and len(row.sizes) == 4
        and all(map(natural, (row.format, *row.sizes)))
        and type(row.mx) is type(row.again) is bool
        and type(row.parallelism) is int
        and all(type(value) in (int, float) for value in (row.mx_us, row.ours_us, row.best_us, row.spread))
    ):
        raise ValueError(values)
    return row


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


def _text(calibration: Calibration) -> str:
    import json
    from dataclasses import asdict

    head: dict[str, Any] = {
        "schema": _SCHEMA,
        "versions": calibration.versions,
        "machine": calibration.machine,
        "date": calibration.date,
    }
    if calibration.command_buffers:
        head["command_buffers"] = calibration.command_buffers
    rows = ",\n  ".join(json.dumps(asdict(row)) for row in calibration.rows)
    return f'{json.dumps(head, indent=1)[:-2]},\n "rows": [\n  {rows}\n ]\n}}\n'


def write(file: Path, calibration: Calibration) -> None:
    """Puts a calibration in the place of a file, which is whole at any moment.

    Raises:
        OSError: It cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        temporary.write_text(_text(calibration))
        os.replace(temporary, file)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def summary(rows: Sequence[Row]) -> str:
    """Counts of problems, of other plans that win, and of problems that mx wins."""
    mx_wins = sum(row.mx for row in rows)
    others = sum(not row.mx and bool(row.schedule or row.parallelism) for row in rows)
    return f"{len(rows)} problems, {others} with another plan than the tables', {mx_wins} that go to mx"
