"""Rotary embedding, together with a decoder layer's steps beside it, and the choice of a cache's tokens.

As the other ops this one is lazy, runs on the device of its stream and can be differentiated, vmapped and compiled.
"""

from __future__ import annotations

from typing import TypeVar

import mlx.core as mx

from .. import _ext
from ._declaration import StreamOrDevice, defined_in_extension

__all__ = ["index_scores", "paged_append", "quantized_rope_append", "rope_append", "take_tokens"]

_Pool = TypeVar("_Pool", mx.array, tuple[mx.array, mx.array, mx.array])


def rope_append(
    heads: mx.array,
    keys: mx.array,
    values: mx.array,
    dims: int,
    *,
    base: float | None = None,
    traditional: bool = False,
    scale: float = 1.0,
    offset: int | mx.array,
    freqs: mx.array | None = None,
    query_norm: mx.array | None = None,
    key_norm: mx.array | None = None,
    eps: float = 1e-6,
    start: int | None = None,
    stream: StreamOrDevice = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """Turns the queries and keys of new tokens and appends keys and values to a cache, in one kernel.

    A decoder layer's steps between the product with its weights and attention. Equal to ``mx.fast.rope`` of queries
    and of keys, after ``mx.fast.rms_norm`` of each head where there are norms, and to writing keys and values into
    ``keys[:, :, start : start + tokens]`` and ``values[:, :, start : start + tokens]``. Buffers that nothing else
    refers to are updated in place, also while work on them is on its way; others are copied first.

    Args:
        heads (array): Heads of queries, then of keys, then of values, of shape
            ``[batch, query_heads + 2 * key_heads, tokens, width]``; float32, float16 or bfloat16. A view whose last
            axis is contiguous costs no copy.
        keys (array): Buffer of shape ``[batch, key_heads, capacity, width]``.
        values (array): Buffer of shape ``[batch, key_heads, capacity, width]``; its capacity may be another.
        dims (int): Elements of a head that are rotated, an even number; the others stay as they are.
        base (float, optional): Pair ``i`` turns by ``base ** (-2 * i / dims)`` radians a position.
        traditional (bool): Whether pairs are neighbours, elements ``2 * i`` and ``2 * i + 1``, instead of ``i`` and
            ``dims / 2 + i``.
        scale (float): Factor of the positions.
        offset (int or array): Position of the first token; an array of integers of shape ``[batch]`` has one for each
            row of the batch, one of a single element is for all rows.
        freqs (array, optional): In place of ``base``: pair ``i`` turns by ``1 / freqs[i]``; shape ``[dims / 2]``.
        query_norm (array, optional): Weight of the norm of each head of queries, of shape ``[width]``; together with
            ``key_norm``.
        key_norm (array, optional): Weight of the norm of each head of keys.
        eps (float): Of the norms; finite and not negative.
        start (int, optional): Where in the buffers the first token goes; ``offset`` if it is not given, and that is a
            number.
        stream (optional): Stream or device to run on.

    Returns:
        tuple(array, array, array): The turned queries, of shape ``[batch, query_heads, tokens, width]``, and both
            buffers with the new tokens.

    Raises:
        DtypeError: An array is not of a floating-point type, or ``offset`` not of integers.
        ValueError: Shapes do not fit together, the tokens do not fit into the buffers, ``dims`` is odd or exceeds the
            width, or not exactly one of ``base`` and ``freqs`` or only one of the norms is given.

    Example:
        >>> heads, keys, values = mx.ones((1, 8, 1, 64)), mx.zeros((1, 2, 16, 64)), mx.zeros((1, 2, 16, 64))
        >>> queries, keys, values = mm.rope_append(heads, keys, values, 64, base=10000.0, offset=5)
        >>> queries.shape, values[0, 0, 5, 0].item()
        ((1, 4, 1, 64), 1.0)

    Source:
        Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021,
        https://arxiv.org/abs/2104.09864.
    """
    rotary = _ext.Rotary(dims, base, scale, freqs, query_norm, key_norm, eps, traditional)
    return _ext.rope_append(heads, keys, values, rotary, offset, start, stream)


def quantized_rope_append(
    heads: mx.array,
    keys: tuple[mx.array, mx.array, mx.array],
    values: tuple[mx.array, mx.array, mx.array],
    dims: int,
    *,
    base: float | None = None,
    traditional: bool = False,
    scale: float = 1.0,
    offset: int | mx.array,
    freqs: mx.array | None = None,
    query_norm: mx.array | None = None,
    key_norm: mx.array | None = None,
    eps: float = 1e-6,
    start: int | None = None,
    group_size: int = 64,
    bits: int = 8,
    stream: StreamOrDevice = None,
) -> tuple[mx.array, tuple[mx.array, mx.array, mx.array], tuple[mx.array, mx.array, mx.array]]:
    """``rope_append`` into a quantized cache: rotary embedding, quantization and the append, in one kernel.

    Turned keys and values, rounded to the type of ``heads``, are packed as ``mx.quantize`` packs them on the same
    device. Derivatives are as in ``mx.quantize``, whose words have none.

    Args:
        heads (array): Heads of queries, then of keys, then of values, of shape
            ``[batch, query_heads + 2 * key_heads, tokens, width]``; float32, float16 or bfloat16. The width is a
            multiple of ``group_size``.
        keys (tuple): ``(words, scales, biases)`` of a buffer of keys, as ``mx.quantize`` gives them for
            ``[batch, key_heads, capacity, width]``.
        values (tuple): The same of a buffer of values; its capacity may be another.
        dims (int): Elements of a head that are rotated, an even number; the others stay as they are.
        base (float, optional): Pair ``i`` turns by ``base ** (-2 * i / dims)`` radians a position.
        traditional (bool): Whether pairs are neighbours, elements ``2 * i`` and ``2 * i + 1``, instead of ``i`` and
            ``dims / 2 + i``.
        scale (float): Factor of the positions.
        offset (int or array): Position of the first token; an array of integers of shape ``[batch]`` has one for each
            row of the batch, one of a single element is for all rows.
        freqs (array, optional): In place of ``base``: pair ``i`` turns by ``1 / freqs[i]``; shape ``[dims / 2]``.
        query_norm (array, optional): Weight of the norm of each head of queries, of shape ``[width]``; together with
            ``key_norm``.
        key_norm (array, optional): Weight of the norm of each head of keys.
        eps (float): Of the norms; finite and not negative.
        start (int, optional): Where in the buffers the first token goes; ``offset`` if it is not given, and that is a
            number.
        group_size (int): 32, 64 or 128.
        bits (int): 2, 3, 4, 5, 6 or 8.
        stream (optional): Stream or device to run on.

    Returns:
        tuple(array, tuple, tuple): The turned queries, of shape ``[batch, query_heads, tokens, width]``, and both
            triples with the new tokens.

    Raises:
        DtypeError: Words are not uint32, ``offset`` not of integers, or another array not of a type named above.
        ValueError: Shapes, bits or group size do not fit together or do not exist, the tokens do not fit into the
            buffers, ``dims`` is odd or exceeds the width, or not exactly one of ``base`` and ``freqs`` or only one of
            the norms is given.

    Example:
        >>> heads, keys = mx.ones((1, 8, 1, 64)), mx.quantize(mx.zeros((1, 2, 16, 64)), 64, 4)
        >>> queries, keys, values = mm.quantized_rope_append(heads, keys, keys, 64, base=1e4, offset=5, bits=4)
        >>> mx.dequantize(*values, 64, 4)[0, 0, 5, 0].item()
        1.0

    Source:
        As ``rope_append``; affine quantization in groups as in Jacob et al., 2017, https://arxiv.org/abs/1712.05877.
    """
    rotary = _ext.Rotary(dims, base, scale, freqs, query_norm, key_norm, eps, traditional)
    return _ext.quantized_rope_append(heads, keys, values, rotary, offset, start, group_size, bits, stream)


@defined_in_extension
def paged_append(
    keys: mx.array,
    values: mx.array,
    key_blocks: _Pool,
    value_blocks: _Pool,
    block_table: mx.array,
    positions: mx.array,
    *,
    group_size: int = 64,
    bits: int = 8,
    stream: StreamOrDevice = None,
) -> tuple[_Pool, _Pool, mx.array]:
    """Keys and values of new tokens into blocks of a pool, which a table names for each row of the batch.

    Token ``t`` of row ``b`` becomes key ``p = positions[b] + t``, in ``key_blocks[block_table[b, p // n], :, p % n]``,
    where blocks have ``n`` keys. A token with no such key, entry or block goes nowhere: those before key 0, as of rows
    that are padded on the left, those beyond the table, and those whose block is not one of the pool. Two rows that
    append to the same key leave one or the other there.

    Pools that nothing else refers to are updated in place, also while work on them is on its way; others are copied
    first. Packed pools get the words of ``mx.quantize`` on the same device.

    Args:
        keys (array): New keys of shape ``[batch, key_heads, tokens, width]``; float32, float16 or bfloat16. A view
            whose last axis is contiguous costs no copy.
        values (array): New values of shape ``[batch, key_heads, tokens, value_width]``.
        key_blocks (array or tuple): Pool of shape ``[blocks, key_heads, n, width]``, where ``n`` is 16, 32, 64 or
            another power of two; or ``(words, scales, biases)``, as ``mx.quantize`` gives them for that. It may be a
            transposed view of another pool that nothing else refers to.
        value_blocks (array or tuple): The same of values.
        block_table (array): int32, of shape ``[batch, entries]``.
        positions (array): The key that each row's first token becomes: how many the row has; int32, of shape
            ``[batch]``.
        group_size (int): Of packed pools: 32, 64 or 128.
        bits (int): Of packed pools: 2, 3, 4, 5, 6 or 8.
        stream (optional): Stream or device to run on.

    Returns:
        tuple: Both pools with the new tokens, and ``positions + tokens``: the lengths for ``paged_attention``.

    Raises:
        DtypeError: ``block_table`` or ``positions`` is not int32, or the pools are not of the type of ``keys``.
        ValueError: Shapes, bits or group size do not fit together or do not exist.

    Example:
        >>> new, pool = mx.ones((2, 2, 1, 64)), mx.zeros((10, 2, 16, 64))
        >>> table, positions = mx.array([[3, 7], [5, 0]]), mx.array([19, 8])
        >>> pool, values, lengths = mm.paged_append(new, new, pool, pool, table, positions)
        >>> pool[7, 0, 3, 0].item(), lengths.tolist()
        (1.0, [20, 9])

    Source:
        As ``paged_attention``.
    """
    raise NotImplementedError


@defined_in_extension
def index_scores(
    q: mx.array, k: mx.array, weights: mx.array, *, scale: float = 1.0, stream: StreamOrDevice = None
) -> mx.array:
    """How well keys fit each query of an indexer, which chooses the keys that attention sees.

    ``scale * (weights.swapaxes(1, 2)[..., None] * mx.maximum(q @ k[:, None].swapaxes(-1, -2), 0)).sum(1)`` in one
    kernel: the heads share the keys, and scores of single heads are not stored. Scores and sums are float32.

    There are kernels for widths 64 and 128. Other widths go to mx.

    Args:
        q (array): Queries of shape ``[batch, heads, queries, width]``; float32, float16 or bfloat16. As of ``k`` and
            ``weights``, a view whose last axis is contiguous costs no copy.
        k (array): Keys of shape ``[batch, keys, width]``.
        weights (array): Weights of the heads, of shape ``[batch, queries, heads]``.
        scale (float): Factor of the result.
        stream (optional): Stream or device to run on.

    Returns:
        array: Of shape ``[batch, queries, keys]`` and the promoted type.

    Raises:
        DtypeError: The arguments promote to no floating-point type.
        ValueError: The shapes do not fit together.

    Example:
        >>> q, k, weights = (mx.random.normal(s) for s in ((1, 4, 1, 64), (1, 9, 64), (1, 1, 4)))
        >>> mm.index_scores(q, k, weights).shape
        (1, 1, 9)

    Source:
        DeepSeek-AI, "DeepSeek-V3.2: Pushing the Frontier of Open Large Language Models", 2025,
        https://arxiv.org/abs/2512.02556.
    """
    raise NotImplementedError


@defined_in_extension
def take_tokens(
    keys: mx.array, values: mx.array, indices: mx.array, *, stream: StreamOrDevice = None
) -> tuple[mx.array, mx.array]:
    """Keys and values of some tokens of a cache, in one kernel.

    Equal to ``mx.take_along_axis`` of ``keys`` and of ``values`` along their third axis, but that an index which is out
    of range gives a row of NaN. Keys and values of two types go to mx.

    Args:
        keys (array): Keys of shape ``[batch, heads, tokens, width]``; float32, float16 or bfloat16. A view whose last
            axis is contiguous costs no copy.
        values (array): Values of shape ``[batch, heads, tokens, value_width]``.
        indices (array): Which tokens; int32 or uint32, of shape ``[batch, heads, count]``, or ``[batch, 1, count]``
            where all heads have the same. Negative ones count from the end.
        stream (optional): Stream or device to run on.

    Returns:
        tuple(array, array): Keys of shape ``[batch, heads, count, width]``, and their values.

    Raises:
        DtypeError: ``indices`` is neither int32 nor uint32, or ``keys`` or ``values`` not floating-point.
        ValueError: The shapes do not fit together, or there are indices and no tokens.

    Example:
        >>> keys, values = mx.random.normal((1, 1, 9, 512)), mx.random.normal((1, 1, 9, 64))
        >>> new_keys, new_values = mm.take_tokens(keys, values, mx.array([[[8, 3, 0]]]))
        >>> new_keys.shape, new_values.shape
        ((1, 1, 3, 512), (1, 1, 3, 64))

    Source:
        The choice of keys is DeepSeek-V3.2's, as of ``index_scores``.
    """
    raise NotImplementedError
