"""GPUs as the plans of the ops know them: the machine's own, and named ones that the simulator stands for."""

from __future__ import annotations

import functools
import re
import sys
from dataclasses import dataclass, replace

import mlx.core as mx

from .apple.chips import Chip, chips

# The GPU that `mm.simulator.enabled(gpu="apple")` stands for.
USUAL_CHIP = "m2-max"


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        name: The name for `mm.simulator.enabled`.
        vendor: "apple" or "nvidia".
        generation: Apple's architecture: 13 (M1) to 17 (M5); NVIDIA's compute capability times ten.
        tier: base, pro, max or ultra; empty on NVIDIA GPUs.
        cores: GPU cores; NVIDIA's multiprocessors.
        clock_GHz: The clock under load; 0 where it is not known.
        bandwidth_GBps: Nominal bandwidth of the memory; 0 where it is not known.
        last_level_cache_MB: The cache before the memory; 0 where it is not known.
        matrix_units: Whether MLX computes products on matrix units, as on the M5 and later.
        caches_registers: Whether registers are a cache, so that their number does not bound a core's threads.
    """

    name: str
    vendor: str
    generation: int
    tier: str
    cores: int
    clock_GHz: float
    bandwidth_GBps: float
    last_level_cache_MB: float
    matrix_units: bool
    caches_registers: bool


# NVIDIA's data sheet of the H200; "nvidia" is one of these.
_H200 = Gpu("h200", "nvidia", 90, "", 132, 1.98, 4800, 50, matrix_units=False, caches_registers=False)


def of_chip(chip: Chip) -> Gpu:
    """The GPU of an Apple chip."""
    return Gpu(
        name=chip.name,
        vendor="apple",
        generation=chip.generation,
        tier=chip.tier,
        cores=chip.cores,
        clock_GHz=chip.clock_GHz,
        bandwidth_GBps=chip.nominal_GBps,
        last_level_cache_MB=chip.system_cache_MB or 0,
        matrix_units=chip.tensor_flop_per_core_cycle is not None,
        caches_registers=chip.dynamic_caching,
    )


def names() -> list[str]:
    """The names that `named` takes."""
    return ["apple", "nvidia", _H200.name, *chips()]


@functools.cache
def named(name: str) -> Gpu:
    """The GPU of this name: an Apple chip such as "m2-max", "h200", or "apple" or "nvidia" for a usual one.

    Raises:
        ValueError: There is none.
    """
    wanted = "-".join(name.lower().split())
    if wanted in ("nvidia", _H200.name):
        return _H200
    chip = chips().get(USUAL_CHIP if wanted == "apple" else wanted)
    if chip is None:
        raise ValueError(f"gpu is {name!r}: expected one of {', '.join(names())}")
    return of_chip(chip)


def cores_of_this_mac() -> int | None:
    """Cores of the Apple GPU, as the system lists them; None where it does not, or is no macOS."""
    if sys.platform != "darwin":
        return None
    # By their full paths: cron's PATH lacks their folder.
    registry = _output(["/usr/sbin/ioreg", "-rc", "AGXAccelerator", "-d", "1"], seconds=5)
    return _cores_by_registry(registry) or _cores_by_profiler(
        _output(["/usr/sbin/system_profiler", "-json", "SPDisplaysDataType"], seconds=20)
    )


def _output(command: list[str], seconds: int) -> str:
    import subprocess

    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=seconds).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _cores_by_registry(text: str) -> int | None:
    found = re.search(r'"gpu-core-count" = (\d+)', text)
    return int(found[1]) if found else None


def _cores_by_profiler(text: str) -> int | None:
    import json

    try:
        displays = json.loads(text)["SPDisplaysDataType"]
        counts = [display["sppci_cores"] for display in displays if str(display.get("sppci_cores", "")).isdigit()]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return int(counts[0]) if counts else None


def of_mac(device_name: str, architecture: str, cores: int | None) -> Gpu:
    """The GPU of a Mac.

    Args:
        device_name: As Metal has it, such as "Apple M2 Max".
        architecture: As Metal has it, such as "applegpu_g14s".
        cores: As the system lists them, where it does.

    Returns:
        Gpu: The known chip's, or for a chip newer than this package one by its architecture.
    """
    of_this_name = [chip for chip in chips().values() if chip.title.split(" (")[0] == device_name]
    if of_this_name:
        nearest = min(of_this_name, key=lambda chip: abs(chip.cores - (cores or max(c.cores for c in of_this_name))))
        known = of_chip(nearest)
        return known if cores in (None, known.cores) else replace(known, name=device_name, cores=cores)
    letters = re.search(r"g(\d+)(\w)$", architecture)
    generation = int(letters[1]) if letters else max(chip.generation for chip in chips().values())
    tier = {"s": "max", "d": "ultra"}.get(letters[2] if letters else "", "base")
    alike = [chip for chip in chips().values() if chip.tier == tier]
    like_it = of_chip(min(alike, key=lambda chip: (abs(chip.generation - generation), -chip.cores)))
    return replace(
        like_it,
        name=device_name,
        generation=generation,
        cores=cores or like_it.cores,
        clock_GHz=0,
        bandwidth_GBps=0,
        last_level_cache_MB=0,
    )


@functools.cache
def of_this_mac(_: str = "") -> Gpu:
    """This machine's Apple GPU."""
    info = mx.device_info(mx.gpu)
    return of_mac(str(info.get("device_name", "")), str(info.get("architecture", "")), cores_of_this_mac())
