"""The operations of the graphs that mx evaluates in a block, with their shapes.

On a CPU mx composes functions such as ``mx.fast.rms_norm`` of many operations, where Metal has one kernel. Their calls
are noted, and each counts as one operation.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from .. import _ext

# Functions of mx that are a kernel of their own on Metal and a composition on a CPU, with their arguments of arrays.
COMPOSED: dict[str, tuple[str, ...]] = {
    "fast.rms_norm": ("x", "weight"),
    "fast.layer_norm": ("x", "weight", "bias"),
    "fast.rope": ("a",),
    "fast.scaled_dot_product_attention": ("q", "k", "v"),
    "fast.cross_entropy": ("logits", "targets"),
    "fast.gated_delta_update": (),
    "quantize": ("w",),
    "dequantize": ("w", "scales", "biases"),
}
# Functions and methods of arrays that evaluate.
_EVALUATE = ("eval", "async_eval")
_ARRAY_METHODS = (
    *("item", "tolist", "__bool__", "__int__", "__float__", "__complex__", "__index__"),
    *("__repr__", "__format__", "__array__", "__bytes__"),
)


@dataclass(frozen=True)
class Array:
    """An input or output of an operation.

    Attributes:
        shape: Its shape.
        dtype: Name of its type.
        itemsize: Bytes of an element.
        maker: The operation of the same evaluation that makes it, by its index; None where it was there before.
        row_contiguous: Whether it was there before, and lies in memory row by row.
    """

    shape: tuple[int, ...]
    dtype: str
    itemsize: int
    maker: int | None = None
    row_contiguous: bool = False

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return self.size * self.itemsize


@dataclass(frozen=True)
class Operation:
    """An operation of mx that an evaluation runs.

    Attributes:
        name: Of MLX's primitive, such as ``Add``, or of the function that was called, such as ``mx.fast.rope``.
        details: Other properties of a primitive that its kernel depends on.
        inputs: Arrays that it takes; of a call in the order of `arguments`.
        outputs: Arrays that it makes.
        arguments: Names of a call's arguments that are arrays; of those without a name their position, of those in a
            list with their index.
        options: A call's other arguments by name, as text.
    """

    name: str
    details: tuple[Any, ...]
    inputs: tuple[Array, ...]
    outputs: tuple[Array, ...]
    arguments: tuple[str, ...] = ()
    options: tuple[tuple[str, str], ...] = ()

    @property
    def is_ours(self) -> bool:
        """Whether it is an op of this package."""
        return self.name.startswith("Mittens")

    def argument(self, name: str) -> Array | None:
        """The array that a call was given under a name."""
        return self.inputs[self.arguments.index(name)] if name in self.arguments else None


@dataclass(frozen=True)
class _Call:
    name: str
    arguments: tuple[str, ...]
    options: tuple[tuple[str, str], ...]


def _of_converted_models() -> Sequence[Any]:
    """Their functions of rotary embeddings; none where nobody has imported `mlx_mittens.nn`, which converts them."""
    rebinding = sys.modules.get("mlx_mittens.nn.rebinding")
    return () if rebinding is None else rebinding.wrappers("rope")


def _targets_of_the_patch() -> Sequence[Any]:
    """Where nobody has imported the patch there is none, and who tests kernels of their own need not import it."""
    targets = sys.modules.get("mlx_mittens.patching.targets")
    return () if targets is None else targets.TARGETS


class Recorder:
    """Records the operations of each evaluation while it is open.

    Attributes:
        evaluations: The operations of each evaluation, each after the operations that it depends on, with whether the
            simulator was on.
    """

    def __init__(self) -> None:
        self.evaluations: list[tuple[list[Operation], bool]] = []
        self._graph = _ext.PendingGraph()
        self._calls: list[_Call] = []
        self._counted: set[int] = set()  # calls, by their number: one of several outputs is an operation once
        self._undo: list[Callable[[], None]] = []
        self._open = False

    def __enter__(self) -> Recorder:
        self._open = True
        try:
            for name in COMPOSED:
                *folders, leaf = name.split(".")
                owner = functools.reduce(getattr, folders, mx)
                if hasattr(owner, leaf):  # some came with later releases of mlx
                    self._hook(owner, leaf, name)
            for target in _targets_of_the_patch():  # it has layers call mx.fast.rope itself
                if target.op == "rope" and target.is_loaded() and target.module != "mlx.core":
                    owner, leaf = target.owner()
                    if isinstance(getattr(owner, leaf), _ext.FunctionWrapper):
                        self._hook(owner, leaf, "fast.rope")
            for wrapper in _of_converted_models():
                self._hook_parts(wrapper, "fast.rope")
            for name in _EVALUATE:
                self._replace(mx, name, self._evaluating(getattr(mx, name)))
            for name in _ARRAY_METHODS:
                self._replace(mx.array, name, self._evaluating(getattr(mx.array, name)))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._open = False
        while self._undo:
            self._undo.pop()()

    def record(self, *arrays: Any) -> None:
        """Records the operations of arrays, lists or dicts of them as an evaluation, without evaluating them."""
        self._walk(list(_arrays(arrays)))

    def _hook(self, owner: Any, leaf: str, name: str) -> None:
        """Notes calls of a function; under the patch's, since that looks whether another lies on it."""
        function = getattr(owner, leaf)
        if not isinstance(function, _ext.FunctionWrapper):
            self._replace(owner, leaf, self._noting(function, name))
            return
        self._hook_parts(function, name)

    def _hook_parts(self, wrapper: Any, name: str) -> None:
        for part in ("attempt", "original"):
            self._replace(wrapper, part, self._noting(getattr(wrapper, part), name))

    def _replace(self, owner: Any, name: str, now: Any) -> None:
        before = getattr(owner, name)
        setattr(owner, name, now)

        def undo() -> None:
            if getattr(owner, name) is now:  # else another's lies on it, which now comes to what only hands on
                setattr(owner, name, before)

        self._undo.append(undo)

    def _noting(self, function: Any, name: str) -> Any:
        if function is None:
            return None
        names = COMPOSED[name]

        @functools.wraps(function)
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            outputs = list(_arrays(result))
            if self._open and outputs:
                given = [arg for arg in args if not isinstance(arg, dict)]  # a layer is a dict
                named = {names[i] if i < len(names) else str(i): value for i, value in enumerate(given)} | kwargs
                named.pop("stream", None)
                arrays = {key: value for key, value in named.items() if isinstance(value, mx.array)}
                options = {key: str(_without_arrays(value)) for key, value in named.items() if key not in arrays}
                for key in options:
                    arrays |= {f"{key}[{i}]": part for i, part in enumerate(_arrays(named[key]))}
                self._graph.note(outputs, list(arrays.values()), len(self._calls))
                self._calls.append(_Call(f"mx.{name}", tuple(arrays), tuple(options.items())))
            return result

        return noted

    def _evaluating(self, function: Any) -> Any:
        @functools.wraps(function)
        def evaluating(*args: Any, **kwargs: Any) -> Any:
            if self._open:
                self._walk(list(_arrays(args)))
            return function(*args, **kwargs)

        return evaluating

    def _walk(self, arrays: list[mx.array]) -> None:
        found = [self._operation(*operation) for operation in self._graph.walk(arrays)]
        if found:
            self.evaluations.append((found, bool(_ext.simulator_state()[0])))

    def _operation(
        self, name: str, number: int, details: tuple[Any, ...], inputs: list[Any], outputs: list[Any]
    ) -> Operation:
        taken = tuple(
            Array(s, dtype, size, None if maker < 0 else maker, rows) for s, dtype, size, maker, rows in inputs
        )
        made = tuple(Array(*output) for output in outputs)
        if number < 0:
            return Operation(name, details, taken, made)
        if number in self._counted:
            return Operation(ANOTHER_OUTPUT, (), taken, made)
        self._counted.add(number)
        call = self._calls[number]
        arguments = call.arguments if len(call.arguments) == len(taken) else ()
        return Operation(call.name, (), taken, made, arguments, call.options)


ANOTHER_OUTPUT = "another output of a call"


def _arrays(tree: Any) -> Iterator[mx.array]:
    """The arrays in lists, tuples and dicts."""
    if isinstance(tree, mx.array):
        yield tree
    elif isinstance(tree, dict):
        yield from _arrays(list(tree.values()))
    elif isinstance(tree, (list, tuple)):
        for part in tree:
            yield from _arrays(part)


def _without_arrays(tree: Any) -> Any:
    """The same with a word in the place of each array, whose text would evaluate it."""
    if isinstance(tree, mx.array):
        return "array"
    if isinstance(tree, dict):
        return {key: _without_arrays(part) for key, part in tree.items()}
    if isinstance(tree, (list, tuple)):
        parts = [_without_arrays(part) for part in tree]
        return parts if isinstance(tree, list) else tuple(parts)
    return tree
