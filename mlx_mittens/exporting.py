"""Marks the functions that MLX exports: it saves primitives of its own only, so the patch and our modules step aside.

MLX does not tell a trace for export from one for ``mx.compile``. So ``mx.export_function`` and ``mx.exporter`` are
replaced while the patch or a module needs to know; functions given to
them then tell this thread's ops so.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from . import _ext

__all__ = ["mark", "unmark"]

_lock = threading.Lock()
_needed: set[str] = set()
_replaced: dict[str, tuple[Any, Any]] = {}  # by name: mx's function and ours


def _marking(original: Callable[..., Any]) -> Callable[..., Any]:
    def marked(function: Any) -> Any:
        return functools.partial(_ext.trace_for_export, function) if callable(function) else function

    @functools.wraps(original)
    def export(*args: Any, **kwargs: Any) -> Any:  # both take the function second, or by its name
        if len(args) > 1:
            args = (args[0], marked(args[1]), *args[2:])
        elif "fun" in kwargs:
            kwargs["fun"] = marked(kwargs["fun"])
        return original(*args, **kwargs)

    return export


def mark(who: str) -> None:
    """Has exported functions marked from now on.

    Args:
        who: Name of the caller that needs it.
    """
    if who in _needed:  # modules are made by the hundred
        return
    with _lock:
        _needed.add(who)
        if not _replaced:
            for name in ("export_function", "exporter"):
                original = getattr(mx, name)
                _replaced[name] = original, _marking(original)
                setattr(mx, name, _replaced[name][1])


def unmark(who: str) -> None:
    """Undoes `mark`: restores mx's functions once nothing needs it."""
    with _lock:
        _needed.discard(who)
        while _replaced and not _needed:
            name, (original, ours) = _replaced.popitem()
            if getattr(mx, name) is ours:  # else another's replacement lies on ours: it stays
                setattr(mx, name, original)
