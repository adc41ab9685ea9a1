"""Products with weights, dense or quantized: of a few rows, which decide the speed of decoding, and of prompts.

As the other ops they are lazy, run on the device of their stream and can be differentiated, vmapped and compiled. On a
GPU the kernels take up to 16 rows for a matrix; more go to mx, and some of fewer where it uses an NVIDIA GPU's tensor
cores or an Apple GPU's matrix units (M5). Other Apple GPUs take any number of rows with quantized weights and with
GGUF blocks; with dense weights up to 32, on the M1 and M2 up to 64 and in bfloat16 any number. On the CPU any number of
rows is native.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import mlx.core as mx

from ._declaration import StreamOrDevice, defined_in_extension

__all__ = [
    "block_dequantize",
    "block_masked_mm",
    "block_matmul",
    "block_quantize",
    "gemv",
    "matmul",
    "quantized_embedding",
    "quantized_matmul",
    "quantized_matmuls",
    "quantized_swiglu",
]


@defined_in_extension
def matmul(
    x: mx.array,
    w: mx.array,
    bias: mx.array | None = None,
    *,
    transpose: bool = True,
    stream: StreamOrDevice = None,
) -> mx.array:
    """Product with dense weights: ``x @ w.T + bias``, or ``x @ w + bias`` without ``transpose``.

    The twin of ``mx.matmul``, with the weights as ``nn.Linear`` has them and an offset besides. Sums are taken in
    float32. Up to 16 rows of ``x`` read each weight once. On the M1 to M4 a GPU's kernels multiply up to 32,
    on the M1 and M2 up to 64 and in bfloat16 any number; mx multiplies all others, and stacks of matrices.

    Args:
        x (array): Input of shape ``[..., columns]``; float32, float16 or bfloat16.
        w (array): Weights of shape ``[outputs, columns]``, or ``[columns, outputs]`` without ``transpose``, of one of
            these types. A view whose last axis is contiguous is read where it lies. Of a stack the leading axes
            broadcast with ``x``'s, as in ``mx.matmul``.
        bias (array, optional): Offset of shape ``[outputs]``.
        transpose (bool): Whether the rows of ``w`` are multiplied with the rows of ``x``.
        stream (optional): Stream or device to run on.

    Returns:
        array: Of shape ``[..., outputs]`` and the promoted type of the arguments.

    Raises:
        DtypeError: An argument is not of a floating-point type named above.
        ValueError: ``w`` has fewer than two axes, or shapes do not fit together.

    Example:
        >>> x, w = mx.random.normal((2, 64)), mx.random.normal((128, 64))
        >>> mm.matmul(x, w, mx.zeros((128,))).shape
        (2, 128)

    Source:
        Named after its twin in NumPy and MLX.
    """
    raise NotImplementedError


@defined_in_extension
def gemv(
    w: mx.array,
    x: mx.array,
    bias: mx.array | None = None,
    *,
    transpose: bool = True,
    stream: StreamOrDevice = None,
) -> mx.array:
    """`matmul` with the matrix as its first argument: an alias for one release, without a warning. Call `matmul`.

    Sums are taken in float32 and rounded once, after the bias. Each weight is read once for up to 16 rows of ``x``.

    Args:
        w (array): Weights of shape ``[outputs, columns]``, or ``[columns, outputs]`` without ``transpose``; float32,
            float16 or bfloat16. A view whose last axis is contiguous is read where it lies.
        x (array): Input of shape ``[..., columns]``, of one of these types.
        bias (array, optional): Offset of shape ``[outputs]``.
        transpose (bool): Whether the rows of ``w`` are multiplied with the rows of ``x``.
        stream (optional): Stream or device to run on.

    Returns:
        array: Of shape ``[..., outputs]`` and the promoted type of the arguments.

    Raises:
        DtypeError: An argument is not of a floating-point type named above.
        ValueError: ``w`` is not a matrix, or shapes do not fit together.

    Example:
        >>> x, w = mx.random.normal((1, 64)), mx.random.normal((128, 64))
        >>> mm.gemv(w, x, mx.zeros((128,))).shape
        (1, 128)

    Source:
        Named after ``gemv`` of the BLAS: Dongarra et al., "An Extended Set of FORTRAN Basic Linear Algebra
        Subprograms", 1988.
    """
    raise NotImplementedError


@defined_in_extension
def quantized_embedding(
    indices: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    *,
    stream: StreamOrDevice = None,
) -> mx.array:
    """Rows of a quantized matrix by their indices: ``dequantize(w[indices], scales[indices], biases[indices])``.

    The embedding of a quantized model in one launch, with the bits that ``mx.dequantize`` gives. All modes and bits
    have kernels.

    Args:
        indices (array): Integers of any shape. Below zero they count from the end. Those that are out of range give
            rows of NaN, and nothing is read.
        w (array): Integers packed in uint32 as ``mx.quantize`` does it, of shape ``[rows, columns * bits / 32]``. A
            view whose last axis is contiguous is read where it lies.
        scales (array): Scale of each group, of shape ``[rows, columns / group_size]``; float32, float16 or bfloat16,
            and uint8 in modes but ``affine``.
        biases (array, optional): Offset of each group, of ``scales``' shape and type: in ``affine`` mode alone.
        group_size (int, optional): In ``affine`` mode 32, 64 or 128, 64 by default; else the mode's own, 32 or 16.
        bits (int, optional): In ``affine`` mode 1, 2, 3, 4, 5, 6 or 8, 4 by default; else the mode's own.
        mode (str): ``affine``, ``mxfp4``, ``mxfp8`` or ``nvfp4``, as ``mx.quantize`` has them.
        stream (optional): Stream or device to run on.

    Returns:
        array: Of the shape of ``indices`` and ``columns`` behind it, of the type of ``scales``; bfloat16 in modes but
        ``affine``.

    Raises:
        DtypeError: ``indices`` are no integers, ``w`` is not uint32, or ``scales`` not of a type named above.
        ValueError: Shapes, bits, group size or mode do not fit together or do not exist.

    Example:
        >>> table = mx.quantize(mx.random.normal((100, 64)), 64, 4)
        >>> mm.quantized_embedding(mx.array([[3, 99]]), *table, group_size=64, bits=4).shape
        (1, 2, 64)

    Source:
        The formats are as in `quantized_matmul`.
    """
    raise NotImplementedError


@defined_in_extension
def quantized_matmul(
    x: mx.array,
    w: mx.array,
    /,
    scales: mx.array,
    biases: mx.array | None = None,
    transpose: bool = True,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    *,
    bias: mx.array | None = None,
    exact: bool = False,
    activations: Literal["int8"] | None = None,
    stream: StreamOrDevice = None,
) -> mx.array:
    """Product with quantized weights: ``x @ dequantize(w).T``, or ``x @ dequantize(w)`` without ``transpose``.

    The twin of ``mx.quantized_matmul``, with an offset of the result besides. The kernels cover all modes, and all
    bits but 1. Sums, also of the activations, are taken in float32 and rounded once.

    On GPUs a result may be infinite or NaN where the exact product is in range: with activations above 1e33 in
    bfloat16, which the integers multiply before the scale, or above 1e36 in float32; and without ``transpose`` with
    terms above 1e32, which are taken times powers of two.

    Args:
        x (array): Input of shape ``[..., columns]``; float32, float16 or bfloat16.
        w (array): Integers packed in uint32 as ``mx.quantize`` does it, one matrix or a stack of them, whose leading
            axes broadcast with ``x``'s.
        scales (array): Scale of each group, of ``w``'s leading shape; uint8 in modes but ``affine``.
        biases (array, optional): Offset of each group, of ``scales``' shape: in ``affine`` mode alone.
        transpose (bool): Whether the groups go along the columns of ``x``.
        group_size (int, optional): In ``affine`` mode 32, 64 or 128, 64 by default; else the mode's own, 32 or 16.
        bits (int, optional): In ``affine`` mode 1, 2, 3, 4, 5, 6 or 8, 4 by default; else the mode's own.
        mode (str): ``affine``, ``mxfp4``, ``mxfp8`` or ``nvfp4``, as ``mx.quantize`` has them.
        bias (array, optional): Offset of the result, of shape ``[outputs]``.
        exact (bool): Whether a row of ``x`` gives, bit for bit, its result alone. On Apple GPUs up to 16 rows share
            their work all the same, if ``transpose``; elsewhere rows then share none.
        activations (str, optional): On a CPU ``"int8"`` lets the kernel round ``x`` to 8 bits, with a scale for each
            group or word of ``w``, where that is faster: in every format but ``mxfp8``, if ``transpose``. Results
            then err by about 0.6 percent, and by up to 3 where a few elements are much larger than the others,
            relative to the root mean squares of ``x`` and ``w``. Rows that are not finite are not rounded. On an Apple
            GPU with matrix units, from the M5 on with macOS 26.2, more than 16 rows of one matrix of 4 bits are rounded
            with a scale for each group, and rows that are not finite give none that is. By default it is what
            ``mlx_mittens.patch()`` says.
        stream (optional): Stream or device to run on.

    Returns:
        array: Of shape ``[..., outputs]`` and the promoted type of ``x``, ``scales`` and ``biases``.

    Raises:
        DtypeError: ``w`` is not uint32, or another argument not of a floating-point type named above.
        ValueError: Shapes, bits, group size or mode do not fit together or do not exist; ``activations`` is not a known
            one, or given for a GPU without matrix units.

    Example:
        >>> x, w = mx.random.normal((1, 64)), mx.random.normal((128, 64))
        >>> mm.quantized_matmul(x, *mx.quantize(w, 64, 4), group_size=64, bits=4).shape
        (1, 128)

    Source:
        Affine quantization in groups, as in Jacob et al., "Quantization and Training of Neural Networks for Efficient
        Integer-Arithmetic-Only Inference", 2017, https://arxiv.org/abs/1712.05877. The ``mx`` modes: "OCP
        Microscaling Formats (MX) Specification", 2023.
    """
    raise NotImplementedError


@defined_in_extension
def quantized_matmuls(
    x: mx.array,
    matrices: Sequence[Sequence[mx.array]],
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    *,
    bias: Sequence[mx.array] | None = None,
    stream: StreamOrDevice = None,
) -> list[mx.array]:
    """Products of one input with several quantized matrices: ``[x @ dequantize(w).T + b for w, b in ...]``.

    For linear layers that share an input, such as the projections of queries, keys and values. One launch computes
    all of them if ``x`` is one row, on an Apple GPU, with 2 to 4 matrices of 4 or 8 bits or in ``mxfp4``; the results
    are then views of one array. Otherwise each product is a `quantized_matmul`. No matrix is copied.

    Args:
        x (array): Input of shape ``[..., columns]``; float32, float16 or bfloat16.
        matrices (sequence): For each matrix ``(w, scales, biases)`` as ``mx.quantize`` gives them, two-dimensional;
            ``(w, scales)`` in modes but ``affine``.
        group_size (int, optional): As of `quantized_matmul`, for all matrices.
        bits (int, optional): As of `quantized_matmul`, for all matrices.
        mode (str): As of `quantized_matmul`, for all matrices.
        bias (sequence, optional): Offsets, for each matrix an array of shape ``[outputs]``.
        stream (optional): Stream or device to run on.

    Returns:
        list of array: For each matrix one of shape ``[..., outputs]``; of the promoted type of all arguments in one
        launch, elsewhere of its own arguments.

    Raises:
        DtypeError: A ``w`` is not uint32, or another argument not of a floating-point type named above.
        ValueError: Shapes, bits, group size or mode do not fit together or do not exist.

    Example:
        >>> x = mx.random.normal((1, 64))
        >>> query, key = (mx.quantize(mx.random.normal((outputs, 64)), 64, 4) for outputs in (128, 32))
        >>> queries, keys = mm.quantized_matmuls(x, [query, key], 64, 4)
        >>> queries.shape, keys.shape
        ((1, 128), (1, 32))

    Source:
        As `quantized_matmul`.
    """
    raise NotImplementedError


@defined_in_extension
def quantized_swiglu(
    x: mx.array,
    gate: Sequence[mx.array],
    up: Sequence[mx.array],
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    *,
    activation: str = "swiglu",
    exact: bool = False,
    stream: StreamOrDevice = None,
) -> mx.array:
    """The gated half of a feed-forward block in one kernel: ``silu(x @ gate.T) * (x @ up.T)``.

    Everything is computed in float32 and rounded once.

    On GPUs a result may be infinite or NaN where the exact one is in range: with activations above 1e33 in bfloat16,
    which the integers multiply before the scale, or above 1e36 in float32.

    Args:
        x (array): Input of shape ``[..., columns]``; float32, float16 or bfloat16.
        gate (sequence): ``(w, scales, biases)`` as ``mx.quantize`` gives them, two-dimensional; ``(w, scales)`` in
            modes but ``affine``.
        up (sequence): The same, of the same shape.
        group_size (int, optional): As of `quantized_matmul`.
        bits (int, optional): As of `quantized_matmul`.
        mode (str): As of `quantized_matmul`.
        activation (str): ``swiglu``, or ``geglu``: ``nn.gelu_approx`` in the place of ``silu``, as in Gemma.
        exact (bool): Whether a row of ``x`` gives, bit for bit, its result alone. On Apple GPUs up to 16 rows share
            their work all the same; elsewhere rows then share none.
        stream (optional): Stream or device to run on.

    Returns:
        array: Of shape ``[..., outputs]`` and the promoted type of ``x``, scales and biases.

    Raises:
        DtypeError: A ``w`` is not uint32, or another argument not of a floating-point type named above.
        ValueError: Shapes, bits, group size, mode or activation do not fit together or do not exist.

    Example:
        >>> x = mx.random.normal((1, 64))
        >>> gate, up = (mx.quantize(mx.random.normal((128, 64)), 64, 4) for _ in range(2))
        >>> mm.quantized_swiglu(x, gate, up, 64, 4).shape
        (1, 128)

    Source:
        Shazeer, "GLU Variants Improve Transformer", 2020, https://arxiv.org/abs/2002.05202.
    """
    raise NotImplementedError


@defined_in_extension
def block_masked_mm(
    a: mx.array,
    b: mx.array,
    /,
    block_size: int = 64,
    mask_out: mx.array | None = None,
    mask_lhs: mx.array | None = None,
    mask_rhs: mx.array | None = None,
    *,
    stream: StreamOrDevice = None,
) -> mx.array:
    """Computes the product of two arrays with masked blocks; the twin of ``mx.block_masked_mm``.

    Blocks that are masked out take no time on Apple GPUs: they are neither read nor multiplied, and NaN or
    infinity there does not reach the result. Columns of ``a`` are a whole number of 16 bytes there, and where neither
    side is a vector ``b`` has at least 16 columns; mx computes the rest. On a CPU mx computes float32 and has no half
    types, which are composed of its operations; so is everything on NVIDIA GPUs.

    Args:
        a (array): Input of shape ``[..., M, K]``, or ``[K]``; float32, float16 or bfloat16.
        b (array): Of shape ``[..., K, N]``, or ``[K]``, of one of these types. A view is read where it lies if rows of
            it or of its transpose are contiguous.
        block_size (int): Rows and columns of a block: 32 or 64.
        mask_out (array, optional): A value for each block of the result: bools, or numbers that the blocks are
            multiplied with. It broadcasts to ``[..., M / block_size, N / block_size]``, rounded up, without the axis
            that the result is without.
        mask_lhs (array, optional): The same of ``a``, ``[..., M / block_size, K / block_size]``.
        mask_rhs (array, optional): The same of ``b``, ``[..., K / block_size, N / block_size]``.
        stream (optional): Stream or device to run on.

    Returns:
        array: Of shape ``[..., M, N]`` and the promoted type of ``a`` and ``b``.

    Raises:
        DtypeError: ``a`` or ``b`` is not of a floating-point type.
        ValueError: ``block_size`` is another number, or shapes do not fit together.

    Example:
        >>> a, b = mx.ones((64, 128)), mx.ones((128, 64))
        >>> mm.block_masked_mm(a, b, mask_lhs=mx.array([[True, False]]))[0, 0]
        array(64, dtype=float32)

    Source:
        Named after its twin in MLX.
    """
    raise NotImplementedError


@defined_in_extension
def block_matmul(
    x: mx.array,
    blocks: mx.array,
    kind: str,
    bias: mx.array | None = None,
    *,
    exact: bool = False,
    stream: StreamOrDevice = None,
) -> mx.array:
    """Product with weights as a GGUF file stores them: ``x @ block_dequantize(blocks, kind).T + bias``.

    Args:
        x (array): Input of shape ``[..., columns]``; float32, float16 or bfloat16.
        blocks (array): uint8 of shape ``[outputs, bytes]``, each row a whole number of blocks.
        kind (str): ``q4_0``, ``q4_1``, ``q5_0``, ``q5_1``, ``q8_0``, ``q2_k`` to ``q6_k``, ``iq4_nl``, ``iq4_xs``,
            ``mxfp4`` or ``nvfp4``. Kernels for Apple GPUs before the M5 take any number of rows of ``x``, those for
            other GPUs up to 16; more are multiplied with dequantized weights.
        bias (array, optional): Offset of shape ``[outputs]``.
        exact (bool): Whether a row of ``x`` gives, bit for bit, its result alone.
        stream (optional): Stream or device to run on.

    Returns:
        array: Of shape ``[..., outputs]`` and the promoted type of ``x`` and ``bias``.

    Raises:
        DtypeError: ``blocks`` is not uint8, or another argument not of a floating-point type named above.
        ValueError: ``kind`` is not known, a row is no whole number of blocks, or shapes do not fit together.

    Example:
        >>> x, w = mx.random.normal((1, 64)), mx.random.normal((128, 64))
        >>> mm.block_matmul(x, mm.block_quantize(w, "q4_0"), "q4_0").shape
        (1, 128)

    Source:
        The block formats of ggml, https://github.com/ggml-org/ggml.
    """
    raise NotImplementedError


@defined_in_extension
def block_quantize(w: mx.array, kind: str, *, stream: StreamOrDevice = None) -> mx.array:
    """Quantizes weights to GGUF blocks, byte for byte as the ``gguf`` package does.

    A NaN makes its block's scale NaN, and so the block. Integers that the package converts from no finite number (of
    NaN, of infinity, or over a scale whose reciprocal is infinite) are 0; the package's depend on the processor. So
    does the exponent of an ``mxfp4`` block, whose scale is never NaN.

    Args:
        w (array): Weights of shape ``[..., columns]``, columns a multiple of 32; float32, float16 or bfloat16.
        kind (str): ``q4_0`` (4.5 bits a weight) or ``q8_0`` (8.5 bits a weight); on CPUs also ``q4_1`` (5 bits),
            ``q5_0`` (5.5 bits), ``q5_1`` (6 bits) or ``mxfp4`` (4.25 bits).
        stream (optional): Stream or device to run on.

    Returns:
        array: uint8 of shape ``[..., bytes]``, for 32 weights 17 bytes (``mxfp4``), 18 (``q4_0``), 20 (``q4_1``), 22
        (``q5_0``), 24 (``q5_1``) or 34 (``q8_0``).

    Raises:
        DtypeError: ``w`` is not of a floating-point type named above.
        ValueError: ``kind`` is not known, or the columns are no multiple of 32.

    Example:
        >>> mm.block_quantize(mx.random.normal((128, 64)), "q8_0").shape
        (128, 68)

    Source:
        The block formats of ggml, https://github.com/ggml-org/ggml.
    """
    raise NotImplementedError


@defined_in_extension
def block_dequantize(
    blocks: mx.array, kind: str, dtype: mx.Dtype = mx.float32, *, stream: StreamOrDevice = None
) -> mx.array:
    """Widens GGUF blocks to weights; in float32 exactly as the ``gguf`` package does.

    Args:
        blocks (array): uint8 of shape ``[..., bytes]``, each row a whole number of blocks.
        kind (str): Any kind of `block_matmul`.
        dtype (Dtype): float32, float16 or bfloat16.
        stream (optional): Stream or device to run on.

    Returns:
        array: Of shape ``[..., columns]`` and type ``dtype``.

    Raises:
        DtypeError: ``blocks`` is not uint8, or ``dtype`` not a floating-point type named above.
        ValueError: ``kind`` is not known, or a row is no whole number of blocks.

    Example:
        >>> blocks = mm.block_quantize(mx.ones((2, 32)), "q8_0")
        >>> mm.block_dequantize(blocks, "q8_0").shape
        (2, 32)

    Source:
        The block formats of ggml, https://github.com/ggml-org/ggml.
    """
    raise NotImplementedError
