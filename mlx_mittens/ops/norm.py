"""The ops, each with the signature of its mx twin.

Every op is lazy, takes float32, float16 and bfloat16 arrays, runs on the device of its stream and can be
differentiated, vmapped and compiled as any mx operation can. Arguments of different types are promoted as mx promotes
them; a promotion to float64 is left to mx, or is an error under ``mlx_mittens.strict()``. Bad input raises before
anything runs: ``ValueError`` for shapes and values, ``mlx_mittens.DtypeError`` (a ``ValueError`` and a ``TypeError``)
for element types.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ._declaration import StreamOrDevice, defined_in_extension

__all__ = ["add_rms_norm", "layer_norm", "norm_add_norm", "qk_norm", "rms_norm", "softcap", "softmax"]


@defined_in_extension
def rms_norm(
    x: mx.array, weight: mx.array | None, eps: float, *, weight_offset: float = 0.0, stream: StreamOrDevice = None
) -> mx.array:
    """Root mean square normalization over the last axis: ``x / sqrt(mean(x^2) + eps) * (weight_offset + weight)``.

    The twin of ``mx.fast.rms_norm``. The mean is taken in float32; the normalized value is rounded to the result's type
    before the weight is applied, as in mx. The offset is added to the weight in float32, where
    ``mx.fast.rms_norm(x, 1.0 + weight, eps)`` rounds the sum to the weight's type first.

    Args:
        x (array): Input of shape ``[..., columns]``; float32, float16 or bfloat16.
        weight (array, optional): Scale of shape ``[columns]``. With ``None`` nothing is scaled.
        eps (float): Added to the mean square; finite and not negative.
        weight_offset (float): Added to the weight; finite. 1.0 gives the norm of Gemma, whose scale is 1 + weight.
        stream (optional): Stream or device to run on.

    Returns:
        array: Of ``x``'s shape and the promoted type of ``x`` and ``weight``.

    Raises:
        DtypeError: The arguments promote to no floating-point type.
        ValueError: ``x`` has no axis, ``weight`` is not of shape ``[columns]``, ``eps`` is negative or not finite, or
            ``weight_offset`` is not finite or comes without a weight.

    Example:
        >>> x, weight = mx.random.normal((2, 8)), mx.zeros((8,))
        >>> y = mm.rms_norm(x, weight, 1e-6, weight_offset=1.0)  # as mx.fast.rms_norm(x, 1.0 + weight, 1e-6)

    Source:
        Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, https://arxiv.org/abs/1910.07467.
    """
    raise NotImplementedError


@defined_in_extension
def layer_norm(
    x: mx.array, weight: mx.array | None, bias: mx.array | None, eps: float, *, stream: StreamOrDevice = None
) -> mx.array:
    """Layer normalization over the last axis: ``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias``.

    The twin of ``mx.fast.layer_norm``. Mean and variance are taken in float32, the variance from the centred values;
    where that overflows it is infinite, as in mx, and the normalized row is 0.

    Args:
        x (array): Input of shape ``[..., columns]``; float32, float16 or bfloat16.
        weight (array, optional): Scale of shape ``[columns]``. With ``None`` nothing is scaled.
        bias (array, optional): Offset of shape ``[columns]``. With ``None`` nothing is added.
        eps (float): Added to the variance; finite and not negative.
        stream (optional): Stream or device to run on.

    Returns:
        array: Of ``x``'s shape and the promoted type of ``x``, ``weight`` and ``bias``; without ``weight``, of ``x``'s.

    Raises:
        DtypeError: The arguments promote to no floating-point type.
        ValueError: ``x`` has no axis, ``weight`` or ``bias`` is not of shape ``[columns]``, or ``eps`` is negative or
            not finite.

    Example:
        >>> x = mx.random.normal((2, 8))
        >>> y = mm.layer_norm(x, mx.ones((8,)), mx.zeros((8,)), 1e-5)
        >>> y.shape
        (2, 8)

    Source:
        Ba, Kiros and Hinton, "Layer Normalization", 2016, https://arxiv.org/abs/1607.06450.
    """
    raise NotImplementedError


@defined_in_extension
def softmax(
    a: mx.array, /, axis: int | Sequence[int] | None = None, *, precise: bool = False, stream: StreamOrDevice = None
) -> mx.array:
    """Softmax over one axis, several axes or the whole array: ``exp(a) / sum(exp(a), axis, keepdims=True)``.

    The twin of ``mx.softmax``. It accumulates in float32 always and rounds once, at the end. A slice that holds a NaN,
    or nothing but -inf, gives NaN.

    Args:
        a (array): Input of any shape; float32, float16 or bfloat16.
        axis (int or list(int), optional): Axis or axes to normalize over, negative ones counted from the end. With
            ``None`` the whole array is one distribution.
        precise (bool): Taken for the sake of mx's signature; both values give the precise result.
        stream (optional): Stream or device to run on.

    Returns:
        array: Of ``a``'s shape and type; float32 of integers and bool. Other types are mx's.

    Raises:
        ValueError: An axis is out of range or named twice.

    Example:
        >>> mm.softmax(mx.array([[1.0, 1.0], [-mx.inf, 0.0]]), axis=-1)
        array([[0.5, 0.5],
               [0, 1]], dtype=float32)

    Source:
        The largest value and the sum of a row are found in one pass, as in Milakov and Gimelshein, "Online normalizer
        calculation for softmax", 2018, https://arxiv.org/abs/1805.02867.
    """
    raise NotImplementedError


@defined_in_extension
def add_rms_norm(
    x: mx.array,
    residual: mx.array,
    weight: mx.array | None,
    eps: float,
    *,
    weight_offset: float = 0.0,
    stream: StreamOrDevice = None,
) -> tuple[mx.array, mx.array]:
    """Adds a residual and normalizes the sum, in one kernel: the step of a transformer between two blocks.

    Equal to ``s = x + residual; (mx.fast.rms_norm(s, weight, eps), s)``, with the sum rounded to its type as there, and
    with the offset of the weight that ``rms_norm`` has.

    Args:
        x (array): Input of shape ``[..., columns]``; float32, float16 or bfloat16.
        residual (array): Of ``x``'s shape; float32, float16 or bfloat16.
        weight (array, optional): Scale of shape ``[columns]``. With ``None`` nothing is scaled.
        eps (float): Added to the mean square; finite and not negative.
        weight_offset (float): Added to the weight; finite. 1.0 gives the norm of Gemma, whose scale is 1 + weight.
        stream (optional): Stream or device to run on.

    Returns:
        tuple(array, array): The normalized sum, of the promoted type, and the sum ``x + residual``, of the type that
            these two promote to. Both have ``x``'s shape.

    Raises:
        DtypeError: The arguments promote to no floating-point type.
        ValueError: ``x`` has no axis, ``residual`` is not of ``x``'s shape, ``weight`` is not of shape ``[columns]``,
            ``eps`` is negative or not finite, or ``weight_offset`` is not finite or comes without a weight.

    Example:
        >>> x, residual = mx.random.normal((2, 8)), mx.random.normal((2, 8))
        >>> y, total = mm.add_rms_norm(x, residual, mx.ones((8,)), 1e-5)
        >>> mx.array_equal(total, x + residual).item()
        True

    Source:
        The pre-norm residual block of Xiong et al., "On Layer Normalization in the Transformer Architecture", 2020,
        https://arxiv.org/abs/2002.04745, with the norm of ``rms_norm``.
    """
    raise NotImplementedError


@defined_in_extension
def norm_add_norm(
    x: mx.array,
    residual: mx.array,
    weight: mx.array | None,
    next_weight: mx.array | None,
    eps: float,
    *,
    weight_offset: float = 0.0,
    next_weight_offset: float = 0.0,
    clip_sum: bool = False,
    stream: StreamOrDevice = None,
) -> tuple[mx.array, mx.array]:
    """Normalizes, adds a residual and normalizes the sum, in one kernel: between the blocks of Gemma 2 and 3 and GLM-4.

    Equal to ``add_rms_norm(rms_norm(x, weight, eps), residual, next_weight, eps)``, rounded to the type where that is.

    Args:
        x (array): Output of a block, of shape ``[..., columns]``; float32, float16 or bfloat16.
        residual (array): Of ``x``'s shape; float32, float16 or bfloat16.
        weight (array, optional): Scale of the norm of ``x``, of shape ``[columns]``. With ``None`` nothing is scaled.
        next_weight (array, optional): Scale of the norm of the sum, of shape ``[columns]``. With ``None`` nothing is
            scaled.
        eps (float): Added to both mean squares; finite and not negative.
        weight_offset (float): Added to ``weight``, in float32; finite. It is 1.0 in Gemma.
        next_weight_offset (float): Added to ``next_weight``, in float32; finite.
        clip_sum (bool): Whether the sum is clipped to finite numbers where it is float16, as in Gemma 3. Sums of other
            types stay as they are.
        stream (optional): Stream or device to run on.

    Returns:
        tuple(array, array): The normalized sum, of the promoted type, and the sum
            ``residual + rms_norm(x, weight, eps)``, of the promoted type of these three. Both have ``x``'s shape.

    Raises:
        DtypeError: The arguments promote to no floating-point type.
        ValueError: ``x`` has no axis, ``residual`` is not of ``x``'s shape, a weight is not of shape ``[columns]``,
            ``eps`` is negative or not finite, or an offset is not finite or comes without its weight.

    Example:
        >>> x, residual, weight = mx.random.normal((2, 8)), mx.random.normal((2, 8)), mx.ones((8,))
        >>> normed, total = mm.norm_add_norm(x, residual, weight, weight, 1e-6)

    Source:
        The residual block of Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size", 2024,
        https://arxiv.org/abs/2408.00118, which normalizes the input and the output of each block.
    """
    raise NotImplementedError


@defined_in_extension
def qk_norm(
    queries: mx.array,
    keys: mx.array,
    query_weight: mx.array | None,
    key_weight: mx.array | None,
    eps: float,
    *,
    weight_offset: float = 0.0,
    stream: StreamOrDevice = None,
) -> tuple[mx.array, mx.array]:
    """Root mean square normalization of the heads of queries and of keys, in one kernel.

    Equal to ``rms_norm(queries, query_weight, eps), rms_norm(keys, key_weight, eps)``. Heads are read where they are:
    parts of one product, and heads whose axis was moved before the tokens' axis, are not copied. Where a rotary
    embedding and the append to a cache follow, ``rope_append`` does all three.

    Args:
        queries (array): Heads of shape ``[..., width]``, as ``[batch, tokens, heads, width]`` or
            ``[batch, heads, tokens, width]``; float32, float16 or bfloat16.
        keys (array): Heads of shape ``[..., width]``, perhaps fewer; float32, float16 or bfloat16.
        query_weight (array, optional): Scale of shape ``[width]``. With ``None`` queries are not scaled.
        key_weight (array, optional): Scale of shape ``[width]``. With ``None`` keys are not scaled.
        eps (float): Added to the mean squares; finite and not negative.
        weight_offset (float): Added to each weight, in float32; finite. It is 1.0 in Gemma.
        stream (optional): Stream or device to run on.

    Returns:
        tuple(array, array): The normalized queries and keys, row contiguous, of the shapes of ``queries`` and ``keys``
            and the promoted types of each with its weight.

    Raises:
        DtypeError: Queries or keys promote with their weight to no floating-point type.
        ValueError: ``queries`` or ``keys`` has no axis, their widths differ, a weight is not of shape ``[width]``,
            ``eps`` is negative or not finite, or ``weight_offset`` is not finite or comes without any weight.

    Example:
        >>> heads = mx.random.normal((1, 5, 6, 64))  # four of queries, then two of keys
        >>> queries, keys = mm.qk_norm(heads[:, :, :4], heads[:, :, 4:], mx.ones((64,)), mx.ones((64,)), 1e-6)

    Source:
        Henry et al., "Query-Key Normalization for Transformers", 2020, https://arxiv.org/abs/2010.04245, with the norm
        of ``rms_norm``.
    """
    raise NotImplementedError


@defined_in_extension
def softcap(logits: mx.array, cap: float, *, stream: StreamOrDevice = None) -> mx.array:
    """Bounds logits smoothly: ``cap * tanh(logits / cap)``.

    It computes in float32 and rounds once, at the end, where mx's three operations round to the type of each result.
    NaN stays NaN, and infinity gives ``cap``.

    Args:
        logits (array): Input of any shape; float32, float16 or bfloat16.
        cap (float): The bound; finite and positive.
        stream (optional): Stream or device to run on.

    Returns:
        array: Of ``logits``'s shape and type.

    Raises:
        DtypeError: ``logits`` is not of a floating-point type.
        ValueError: ``cap`` is not positive or not finite.

    Example:
        >>> y = mm.softcap(mx.array([-1000.0, 0.5, 1000.0]), 30.0)

    Source:
        Gemma Team, "Gemma 2: Improving Open Language Models at a Practical Size", 2024,
        https://arxiv.org/abs/2408.00118.
    """
    raise NotImplementedError
