"""The launches that MLX makes of an operation on Metal: its own kernels, or an estimate of the bytes that they move.

MLX's kernels are run in the simulator on drawn inputs of the operation's shapes. Operations without a
kernel header in the wheel are estimated: each is one launch, or as many as MLX makes of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from ..apple import estimates
from ..apple.model import Instructions, Work
from . import mlx_quantized_launches, mlx_unit_launches
from .drawn import KERNEL_TYPES, drawn
from .mlx_graph import ANOTHER_OUTPUT, Array, Operation
from .mlx_tiles import Call

# Operations that only say how memory is read.
_VIEWS = {
    *("AsStrided", "Broadcast", "BroadcastAxes", "Copy", "CustomTransforms", "Depends", "ExpandDims", "Slice", "Split"),
    *("Squeeze", "StopGradient", "Transpose", ANOTHER_OUTPUT),
}
# These copy arrays that do not lie in memory row by row.
_NEW_SHAPES = {"Flatten", "Reshape", "Unflatten"}
_COPIES_IF_SCATTERED = {"Contiguous", *_NEW_SHAPES}
_MAPS = {
    *("Abs", "Add", "ArcCos", "ArcCosh", "ArcSin", "ArcSinh", "ArcTan", "ArcTan2", "ArcTanh", "AsType", "BitwiseAnd"),
    *("BitwiseInvert", "BitwiseOr", "BitwiseXor", "Ceil", "Conjugate", "Cos", "Cosh", "DivMod", "Divide", "Equal"),
    *("Erf", "ErfInv", "Exp", "Expm1", "Floor", "FloorDivide", "Greater", "GreaterEqual", "Imag", "LeftShift", "Less"),
    *("LessEqual", "Log", "Log10", "Log1p", "Log2", "LogAddExp", "LogicalAnd", "LogicalNot", "LogicalOr", "Maximum"),
    *("Minimum", "Multiply", "NaNEqual", "Negative", "NotEqual", "Power", "Real", "Remainder", "RightShift", "Round"),
    *("Rsqrt", "Select", "Sigmoid", "Sign", "Sin", "Sinh", "Sqrt", "Square", "Subtract", "Tan", "Tanh"),
    *("Arange", "Full", "RandomBits", "RoPE", "mx.fast.rope"),
}
_FUNCTIONS = {
    *("ArcCos", "ArcSin", "ArcTan", "Cos", "Cosh", "Erf", "Exp", "Expm1", "Log", "Log1p", "Log2", "Power", "Sigmoid"),
    *("Sin", "Sinh", "Tan", "Tanh", "RoPE", "mx.fast.rope"),
}
_ROWS = {
    *("And", "ArgReduce", "LogSumExp", "Max", "Min", "Or", "Prod", "Reduce", "Sum"),
    *("LayerNorm", "RMSNorm", "mx.fast.rms_norm", "mx.fast.layer_norm", "mx.fast.cross_entropy"),
}
_SCANS_AND_SORTS = {
    *("ArgPartition", "ArgSort", "CumLogAddExp", "CumMax", "CumMin", "CumProd", "CumSum", "Partition", "SearchSorted"),
    "Sort",
}
_PRODUCTS = {"AddMM", "Matmul"}
_CPU = mx.Device(mx.cpu)
# Rows up to which a product reads its matrix as for one.
_FEW_ROWS = 8


@dataclass(frozen=True)
class Estimate:
    """A launch of a kernel whose code is not at hand.

    Attributes:
        name: The operation.
        work: Its work.
    """

    name: str
    work: Work


@dataclass(frozen=True)
class Peer:
    """An operation that MLX's own kernels compute.

    Attributes:
        key: Distinguishes it from others.
        call: The kernels, and which part of the work they are.
        instead: Its launches where its kernels do not run in the simulator.
    """

    key: tuple[object, ...]
    call: Call
    instead: tuple[Estimate, ...]


def plan(operation: Operation, graph: Sequence[Operation]) -> Peer | tuple[Estimate, ...] | None:
    """The launches of MLX for an operation: none for a view of memory; None where they are not known.

    Args:
        operation: It.
        graph: The operations of its evaluation.
    """
    name = operation.name
    if _is_view(name) or all(output.size == 0 for output in operation.outputs):
        return ()
    if name in _COPIES_IF_SCATTERED:
        is_view = _only_splits(operation) or _is_by_rows(operation.inputs[0], graph)
        return () if is_view else (_moved(operation, graph),)
    estimated = _estimated(operation, graph)
    call = _peer(operation, graph)
    if estimated is None or call is None:
        return estimated
    inputs = tuple((a.shape, a.dtype) for a in operation.inputs)
    turned = mlx_unit_launches.turned(operation, graph) if name in (*_PRODUCTS, "GatherMM", "SegmentedMM") else ()
    return Peer((name, operation.details, operation.options, inputs, turned), call, estimated)


def _is_view(name: str) -> bool:
    return name in _VIEWS or name.startswith("View ")  # of another type, which the name has


def _estimated(operation: Operation, graph: Sequence[Operation]) -> tuple[Estimate, ...] | None:
    name, output = operation.name, operation.outputs[0]
    nbytes = _read(operation.inputs, graph) + sum(a.nbytes for a in operation.outputs)
    if name in _MAPS or name.startswith("Compiled"):
        functions = len([word for word in ("Sigmoid", "Exp", "Tanh", "Erf") if word in name]) or name in _FUNCTIONS
        each = Instructions(floats=1, exponentials=float(functions), reciprocals=float(functions))
        return (Estimate(name, estimates.elementwise(sum(a.size for a in operation.outputs), nbytes, each)),)
    if name in _ROWS or name == "Softmax":
        columns = max(1, operation.inputs[0].shape[-1]) if operation.inputs[0].shape else 1
        return (Estimate(name, estimates.norm(max(1, operation.inputs[0].size // columns), columns, nbytes)),)
    if name in _PRODUCTS:
        return tuple(Estimate(name, work) for work in _product(operation, graph))
    if name in ("ScaledDotProductAttention", "mx.fast.scaled_dot_product_attention"):
        return _attention(operation, nbytes)
    if name == "SegmentedMM":
        m, k, n, count = *operation.inputs[0].shape[-2:], output.shape[-1], max(1, operation.inputs[2].size // 2)
        work = estimates.matrix_product(count, m, n, k // count, output.dtype, output.itemsize)
        return (Estimate(name, work),)
    return _others(operation, graph, nbytes, output)


def _others(
    operation: Operation, graph: Sequence[Operation], nbytes: float, output: Array
) -> tuple[Estimate, ...] | None:
    """Operations that mostly move bytes."""
    name, inputs = operation.name, operation.inputs
    if name in ("SliceUpdate", "DynamicSliceUpdate"):  # in place: the update is read and written
        return (Estimate(name, _mapped(inputs[1].size, 2 * inputs[1].nbytes)),)
    if name in ("Gather", "GatherAxis", "DynamicSlice"):
        indices = sum(a.nbytes for a in inputs[1:])
        return (Estimate(name, _mapped(output.size, indices + 2 * output.nbytes)),)
    if name.startswith("Scatter"):  # the name ends in its operation on values
        return (Estimate(name, _mapped(inputs[-1].size, sum(a.nbytes for a in inputs[1:]) + inputs[-1].nbytes)),)
    if name == "Concatenate":  # a copy for each
        return tuple(Estimate(name, _mapped(a.size, 2 * a.nbytes)) for a in inputs if a.size)
    if name == "Pad":
        return (
            Estimate(name, _mapped(output.size, output.nbytes)),
            Estimate(name, _mapped(inputs[0].size, 2 * inputs[0].nbytes)),
        )
    if name in ("QuantizedMatmul", "GatherQMM", "GatherMM"):
        taken = _read(inputs, graph) if name == "QuantizedMatmul" else _gathered(inputs, output)
        # A weight of 4 bits takes a mask, a conversion and a multiply-add, in a lane's turn.
        weights = taken * 2
        each = Instructions(floats=1, conversions=1, integers=1.5)
        return (Estimate(name, _swept(weights, taken + output.nbytes, each)),)
    if name == "Convolution" and len(inputs[1].shape) == 3 and inputs[1].shape[2] == 1:  # a channel by itself
        taps = Instructions(floats=float(inputs[1].shape[1]), loads=float(inputs[1].shape[1]))
        return (Estimate(name, estimates.elementwise(output.size, nbytes, taps)),)
    if name in ("Quantize", "mx.quantize", "mx.dequantize") or name in _SCANS_AND_SORTS:
        return (Estimate(name, _mapped(max(output.size, inputs[0].size), nbytes)),)
    return None


def _gathered(inputs: Sequence[Array], output: Array) -> float:
    """Bytes of the matrices that a product chooses, each as often as it is chosen."""
    x, *rest = inputs
    matrices = [a for a in rest if len(a.shape) >= 3]
    chosen = max([math.prod(output.shape[:-2]), 1])
    return x.nbytes + sum(a.nbytes / a.shape[0] * min(chosen, a.shape[0]) for a in matrices)


def _mapped(values: float, nbytes: float) -> Work:
    return estimates.elementwise(values, nbytes)


def _swept(weights: float, nbytes: float, each: Instructions) -> Work:
    """Weights that are read once, 64 threads a threadgroup."""
    found = estimates.elementwise(weights / 16, nbytes)
    return Work(
        threadgroups=max(1.0, weights / (64 * 64)),
        threads=64,
        lines=found.lines,
        instructions=found.instructions + weights / 32 * each,
        rounds=4,
    )


def _moved(operation: Operation, graph: Sequence[Operation]) -> Estimate:
    output = operation.outputs[0]
    return Estimate(f"{operation.name} (copy)", _mapped(output.size, 2 * output.nbytes))


def _product(operation: Operation, graph: Sequence[Operation]) -> tuple[Work, ...]:
    batch, m, n, k = mlx_unit_launches.sizes_of_product(operation)
    operand = operation.inputs[0]
    if m <= _FEW_ROWS:
        return (estimates.vector_product(batch * n, k, operand.itemsize),)
    return _matrix_product(batch, m, n, k, operand, mlx_unit_launches.turned(operation, graph))


def _matrix_product(
    batch: int, m: int, n: int, k: int, operand: Array, turned: tuple[bool, bool] = (False, True)
) -> tuple[Work, ...]:
    """MLX's product of matrices on the GPU that it is planned for, and the sum of its parts where it is split."""
    from ..peer import mlx_matrix_units, mlx_unit_products

    dtype = getattr(mx, operand.dtype)
    if not mlx_matrix_units.are_used(dtype, _CPU):
        return (estimates.matrix_product(batch, m, n, k, operand.dtype, operand.itemsize),)
    planned = mlx_unit_products.plan(m, n, k, dtype, batch=batch, turned=turned, stream=_CPU)
    of_tiles = planned.tile, planned.parts, planned.simdgroups[2]
    work = estimates.unit_product(batch, m, n, k, operand.dtype, operand.itemsize, *of_tiles)
    if planned.parts == 1:
        return (work,)
    return work, _mapped(m * n, m * n * (4 * planned.parts + operand.itemsize))


def _attention(operation: Operation, nbytes: float) -> tuple[Estimate, ...]:
    """A product, a softmax and a product, where no kernel of one piece is known here."""
    name = operation.name
    q, k, v = (operation.argument(each) for each in ("q", "k", "v"))
    if q is None or k is None or v is None:
        return (Estimate(name, _mapped(operation.outputs[0].size, nbytes)),)
    batch, heads, length, width = q.shape
    keys = k.shape[2]
    scores = batch * heads * length * keys
    pair: list[tuple[Work, ...]]
    if length <= _FEW_ROWS:
        pair = [
            (estimates.vector_product(batch * k.shape[1] * keys, width, q.itemsize),),
            (estimates.vector_product(batch * k.shape[1] * v.shape[3], keys, q.itemsize),),
        ]
    else:
        pair = [
            _matrix_product(batch * heads, length, keys, width, q),
            _matrix_product(batch * heads, length, v.shape[3], keys, q, (False, False)),
        ]
    softmax = estimates.norm(batch * heads * length, keys, 2 * scores * q.itemsize)
    return tuple(Estimate(name, work) for work in (*pair[0], softmax, *pair[1]))


def _read(inputs: Sequence[Array], graph: Sequence[Operation]) -> float:
    """Bytes that are read; a broadcast array counts once."""
    return sum(_bytes_there(a, graph) for a in inputs)


def _bytes_there(array: Array, graph: Sequence[Operation]) -> float:
    nbytes = array.nbytes
    while array.maker is not None:
        maker = graph[array.maker]
        if not (_is_view(maker.name) or maker.name in _COPIES_IF_SCATTERED) or not maker.inputs:
            break
        array = maker.inputs[0]
        nbytes = min(nbytes, array.nbytes)
    return nbytes


def _is_by_rows(array: Array, graph: Sequence[Operation]) -> bool:
    """Whether an array lies in memory row by row; of one that was there before and does not, no."""
    if array.maker is None:
        return array.row_contiguous
    maker = graph[array.maker]
    if maker.name == "Transpose":
        taken = maker.inputs[0]
        kept = [axis for axis in maker.details if taken.shape[axis] > 1]
        return kept == sorted(kept) and _is_by_rows(taken, graph)
    if maker.name in ("Slice", "Split"):
        taken = maker.inputs[0]
        cut = [i for i, (whole, part) in enumerate(zip(taken.shape, array.shape)) if whole != part]
        return _is_by_rows(taken, graph) and (not cut or math.prod(array.shape[: cut[-1]]) == 1)
    if maker.name in ("Broadcast", "BroadcastAxes", "AsStrided"):
        return maker.inputs[0].size == array.size and _is_by_rows(maker.inputs[0], graph)
    if (_is_view(maker.name) or _only_splits(maker)) and maker.inputs:
        return _is_by_rows(maker.inputs[0], graph)
    return True


def _only_splits(operation: Operation) -> bool:
    """Whether a new shape only splits axes, each by itself: MLX makes a view of that, however the array lies."""
    if operation.name not in _NEW_SHAPES:
        return False
    before, after = ([n for n in a.shape if n != 1] for a in (operation.inputs[0], operation.outputs[0]))
    for size in before:
        while size > 1 and after and size % after[0] == 0:
            size //= after.pop(0)
        if size != 1:
            return False
    return not after


def _peer(operation: Operation, graph: Sequence[Operation]) -> Call | None:
    """A call of MLX's kernels with the operation's shapes, where one is known."""
    from ..peer import mlx_metal

    name, inputs = operation.name, operation.inputs
    if name == "Softmax" and inputs[0].shape and inputs[0].dtype in KERNEL_TYPES:
        (precise,) = operation.details
        return Call(lambda: mlx_metal.softmax(drawn(inputs[0]), precise=precise, stream=_CPU))
    if name == "QuantizedMatmul":
        return mlx_quantized_launches.product(operation)
    if name == "GatherQMM":
        return mlx_quantized_launches.gathered(operation)
    if name == "GatherMM":
        return mlx_unit_launches.gathered(operation, graph)
    if name == "SegmentedMM":
        return mlx_unit_launches.segmented(operation, graph)
    if name in _PRODUCTS:
        of_one_row = _gemv(operation, graph) if name == "Matmul" else None
        of_rows = of_one_row or mlx_unit_launches.few_rows(operation, graph)
        return of_rows or mlx_unit_launches.unit_product(operation, graph)
    if name == "mx.fast.scaled_dot_product_attention":
        return _sdpa(operation)
    return None


def _gemv(operation: Operation, graph: Sequence[Operation]) -> Call | None:
    from ..peer import mlx_metal

    x, matrix = operation.inputs
    turned = mlx_unit_launches.turned(operation, graph)[1]
    if len(matrix.shape) != 2 or x.size != x.shape[-1] or x.dtype not in KERNEL_TYPES or x.dtype != matrix.dtype:
        return None
    w = Array(matrix.shape[::-1] if turned else matrix.shape, matrix.dtype, matrix.itemsize)
    return Call(lambda: mlx_metal.gemv(drawn(w), drawn(x), transpose=turned, stream=_CPU))


def _sdpa(operation: Operation) -> Call | None:
    from ..peer import mlx_metal

    q, k, v = (operation.argument(each) for each in ("q", "k", "v"))
    options = dict(operation.options)
    mask = options.get("mask", "None")
    others = set(operation.arguments) - {"q", "k", "v", "sinks"}  # a sink is a number a head: the launch is as without
    if q is None or k is None or v is None or q.dtype not in KERNEL_TYPES or others:
        return None
    if mask not in ("None", "causal") or k.shape != v.shape:
        return None
    if not mlx_metal.has_attention_kernel(q.shape, k.shape, getattr(mx, q.dtype), mask == "causal", _CPU):
        return None
    scale, way = float(options["scale"]), None if mask == "None" else mask
    options_of_call: dict[str, Any] = {"scale": scale, "mask": way, "stream": _CPU}
    return Call(lambda: mlx_metal.scaled_dot_product_attention(drawn(q), drawn(k), drawn(v), **options_of_call))
