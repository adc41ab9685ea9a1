"""Versions and devices here, for reports and for libraries that depend on this package."""

from __future__ import annotations

from dataclasses import dataclass, fields

import mlx.core as mx

from . import _ext, _guard, backends, calibration, gpus, switches
from . import ops as _ops  # noqa: F401 - loads calibrations, and checks MLX_MITTENS_DISABLE
from .table import aligned, html

__all__ = ["BuildInfo", "build_info"]


@dataclass(frozen=True)
class BuildInfo:
    """Versions and devices here. Prints as a table.

    Attributes:
        version: The version of this package.
        mlx: The version of MLX that is installed.
        mlx_releases: The releases of MLX that this package was built for.
        cpu: The instruction set of the native code.
        threads: Threads of the native code.
        gpu: The GPU, as MLX or Metal names it; empty where mx has none.
        executors: As ``executors()`` has them.
        calibration: The calibration that ops follow, or why there is none, by device.
        mlx_internals: Why features that rest on private parts of MLX are off; empty where they are on.
        disabled: Names in ``MLX_MITTENS_DISABLE``.

    Example:
        >>> isinstance(mm.build_info(), mm.BuildInfo)
        True
    """

    version: str
    mlx: str
    mlx_releases: tuple[str, ...]
    cpu: str
    threads: int
    gpu: str
    executors: dict[str, str]
    calibration: dict[str, str]
    mlx_internals: str
    disabled: tuple[str, ...]

    def __str__(self) -> str:
        return aligned(self._rows(), left=2)

    def _repr_html_(self) -> str:
        return html([("", ""), *self._rows()], left=2)

    def _rows(self) -> list[tuple[str, str]]:
        rows: list[tuple[str, str]] = []
        for field in fields(self):
            value = getattr(self, field.name)
            name = field.name.replace("_", " ")
            if isinstance(value, dict):
                rows += [(f"{name}: {key}", text) for key, text in value.items()]
            else:
                rows.append((name, ", ".join(value) if isinstance(value, tuple) else str(value)))
        return rows


def build_info() -> BuildInfo:
    """Returns versions, the releases of MLX that fit, instruction set, GPU, and calibration.

    Example:
        >>> info = mm.build_info()
        >>> info.mlx in info.mlx_releases
        True
    """
    import importlib.metadata

    from . import __path__, __version__

    gpu = ""
    has_gpu = bool(mx.is_available(mx.gpu))
    if has_gpu:
        gpu = gpus.of_this_mac().name if mx.metal.is_available() else str(mx.device_info(mx.gpu).get("device_name", ""))
    return BuildInfo(
        version=__version__,
        mlx=importlib.metadata.version("mlx"),
        mlx_releases=tuple(_guard.built(__path__)),
        cpu=_ext.cpu_instructions,
        threads=_ext.cpu_threads(),
        gpu=gpu,
        executors=backends.executors(),
        calibration={device: calibration.status(device) for device in ("cpu", "gpu")[: 1 + has_gpu]},
        mlx_internals=_ext.mlx_internals_problem(),
        disabled=switches.disabled(),
    )
