"""Launching any kernel of a .metal file, or of a registered source, on mx arrays."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from .. import _ext, frontend


@dataclass(frozen=True)
class Output:
    """An array that a kernel writes."""

    shape: Sequence[int]
    dtype: mx.Dtype


def int32(*values: int) -> bytes:
    """Values as a kernel's ``constant int`` argument."""
    return np.array(values, np.int32).tobytes()


def int64(*values: int) -> bytes:
    """Values as a kernel's ``constant int64_t`` or ``size_t`` argument."""
    return np.array(values, np.int64).tobytes()


def float32(*values: float) -> bytes:
    """Values as a kernel's ``constant float`` argument."""
    return np.array(values, np.float32).tobytes()


@functools.lru_cache(maxsize=256)
def _parameters(file: str, kernel: str, text: str) -> dict[int, frontend.Argument]:
    return {a.index: a for a in frontend.signature(file, kernel) if a.kind == "buffer" and a.index is not None}


# A parameter of an entry of PTX: the bits of its type, and how many of these it has.
_PTX_PARAMETER = re.compile(r"\.param (?:\.align \d+ )?\.[a-z](\d+) [^,\n[]*(?:\[(\d+)\])?")


@functools.lru_cache(maxsize=256)
def _value_bytes(
    file: str, kernel: str, text: str, sizes: tuple[tuple[int, int], ...], constants: tuple[tuple[int, str], ...]
) -> dict[int, int]:
    """How many bytes CUDA copies of each argument that the kernel takes by reference, by buffer index.

    Args:
        file, kernel, text: The kernel, and the text of its file.
        sizes: Of constants that it takes by pointer, with their indices.
        constants: Its function constants.
    """
    ptx = frontend.ptx(file, kernel, dict(sizes), constants=dict(constants))
    found = _PTX_PARAMETER.findall(ptx.partition(".entry")[2].partition(")")[0])
    parameters = sorted(_parameters(file, kernel, text).items())
    return {
        index: int(bits) // 8 * int(count or 1)
        for (index, parameter), (bits, count) in zip(parameters, found, strict=True)
        if parameter.by_reference
    }


def _is_on_cuda(stream: Any) -> bool:
    device = getattr(stream, "device", stream) or mx.default_device()
    return _ext.cuda_available() and device == mx.gpu


def launch(
    file: str,
    kernel: str,
    arguments: Mapping[int, mx.array | bytes | Output],
    threadgroups: Sequence[int],
    threads: Sequence[int],
    *,
    threadgroup_bytes: int = 0,
    constants: Mapping[int, Any] | None = None,
    ensure_row_contiguous: bool = True,
    stream: mx.Stream | mx.Device | None = None,
) -> list[mx.array]:
    """Launches a kernel, lazily: as PTX on a CUDA GPU's stream, in the simulator on a CPU's.

    Args:
        file: A .metal file of ours, or a source registered by ``mlx_mittens.frontend.register_source``.
        kernel: The name of a variant in it.
        arguments: By buffer index: an array to read, bytes of a constant, or an `Output`. An index left out is not
            bound, as a function constant may require.
        threadgroups: How many, in up to three dimensions.
        threads: Of one threadgroup, in up to three dimensions.
        threadgroup_bytes: Size of a ``[[threadgroup(0)]]`` argument.
        constants: Values of function constants, by index.
        ensure_row_contiguous: Copy arrays that are not, as ``mx.fast.metal_kernel`` does; else they are handed over as
            they lie in memory, but for views that run backwards: a buffer starts at a view's first element.
        stream: Where to run; the default device's stream if there is none.

    Returns:
        list[mx.array]: The outputs, in the order of their indices.

    Raises:
        KeyError: The file has no such kernel.
        CompileError: The file does not compile.
        ValueError: There is an argument for an index that the kernel does not have, or on a CUDA GPU, for a reference,
            an array or fewer bytes than the kernel takes.
    """
    file = frontend.name_of_text(file)
    text = frontend.source(file)
    parameters = _parameters(file, kernel, text)
    unknown = sorted(set(arguments) - set(parameters))
    if unknown:
        known = ", ".join(map(str, sorted(parameters)))
        raise ValueError(f"[launch] {kernel} has no buffer {unknown[0]}; it has {known}")
    inputs, outputs, data = [], [], []
    for index, value in sorted(arguments.items()):
        if isinstance(value, mx.array):
            inputs.append((index, value))
        elif isinstance(value, Output):
            outputs.append((index, list(value.shape), value.dtype))
        elif isinstance(value, bytes):
            data.append((index, value, not parameters[index].by_reference))
        else:
            given = type(value).__name__
            raise TypeError(f"[launch] buffer {index} of {kernel} is {given}: expected array, bytes or Output")
    values = {index: _text(value) for index, value in (constants or {}).items()}
    if _is_on_cuda(stream) and any(parameters[index].by_reference for index in arguments):
        sizes = tuple((index, len(value)) for index, value, by_pointer in data if by_pointer)
        for index, size in _value_bytes(file, kernel, text, sizes, tuple(sorted(values.items()))).items():
            given = arguments.get(index, bytes(size))
            if not isinstance(given, bytes):
                kind = type(given).__name__
                raise ValueError(
                    f"[launch] buffer {index} of {kernel} is {kind}: on a CUDA GPU a reference takes bytes alone"
                )
            if len(given) < size:
                raise ValueError(f"[launch] buffer {index} of {kernel} has {len(given)} bytes: expected {size}")
    return _ext.launch(
        file,
        kernel,
        inputs,
        outputs,
        data,
        sorted(set(parameters) - set(arguments)),
        _triple(threadgroups),
        _triple(threads),
        threadgroup_bytes,
        values,
        ensure_row_contiguous,
        stream,
    )


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _triple(size: Sequence[int]) -> list[int]:
    return [*size, 1, 1][:3]
