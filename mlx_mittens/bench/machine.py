"""Describes the machine that a benchmark runs on."""

from __future__ import annotations

import concurrent.futures
import datetime
import functools
import glob
import os
import platform
import subprocess
import sys
import time
from typing import Any

import mlx.core as mx
import numpy as np

from .. import __version__, _ext
from ..backends import executors

_DEFAULT_CACHE_BYTES = 32 << 20


def device() -> str:
    """The default device: ``cpu`` or ``gpu``."""
    return "gpu" if mx.default_device().type == mx.gpu else "cpu"


def executor() -> str:
    """Which executor runs ops on the default device."""
    if device() == "gpu":
        return "metal" if mx.metal.is_available() else "cuda"
    return "simulator" if _ext.simulator_enabled() else "native"


def _sysctl(name: str) -> str:
    try:
        command = ["/usr/sbin/sysctl", "-n", name]  # by its full path: cron's PATH lacks the folder
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def processor() -> str:
    """The CPU's name."""
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string") or platform.machine()
    try:
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cache_bytes() -> int:
    """Size of the CPU's largest cache; 32 MB where the system does not say."""
    sizes = [0]
    if sys.platform == "darwin":
        sizes += [
            int(text) for name in ("hw.l3cachesize", "hw.perflevel0.l2cachesize") if (text := _sysctl(name)).isdigit()
        ]
    for path in glob.glob("/sys/devices/system/cpu/cpu0/cache/index*/size"):
        with open(path) as file:
            text = file.read().strip()
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KMG") or 0) * unit)
    return max(sizes) or _DEFAULT_CACHE_BYTES


def available_bytes() -> int | None:
    """Memory that the default device has left; None where the system does not say."""
    if device() == "gpu":
        info = mx.device_info(mx.gpu)
        known = [info.get(name) for name in ("free_memory", "max_recommended_working_set_size", "total_memory")]
        return next((int(value) for value in known if value), None)
    if sys.platform == "darwin":
        size = _sysctl("hw.memsize")
        return int(size) // 2 if size.isdigit() else None
    found = []
    try:
        with open("/proc/meminfo") as lines:
            found += [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    except OSError:
        pass
    return min([*found, *_container_bytes()], default=None)


def _container_bytes() -> list[int]:
    """Memory that the limit of a container leaves, in either version of control groups; empty without a limit."""
    left = []
    folder = "/sys/fs/cgroup"
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            with open(f"{folder}/{limit}") as most, open(f"{folder}/{used}") as now:
                left.append(max(0, int(most.read()) - int(now.read())))
        except (OSError, ValueError):  # not there; "max" is no limit
            continue
    return left


def gpu() -> str | None:
    """The GPU's name, where mx can use one."""
    if not mx.is_available(mx.gpu):
        return None
    return str(mx.device_info(mx.gpu).get("device_name", "unknown"))


def gpu_architecture() -> str | None:
    """The GPU's architecture as Metal names it, such as ``applegpu_g13s``; None without Metal."""
    if not mx.metal.is_available():
        return None
    architecture = mx.device_info(mx.gpu).get("architecture")
    return None if architecture is None else str(architecture)


def mlx_kernel_cache() -> str | None:
    """Where MLX keeps the kernels that it compiles for an NVIDIA GPU at run time; None where it compiles none."""
    if executor() != "cuda":
        return None
    folder = os.environ.get("MLX_PTX_CACHE_DIR")
    return folder or "the temporary folder, where a restart may delete them: set MLX_PTX_CACHE_DIR to a folder of yours"


def copy_gb_s() -> float:
    """Bandwidth of a copy on the default device, bytes read and bytes written counted."""
    return _gpu_copy_gb_s() if device() == "gpu" else _cpu_copy_gb_s()


class CpuCopy:
    """A copy by all cores of more memory than the caches hold; a call makes it and gives its seconds."""

    def __init__(self) -> None:
        size = min(max(4 * cache_bytes(), 128 << 20), 512 << 20)
        self.bytes_moved = 2 * size
        self._source, self._target = np.ones(size, np.uint8), np.zeros(size, np.uint8)
        self._edges = [size * i // cores() for i in range(cores() + 1)]
        self._pool = concurrent.futures.ThreadPoolExecutor(cores())

    def __call__(self) -> float:
        def part(a: int, b: int) -> None:
            np.copyto(self._target[a:b], self._source[a:b])

        start = time.perf_counter()
        list(self._pool.map(part, self._edges[:-1], self._edges[1:]))
        return time.perf_counter() - start


@functools.cache
def cpu_copy() -> CpuCopy:
    """The one that is timed, made at its first use."""
    return CpuCopy()


def _cpu_copy_gb_s() -> float:
    copy = cpu_copy()
    return copy.bytes_moved / min(copy() for _ in range(7)) / 1e9


def _gpu_copy_gb_s() -> float:
    size, launches = 256 << 20, 16
    sources = [mx.random.uniform(shape=(size // 4,)) for _ in range(2)]
    mx.eval(sources)
    best = float("inf")
    for _ in range(7):
        mx.synchronize()
        start = time.perf_counter()
        for i in range(launches):
            mx.async_eval(-sources[i % 2])
        mx.synchronize()
        best = min(best, (time.perf_counter() - start) / launches)
    return 2 * size / best / 1e9


def versions() -> dict[str, str]:
    """Versions of all that takes part."""
    return {
        "mlx_mittens": __version__,
        "mlx": mx.__version__,  # type: ignore[attr-defined]  # mlx's stub leaves it out
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def describe() -> dict[str, Any]:
    """All of it, with the copy bandwidth measured now."""
    return {
        "processor": processor(),
        "cores": cores(),
        "cache_bytes": cache_bytes(),
        "gpu": gpu(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "device": device(),
        "executor": executor(),
        "executors": executors(),
        "copy_gb_s": copy_gb_s(),
        "versions": versions(),
        "date": datetime.date.today().isoformat(),
    }


def headline(info: dict[str, Any]) -> str:
    """A line about what `describe` has said."""
    name = info["gpu"] if info["device"] == "gpu" else f"{info['processor']}, {info['cores']} cores"
    versions = info["versions"]
    return (
        f"{name}; copy {info['copy_gb_s']:.3g} GB/s; executor {info['executor']}; "
        f"mlx-mittens {versions['mlx_mittens']}, mlx {versions['mlx']}"
    )
