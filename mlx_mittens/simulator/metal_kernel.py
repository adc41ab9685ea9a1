"""Kernels of ``mx.fast.metal_kernel`` in the simulator.

MLX itself writes their text: asked to export the call rather than to run it, it hands over the function that it would
compile for the GPU, signature and all, on machines without one too.
"""

from __future__ import annotations

import functools
import gc
import math
import operator
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, cast

import mlx.core as mx

from .. import _ext, frontend
from ..apple import agx_compiler
from ..apple.chips import find_chip
from ..frontend.read.sources import without_comments
from . import holders
from .profile import profiled

if TYPE_CHECKING:
    from ..prediction.launches import PredictedLaunch

MOST_THREADS = 1024  # of a threadgroup

_mlx_metal_kernel = mx.fast.metal_kernel
NO_METAL = "No Metal back-end"  # MLX's error of a kernel where there is no Metal

# MLX puts this before every such kernel.
_PRELUDE = '#include <metal_stdlib>\n#include "mlx/backend/metal/kernels/utils.h"\nusing namespace metal;\n'
_FAST_MATH = 2  # as MLX numbers its math modes
_NOT_ASCII = re.compile(r"[^\x00-\x7f]")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WHOLE_KERNEL = re.compile(
    r"(?:\bkernel\b|\[\[\s*kernel\s*\]\])(?:\[\[.*?\]\]|[^;{}()])*?\bvoid\s+(?:\[\[.*?\]\]\s*)?(\w+)\s*\("
)
_QUOTED_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"[^"]*"', re.M)


@dataclass(frozen=True)
class _Generated:
    """A kernel as MLX would compile it."""

    kernel: str
    text: str
    infos: list[tuple[bool, bool, bool]]  # for each input: whether its shape, strides and ndim are arguments
    by_rows: bool  # inputs that are not row contiguous are copied
    fast_math: bool


class Kernel:
    """A kernel that runs in the simulator; called as a kernel of ``mx.fast.metal_kernel``.

    Example:
        >>> source = "uint i = thread_position_in_grid.x; y[i] = 2 * x[i];"
        >>> kernel = mm.simulator.metal_kernel("doubled", ["x"], ["y"], source)
        >>> sizes = {"grid": (4, 1, 1), "threadgroup": (4, 1, 1), "output_shapes": [(4,)]}
        >>> kernel(inputs=[mx.arange(4.0)], output_dtypes=[mx.float32], **sizes)
        [array([0, 2, 4, 6], dtype=float32)]
    """

    def __init__(self, mlx_kernel: Callable[..., Any], name: str = "", header: str = "", source: str = ""):
        self._mlx_kernel = mlx_kernel
        self._name = name
        self._header = header
        self._source = source
        self._is_known = bool(name)  # else they are found in MLX's generated text

    def __call__(
        self,
        *,
        inputs: Sequence[mx.array | bool | int | float],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        template: Sequence[tuple[str, bool | int | mx.Dtype]] | None = None,
        init_value: float | None = None,
        verbose: bool = False,
        stream: Any = None,
    ) -> list[mx.array]:
        """A launch of the kernel; it is compiled, and runs, when its outputs are evaluated, on the CPU.

        Args:
            inputs: Arrays and scalars, in the order of ``input_names``.
            output_shapes: Shape of each output.
            output_dtypes: Dtype of each output.
            grid: How many threads there are; the last threadgroups are cut short where it is not a multiple.
            threadgroup: Threads of a threadgroup, at most 1024 of them.
            template: Names and values of template arguments.
            init_value: The initial value of outputs; without one the kernel has to write every element.
            verbose: Whether to print the generated text.
            stream: Taken and ignored: the simulator runs on the CPU's default stream.

        Returns:
            The outputs.

        Raises:
            ValueError: If shapes, grid, threadgroup or template arguments cannot be served.
            CompileError: From the evaluation of an output, as on a Mac, if the kernel does not compile, or would not
                there (as ``mlx-mittens check`` has it); lines are counted in ``source`` and ``header``.
            Fault: From the evaluation of an output, if the kernel makes an error that a GPU would not forgive.
        """
        arrays = [value if isinstance(value, mx.array) else mx.array(value) for value in inputs]
        if len(output_shapes) != len(output_dtypes):
            counts = f"output_shapes has {len(output_shapes)} entries and output_dtypes {len(output_dtypes)}"
            _fail(f"{counts}: expected one of each for every output")
        shapes = [_checked_shape(i, shape) for i, shape in enumerate(output_shapes)]
        grid, threadgroup = _check(grid, threadgroup, template)
        generated = _generate(
            self._mlx_kernel,
            arrays,
            output_shapes=shapes,
            output_dtypes=list(output_dtypes),
            grid=grid,
            threadgroup=threadgroup,
            template=None if template is None else list(template),
            init_value=init_value,
            verbose=verbose,
        )
        self._know(generated, arrays, shapes)
        file = f"{self._name}.metal"
        text, problem = self._text(generated, file), self._problem(generated, file)
        initial = [] if init_value is None else [_element(init_value, dtype) for dtype in output_dtypes]
        return _ext.user_kernel(
            arrays,
            shapes,
            list(output_dtypes),
            file=file,
            text=text,
            problem=problem,
            kernel=generated.kernel,
            grid=grid,
            threadgroup=threadgroup,
            infos=generated.infos,
            initial=initial,
            by_rows=generated.by_rows,
        )

    def predict(self, *, chip: str, **arguments: Any) -> PredictedLaunch:
        """Runs the kernel, and predicts how long the same launch takes on an Apple GPU.

        Args:
            chip: An Apple GPU, such as ``"m2-max"``.
            arguments: Those of a call. The launch is simulated, so keep it small enough to wait for.

        Raises:
            ValueError: If the chip is unknown; the message lists the known ones. Also as a call does.
            CompileError: As an evaluation does.
            RuntimeError: If there is no Mesa compiler; the message says how to get it. Also in a block of ``profiled``
                or ``predicted``.
            Fault: If the kernel makes an error that a GPU would not forgive.

        Example:
            >>> source = "uint i = thread_position_in_grid.x; y[i] = 2 * x[i];"
            >>> kernel = mm.simulator.metal_kernel("doubled", ["x"], ["y"], source)
            >>> sizes = {"grid": (64, 1, 1), "threadgroup": (32, 1, 1), "output_shapes": [(64,)]}
            >>> launch = kernel.predict(chip="m2-max", inputs=[mx.ones(64)], output_dtypes=[mx.float32], **sizes)
            >>> launch.prediction.microseconds > 0  # print(launch): also what limits it, registers, threads a core
            True
        """
        from ..prediction.launches import predict_launches

        known = find_chip(chip)
        agx_compiler.find()
        with profiled() as launches:
            mx.eval(self(**arguments))
        (launch,) = [launch for launch in launches if launch.file == f"{self._name}.metal"][-1:] or launches[-1:]
        return predict_launches([launch], known)[0]

    def _know(self, generated: _Generated, arrays: list[mx.array], shapes: list[tuple[int, ...]]) -> None:
        """Finds name, header and source of a kernel that MLX made, in the text that it generates."""
        if self._is_known:
            return
        text, kernel = generated.text, generated.kernel
        at = text.index(f"[[kernel]] void {kernel}(")
        template = text.rfind("\ntemplate <", 0, at) + 1 if f'host_name("{kernel}")' in text else at
        body = text.index("]]) {\n", at) + len("]]) {\n")
        self._header, self._source = text[:template], text[body : text.rindex("\n}\n")]
        # Behind the name stand the types of inputs and outputs.
        names = []
        for dtype in (mx.float32, mx.int32):
            stand_ins = [mx.zeros(array.shape, dtype) for array in arrays]
            sizes = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "output_dtypes": [dtype] * len(shapes)}
            names.append(_generate(self._mlx_kernel, stand_ins, output_shapes=shapes, **sizes).kernel)
        self._name = os.path.commonprefix(names)[len("custom_kernel_") : -1]
        self._is_known = True

    def _problem(self, generated: _Generated, file: str) -> str:
        """Why the kernel does not compile, where its text alone says so."""
        for part, name in ((self._header, f"header of {file}"), (self._source, file)):
            include = _QUOTED_INCLUDE.search(part)
            if include:
                line = part.count("\n", 0, include.start()) + 1
                problem = "error: Metal's run-time compiler finds no quoted include"
                return str(frontend.CompileError(file, generated.kernel, f"{name}:{line}: {problem}"))
            other = _NOT_ASCII.search(without_comments(part))
            if other:
                line = part.count("\n", 0, other.start()) + 1
                problem = (
                    f"error: {other[0]!r} is not ASCII: MLX hands the text over as ASCII, write it in a comment only"
                )
                return str(frontend.CompileError(file, generated.kernel, f"{name}:{line}: {problem}"))
        source = without_comments(self._source)
        if whole := _WHOLE_KERNEL.search(source):
            line = source.count("\n", 0, whole.start()) + 1
            problem = (
                f"error: source is the body of the kernel alone, and MLX writes the signature: leave out "
                f"'kernel void {whole[1]}(...) {{' and the '}}' at its end"
            )
            return str(frontend.CompileError(file, generated.kernel, f"{file}:{line}: {problem}"))
        return ""

    def _text(self, generated: _Generated, file: str) -> str:
        """The generated text, in which lines count as in the user's text."""
        text = generated.text
        if self._source:
            at = text.rindex(self._source)
            end = at + len(self._source)
            text = f'{text[:at]}#line 1 "{file}"\n{self._source}\n#line 1 "signature of {file}"{text[end:]}'
        if self._header:
            rest = text[len(self._header) :]
            text = f'#line 1 "header of {file}"\n{self._header}\n#line 1 "signature of {file}"\n{rest}'
        return ("#define __FAST_MATH__ 1\n" if generated.fast_math else "") + _PRELUDE + text


def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: dict[str, str] | None = None,
) -> Kernel:
    """``mx.fast.metal_kernel`` for machines without Metal: the kernel runs in the simulator, which watches it.

    MLX generates the signature, so the kernel sees the same text as on a Mac, MLX's own ``utils.h`` included. An input
    that runs backwards (``a[::-1]``) is copied where a Mac would hand over its negative strides.

    Args:
        name: The kernel's name.
        input_names: Names of the inputs in ``source``.
        output_names: Names of the outputs in ``source``.
        source: The body of the kernel.
        header: Text before the kernel.
        ensure_row_contiguous: Whether inputs that are not row contiguous are copied first.
        atomic_outputs: Whether outputs are ``device atomic<T>*``.
        compile_options: As MLX's; the simulator's arithmetic is safe in every math mode.

    Returns:
        A kernel, called as one of ``mx.fast.metal_kernel``.

    Raises:
        ValueError: A name is none of Metal's language.
        RuntimeError: MLX before 0.32.0 writes no signature without Metal.

    Example:
        >>> source = "uint i = thread_position_in_grid.x; y[i] = 2 * x[i];"
        >>> kernel = mm.simulator.metal_kernel("doubled", ["x"], ["y"], source)
        >>> sizes = {"grid": (4, 1, 1), "threadgroup": (4, 1, 1), "output_shapes": [(4,)]}
        >>> kernel(inputs=[mx.arange(4.0)], output_dtypes=[mx.float32], **sizes)
        [array([0, 2, 4, 6], dtype=float32)]
    """
    names = list(input_names), list(output_names)
    if not re.fullmatch(r"[A-Za-z0-9_]+", name):
        _fail(f"name is {name!r}: expected letters, digits and _, since it becomes the name of a function")
    for what, given in (("input_names", names[0]), ("output_names", names[1])):
        for word in given:
            if not _IDENTIFIER.fullmatch(word):
                _fail(f"{what} has {word!r}: expected a name of letters, digits and _, as in C")
    options: dict[str, Any] = (
        {} if compile_options is None else {"compile_options": compile_options}
    )  # the oldest mlx knows none
    try:
        made = _mlx_metal_kernel(name, *names, source, header, ensure_row_contiguous, atomic_outputs, **options)
    except RuntimeError as error:
        if NO_METAL not in str(error):
            raise
        raise RuntimeError(
            f"[metal_kernel] mlx {_ext.mlx_version} writes the signature of a kernel on a Mac alone, and mlx 0.32.0 is "
            'the first that does everywhere: pip install "mlx[cpu]>=0.32", or write the kernel in a Metal file'
        ) from error
    return Kernel(made, name, header, source)  # type: ignore[arg-type]  # mlx's stub has it return object


def _fail(problem: str) -> NoReturn:
    raise ValueError(f"[metal_kernel] {problem}")


def _integers(values: Any) -> tuple[int, ...]:
    """A size as integers; numpy's count."""
    try:
        return tuple(operator.index(n) for n in values)
    except TypeError:
        return ()


def _check(grid: Any, threadgroup: Any, template: Any) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """The grid and the threadgroup, if they can be launched."""
    sizes: list[tuple[int, int, int]] = []
    for name, given in (("grid", grid), ("threadgroup", threadgroup)):
        size = _integers(given)
        if len(size) != 3 or not all(0 < n < 2**31 for n in size):
            _fail(f"{name} is {given}: expected three positive integers")
        x, y, z = size
        sizes.append((x, y, z))
    threads = math.prod(sizes[1])  # as given: MLX bounds it before it clips it to the grid
    if threads > MOST_THREADS:
        _fail(f"threadgroup {sizes[1]} has {threads} threads: expected at most {MOST_THREADS}")
    for name, value in template or ():
        if not isinstance(value, (bool, int, mx.Dtype)):
            _fail(f"template argument {name!r} is {value!r}: expected an mx.Dtype, an int or a bool")
        if isinstance(value, int) and not -(2**31) <= value < 2**31:
            _fail(f"template argument {name!r} is {value}: expected an int of 32 bits")
    return sizes[0], sizes[1]


def _checked_shape(i: int, given: Any) -> tuple[int, ...]:
    shape = _integers(given)
    if len(shape) != len(given) or not all(0 <= n < 2**31 for n in shape):
        _fail(f"output_shapes[{i}] is {tuple(given)}: expected integers that are not negative")
    return shape


def _generate(mlx_kernel: Callable[..., Any], arrays: list[mx.array], **arguments: Any) -> _Generated:
    """Has MLX write the kernel for inputs of these shapes and dtypes."""
    if isinstance(mlx_kernel, _Switched):  # a Kernel made before the first block holds one by now
        mlx_kernel = mlx_kernel._mlx_kernel
    exported: list[dict[str, Any]] = []
    stand_ins = [mx.zeros(a.shape, a.dtype) for a in arrays]
    mx.export_function(exported.append, lambda *inputs: mlx_kernel(inputs=list(inputs), **arguments), *stand_ins)
    for entry in exported:
        if entry["type"] == "primitive" and entry["name"] == "CustomKernel":
            kernel, text, *_ = entry["arguments"]
            infos, by_rows = entry["arguments"][8:10]
            fast_math = entry["arguments"][-1] == _FAST_MATH
            return _Generated(kernel, text, [tuple(info) for info in infos], by_rows, fast_math)
    raise RuntimeError("[metal_kernel] this MLX exports its kernels in a way that mlx_mittens does not know")


def _element(value: float, dtype: mx.Dtype) -> bytes:
    with mx.stream(mx.cpu):
        element = mx.view(mx.full((1,), value, dtype), mx.uint8)
        return bytes(cast(list[int], element.tolist()))


class _Switched:
    """A kernel of MLX's that goes to the simulator while redirection is on."""

    def __init__(self, mlx_kernel: Callable[..., Any], simulated: Callable[[], Kernel]):
        self._mlx_kernel = mlx_kernel
        self._make_simulated = simulated

    @functools.cached_property
    def _simulated(self) -> Kernel:
        return self._make_simulated()

    def __call__(self, *args: Any, **arguments: Any) -> list[mx.array]:
        if _redirects and not _ext.exporting():
            return self._simulated(*args, **arguments)
        made: list[mx.array] = self._mlx_kernel(*args, **arguments)
        return made


def _switched_metal_kernel(*args: Any, **arguments: Any) -> _Switched:
    if _redirects:
        simulated = metal_kernel(*args, **arguments)
        return _Switched(simulated._mlx_kernel, lambda: simulated)
    # Errors are MLX's own until the kernel is called in a block.
    made: Any = _mlx_metal_kernel(*args, **arguments)
    return _Switched(made, functools.partial(metal_kernel, *args, **arguments))


_switched_metal_kernel.__doc__ = _mlx_metal_kernel.__doc__

_redirects = False


def redirect(on: bool) -> None:
    """Sends the kernels of ``mx.fast.metal_kernel`` to the simulator, or leaves them to MLX again.

    The first time a switch is put in the place of the function and of all kernels that it has made, wherever they are
    held. It stays there: kernels that are made later, with redirection on or off, have it from the beginning.
    """
    global _redirects
    _redirects = on
    if on and mx.fast.metal_kernel is _mlx_metal_kernel:
        made_before = [value for value in gc.get_objects() if value is _mlx_metal_kernel or _is_kernel(value)]
        holders.replace(made_before, _switch_of, keep=(globals(),))


def _switch_of(value: Any) -> Callable[..., Any]:
    return _switched_metal_kernel if value is _mlx_metal_kernel else _Switched(value, functools.partial(Kernel, value))


def _is_kernel(value: Any) -> bool:
    return type(value) is type(_mlx_metal_kernel) and "passed to the Metal kernel" in (value.__doc__ or "")
