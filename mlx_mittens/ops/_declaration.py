"""How an op is declared: in Python, where its signature and documentation are read; it is defined in the extension."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import mlx.core as mx

from .. import _ext

StreamOrDevice = mx.Stream | mx.ThreadLocalStream | mx.Device | mx.DeviceType | None

Op = TypeVar("Op", bound=Callable)


def defined_in_extension(declaration: Op) -> Op:
    """The extension's function of that name, with the declaration's signature and docs. No Python call lies between.

    Raises:
        ImportError: The extension that was built has no such op.
    """
    op = declaration.__name__
    if not hasattr(_ext, op):
        raise ImportError(
            f"{declaration.__module__} declares {op!r}, and the extension that was built has no such op: build it "
            f"again, with `pip install -e .`. If that changes nothing, no file below csrc/ops binds {op!r}.",
            name="mlx_mittens",  # `python -m mlx_mittens` says the sentence without a traceback
        )
    made = _ext.FunctionWrapper(op, getattr(_ext, op))
    functools.update_wrapper(made, declaration)
    made.__annotations__ = declaration.__annotations__  # from Python 3.14 on a wrapper gets their function
    return made
