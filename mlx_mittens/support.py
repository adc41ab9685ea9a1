"""Says which kernels a call would run, without running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx

from . import _ext, ops
from .nearest import suggestion
from .ops._declaration import StreamOrDevice
from .stats import Stats, counted

__all__ = ["Support", "supports"]

# An array argument: its shape, with its dtype where that is not the call's, an array like it, or several for one
# argument. None is an argument that is left out.
Part = Sequence[int] | tuple[Sequence[int], mx.Dtype] | mx.array
Shape = Part | Sequence[Part | None] | None


@dataclass(frozen=True)
class Support:
    """Kernels that a call would run, and the part that goes to mx. True where kernels compute all of it.

    Attributes:
        op: The op.
        how: ``"kernel"`` where kernels, or native code on a CPU, compute the call. ``"mx"`` where the call goes to mx.
            ``"composed"`` where the op is made of mx's operations or of other ops of this package.
        reason: Why the call goes to mx, as ``stats()`` has it; empty where it does not.
        counts: Counts of ``stats()`` after the call.

    Example:
        >>> answer = mm.supports("softmax", shapes=[(4, 1024)], device=mx.cpu, axis=-1)
        >>> isinstance(answer, mm.Support), answer.how, answer.reason
        (True, 'kernel', '')
    """

    op: str
    how: Literal["kernel", "composed", "mx"]
    reason: str
    counts: Stats

    def __bool__(self) -> bool:
        return self.how == "kernel"


def supports(
    op: str,
    *,
    shapes: Sequence[Shape],
    dtype: mx.Dtype = mx.float32,
    device: StreamOrDevice = None,
    gradients: bool = False,
    **options: Any,
) -> Support:
    """Says which kernels a call of an op would run, by the op's own checks and plans; nothing runs.

    The answer holds for this process: it depends on its GPU, its calibration, ``strict()``, ``MLX_MITTENS_DISABLE``
    and ``simulator.enabled(gpu=...)``, within which it holds for another GPU. Arrays are taken to be row contiguous,
    and a cache's buffers to be needed by nobody else.

    Args:
        op: The name of the op.
        shapes: The array arguments in order: each a shape of ``dtype``, a pair of a shape and a dtype, or an array,
            whose values are not read. None stands for an argument that is None, a list of these for an argument that
            is a tuple of arrays.
        dtype: The dtype of the arguments that are shapes alone.
        device: Where the op is to run; by default where mx runs by default.
        gradients: Whether to ask for the gradients by the floating arguments, in place of the results.
        options: The other arguments, by name. Arrays among them are not read either.

    Raises:
        ValueError: There is no such op, or it refuses the arguments.
        TypeError: The op does not take these arguments.

    Example:
        >>> answer = mm.supports("softmax", shapes=[(4, 1024)], dtype=mx.float16, device=mx.cpu, axis=-1)
        >>> answer.how
        'kernel'
        >>> mm.supports("softmax", shapes=[(4, 1024)], dtype=mx.complex64, device=mx.cpu, axis=-1).reason
        'complex64'
    """
    if op not in ops.__all__:
        raise ValueError(f"[supports] no op named {op!r}{suggestion(op, ops.__all__)}")
    arguments = [_argument(shape, dtype) for shape in shapes]
    named = {name: _argument(value, None) if isinstance(value, mx.array) else value for name, value in options.items()}
    if device is not None:
        named["stream"] = device
    function = getattr(ops, op)
    if gradients:
        return answer(op, lambda: _gradients(function, arguments, named))
    return answer(op, lambda: _flat(function(*arguments, **named)))


def answer(op: str, call: Callable[[], list[mx.array]]) -> Support:
    """Kernels that the evaluation of a function's arrays would run, made of stand-ins."""
    runs, fallbacks = _ext.ask(call)
    counts = counted([(*run, 1) for run in runs], [(*fallback, 1) for fallback in fallbacks])
    composed = any(kernel == "composed" for _, _, kernel in runs)
    if runs and not fallbacks and not composed:
        how: Literal["kernel", "composed", "mx"] = "kernel"
    else:
        how = "mx" if fallbacks and not runs else "composed"
    return Support(op, how, "; ".join(dict.fromkeys(reason for _, reason in fallbacks)), counts)


def _argument(shape: Any, dtype: mx.Dtype | None) -> Any:
    if shape is None:
        return None
    if isinstance(shape, mx.array):
        return _ext.stand_in(shape.shape, shape.dtype)
    if not isinstance(shape, Sequence) or isinstance(shape, str):
        raise ValueError(f"[supports] shapes has {shape!r}: expected a shape, a shape and a dtype, an array or None")
    if len(shape) == 2 and isinstance(shape[1], mx.Dtype):
        return _ext.stand_in(list(shape[0]), shape[1])
    if all(isinstance(size, int) and size >= 0 for size in shape):
        return _ext.stand_in(list(shape), dtype)
    return tuple(_argument(part, dtype) for part in shape)


def _flat(results: Any) -> list[mx.array]:
    if isinstance(results, (tuple, list)):
        return [array for part in results for array in _flat(part)]
    return [results]


def _gradients(function: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> list[mx.array]:
    by = [i for i, a in enumerate(arguments) if isinstance(a, mx.array) and mx.issubdtype(a.dtype, mx.inexact)]

    def of(*some: mx.array) -> list[mx.array]:
        whole = list(arguments)
        for i, array in zip(by, some):
            whole[i] = array
        return [y for y in _flat(function(*whole, **named)) if mx.issubdtype(y.dtype, mx.inexact)]

    primals = [arguments[i] for i in by]
    cotangents = [_ext.stand_in(y.shape, y.dtype) for y in of(*primals)]
    return list(mx.vjp(of, primals, cotangents)[1])
