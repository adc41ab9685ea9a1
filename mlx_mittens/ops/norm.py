"""The ops, each with the signature of its mx twin.

Every op is lazy, takes float32, float16 and bfloat16 arrays, runs on the device of its stream and can be
differentiated, vmapped and compiled as any mx operation can. Arguments of different types are promoted as mx promotes
them; what promotes to float64 is left to mx, or is an error under ``mlx_mittens.strict()``. Bad input raises before
anything runs: ``ValueError`` for shapes and values, ``mlx_mittens.DtypeError`` (a ``ValueError`` and a ``TypeError``)
for element types.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ._declaration import StreamOrDevice, defined_in_extension

__all__ = ["add_rms_norm", "layer_norm", "rms_norm", "softmax"]


@defined_in_extension
def rms_norm(x: mx.array, weight: mx.array | None, eps: float, *, stream: StreamOrDevice = None) -> mx.array:
    """Root mean square normalization over the last axis: ``x / sqrt(mean(x^2) + eps) * weight``.

    The twin of ``mx.fast.rms_norm``. The mean is taken in float32; the normalized value is rounded to the result's type
    before the weight is applied, as in mx.

    Args:
        x (array): Input of shape ``[..., columns]``; float32, float16 or bfloat16.
        weight (array, optional): Scale of shape ``[columns]``. With ``None`` nothing is scaled.
        eps (float): Added to the mean square; finite and not negative.
        stream (optional): Stream or device to run on.

    Returns:
        array: Of ``x``'s shape and the promoted type of ``x`` and ``weight``.

    Raises:
        DtypeError: The arguments promote to no floating-point type.
        ValueError: ``x`` has no axis, ``weight`` is not of shape ``[columns]``, or ``eps`` is negative or not finite.

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
    where that overflows it is infinite, as in mx, and what is normalized is 0.

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
        array: Of ``a``'s shape and type.

    Raises:
        DtypeError: ``a`` is not of a floating-point type named above.
        ValueError: An axis is out of range or named twice.

    Source:
        The largest value and the sum of a row are found in one pass, as in Milakov and Gimelshein, "Online normalizer
        calculation for softmax", 2018, https://arxiv.org/abs/1805.02867.
    """
    raise NotImplementedError


@defined_in_extension
def add_rms_norm(
    x: mx.array, residual: mx.array, weight: mx.array | None, eps: float, *, stream: StreamOrDevice = None
) -> tuple[mx.array, mx.array]:
    """Adds a residual and normalizes the sum, in one kernel: what a transformer does between two blocks.

    Equal to ``s = x + residual; (mx.fast.rms_norm(s, weight, eps), s)``, with the sum rounded to its type as there.

    Args:
        x (array): Input of shape ``[..., columns]``; float32, float16 or bfloat16.
        residual (array): Of ``x``'s shape; float32, float16 or bfloat16.
        weight (array, optional): Scale of shape ``[columns]``. With ``None`` nothing is scaled.
        eps (float): Added to the mean square; finite and not negative.
        stream (optional): Stream or device to run on.

    Returns:
        tuple(array, array): The normalized sum and the sum ``x + residual``, both of ``x``'s shape and the promoted
            type.

    Raises:
        DtypeError: The arguments promote to no floating-point type.
        ValueError: ``x`` has no axis, ``residual`` is not of ``x``'s shape, ``weight`` is not of shape ``[columns]``,
            or ``eps`` is negative or not finite.

    Source:
        The pre-norm residual block of Xiong et al., "On Layer Normalization in the Transformer Architecture", 2020,
        https://arxiv.org/abs/2002.04745, with the norm of ``rms_norm``.
    """
    raise NotImplementedError
