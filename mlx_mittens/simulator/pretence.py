"""MLX's answers about Metal as a Mac gives them, so that libraries that ask before they launch a kernel launch it."""

from __future__ import annotations

import ast
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import mlx.core as mx

_DEVICE = {
    "architecture": "applegpu_g15s",
    "device_name": "Apple M3 Max (simulated)",
    "max_buffer_length": 32 << 30,
    "max_recommended_working_set_size": 48 << 30,
    "memory_size": 64 << 30,
    "resource_limit": 499000,
}
_undo: list[Callable[[], None]] = []


def pretend() -> None:
    """Lets ``mx.metal.is_available()`` be true and ``mx.gpu`` a device that works: the CPU.

    Kernels that a module made at its import, and which are None since there was no Metal, are made.
    """
    if mx.metal.is_available():
        return
    _replace(mx.metal, "is_available", lambda: True)
    _replace(mx, "gpu", mx.cpu)
    for module in (mx, mx.metal):
        if hasattr(module, "device_info"):
            _replace(module, "device_info", lambda *device: dict(_DEVICE))
    for module in list(sys.modules.values()):
        _make_kernels(module)


def stop() -> None:
    """Undoes `pretend`."""
    while _undo:
        _undo.pop()()


def _replace(holder: Any, name: str, value: Any) -> None:
    was = getattr(holder, name)
    setattr(holder, name, value)

    def restore() -> None:
        if getattr(holder, name) is value:
            setattr(holder, name, was)

    _undo.append(restore)


def _makes_kernels(value: Any, module: types.ModuleType) -> bool:
    """Whether this is a function of the module that calls metal_kernel."""
    code = getattr(value, "__code__", None)
    return (
        code is not None
        and getattr(value, "__module__", None) == module.__name__
        and ("metal_kernel" in code.co_names or "metal_kernel" in code.co_freevars)
    )


def _make_kernels(module: Any) -> None:
    """Evaluates `name = make_kernel(...)`, or a choice of a kernel, of a module again, where the name is None."""
    namespace = getattr(module, "__dict__", None)
    if (
        not isinstance(module, types.ModuleType)
        or not namespace
        or not any(value is mx for value in namespace.values())
    ):
        return
    makers = {name for name, value in list(namespace.items()) if _makes_kernels(value, module)}
    try:
        source = inspect.getsource(module)
        tree = ast.parse(source if "metal_kernel" in source else "")
    except (OSError, TypeError, SyntaxError):
        return
    for statement in tree.body:
        target = statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
        if not isinstance(target, ast.Name) or not isinstance(statement, ast.Assign):
            continue
        called = {
            node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            for node in ast.walk(statement.value)
            if isinstance(node, ast.Call)
        }
        if namespace.get(target.id, ...) is None and called & {*makers, "metal_kernel"}:
            expression = compile(ast.Expression(statement.value), module.__file__ or module.__name__, "eval")
            _replace(module, target.id, eval(expression, namespace))
