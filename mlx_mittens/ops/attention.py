"""Attention of a prompt and of decoding, over keys and values as they are or packed.

As the other ops they are lazy, run on the device of their stream and can be differentiated, vmapped and compiled. The
scores are never all held at once, neither by the kernels nor by the gradients.
"""

from __future__ import annotations

from typing import Literal, overload

import mlx.core as mx

from ._declaration import StreamOrDevice, defined_in_extension

__all__ = [
    "cascade_attention",
    "paged_attention",
    "quantized_scaled_dot_product_attention",
    "scaled_dot_product_attention",
]


@overload
def scaled_dot_product_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: None | str | mx.array = None,
    sinks: mx.array | None = None,
    window: int | None = None,
    force_fused: bool = False,
    exact: bool = False,
    starts: mx.array | None = None,
    ends: mx.array | None = None,
    return_logsumexp: Literal[False] = False,
    stream: StreamOrDevice = None,
) -> mx.array: ...


@overload
def scaled_dot_product_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: None | str | mx.array = None,
    sinks: mx.array | None = None,
    window: int | None = None,
    force_fused: bool = False,
    exact: bool = False,
    starts: mx.array | None = None,
    ends: mx.array | None = None,
    return_logsumexp: Literal[True],
    stream: StreamOrDevice = None,
) -> tuple[mx.array, mx.array]: ...


@overload
def scaled_dot_product_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: None | str | mx.array = None,
    sinks: mx.array | None = None,
    window: int | None = None,
    force_fused: bool = False,
    exact: bool = False,
    starts: mx.array | None = None,
    ends: mx.array | None = None,
    return_logsumexp: bool,
    stream: StreamOrDevice = None,
) -> mx.array | tuple[mx.array, mx.array]: ...


@defined_in_extension
def scaled_dot_product_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: None | str | mx.array = None,
    sinks: mx.array | None = None,
    window: int | None = None,
    force_fused: bool = False,
    exact: bool = False,
    starts: mx.array | None = None,
    ends: mx.array | None = None,
    return_logsumexp: bool = False,
    stream: StreamOrDevice = None,
) -> mx.array | tuple[mx.array, mx.array]:
    """Attention: ``softmax(scale * q @ k.T + mask) @ v``, for each head.

    The twin of ``mx.fast.scaled_dot_product_attention``, with a window besides. Scores and softmax are computed in
    float32 and rounded once, at the end. Views whose last axis is contiguous are read where they lie, so a key-value
    cache of larger capacity and transposed ``[batch, tokens, heads, width]`` arrays cost no copy.

    Keys and values that are hidden from a query do not change its result, even if they are NaN or infinite: the unused
    part of a cache may hold anything. Rows that meet such values are computed a second time, which is slow. Where mx
    does the work, hidden NaN may reach the result. GPU kernels, as mx's, sum up weighted values before they divide by
    the sum of the weights: where such a sum passes the largest float32, the result is infinite or NaN.

    On an NVIDIA GPU most calls of more than 32 queries (in float32: 128) go to mx, which has kernels of cuDNN there. On
    an Apple GPU with matrix units (M5) calls of more than 16 queries do, in float32 unless ``MLX_ENABLE_TF32`` is 0.
    Not in strict mode, with ``force_fused``, or within a short ``window``.

    Args:
        q (array): Queries of shape ``[batch, heads, queries, width]``; float32, float16 or bfloat16.
        k (array): Keys of shape ``[batch, key_heads, keys, width]``; ``heads`` is a multiple of ``key_heads``.
        v (array): Values of shape ``[batch, key_heads, keys, value_width]``, of any width.
        scale (float): Factor of the scores, such as ``width ** -0.5``.
        mask (str or array, optional): ``"causal"``: the last query sees all keys, each one before it one key less. An
            array that broadcasts to ``[batch, heads, queries, keys]``: bool, true where a key may be seen; or numbers
            that promote to the result's type, added to the scores, where -infinity hides a key.
        sinks (array, optional): A score for each head that takes part in the softmax without a value; shape
            ``[heads]``.
        window (int, optional): A query sees of the keys up to its own position, counted as for ``"causal"``, the last
            ``window`` ones.
        force_fused (bool): By one kernel, or an error where neither ours nor mx has one.
        exact (bool): Whether a query gets, bit for bit, the result of an exact call of it alone, over the keys in
            its range: of ``keys`` keys and ``queries`` queries, with ``mask="causal"`` or a window, query ``i`` has the
            first ``keys - queries + i + 1``. So verifying several tokens at once gives the bits of one token at a time.
            It holds for any number of threads on one machine, and costs the sharing of keys among queries. Not
            for derivatives, nor for ``mx.vmap`` over ``sinks``. ``mlx_mittens.patch(exact=True)`` turns it on for all
            calls. With ``starts`` and ``ends`` a row of the batch gets the bits of a call of this row and its keys.
        starts (array, optional): The first key of each row of the batch, int32 of shape ``[batch]``, or of each query,
            ``[batch, queries]``: several prompts, one behind the other, are a row whose queries start at their
            prompt's first key. A row reads no key that it does not see. One whose start or end is negative or larger
            than the number of keys is NaN.
        ends (array, optional): The key after the last of each row of the batch, int32 of shape ``[batch]``.
            ``"causal"`` and ``window`` count from it: the last query is at the row's last key.
        return_logsumexp (bool): Whether to return the logsumexp of each row's scores too, by which results over parts
            of the keys can be merged (``cascade_attention``).
        stream (optional): Stream or device to run on.

    Returns:
        array: Of shape ``[batch, heads, queries, value_width]`` and the promoted type of ``q``, ``k`` and ``v``. A
        query that sees no key gets 0, on every device and by every kind of mask, and its gradients are 0. (mx differs
        by device: on the CPU it gives the mean of all values, or NaN by an additive mask; its Metal kernels for a few
        queries give 0.) With ``return_logsumexp`` a pair of it and the logsumexp, of shape ``[batch, heads, queries]``
        and float32: -infinity for a query that sees no key and has no sink.

    Raises:
        DtypeError: An argument is not of a type named above.
        ValueError: Shapes do not fit together, ``mask`` is another string, ``window`` is not positive, or a call with
            ``exact`` has a start for each query.

    Example:
        >>> q, k, v = (mx.random.normal((1, heads, 10, 64)) for heads in (8, 2, 2))
        >>> mm.scaled_dot_product_attention(q, k, v, scale=64**-0.5, mask="causal").shape
        (1, 8, 10, 64)

    Source:
        Dao et al., "FlashAttention", 2022, https://arxiv.org/abs/2205.14135; Milakov and Gimelshein, "Online normalizer
        calculation for softmax", 2018, https://arxiv.org/abs/1805.02867.
    """
    raise NotImplementedError


@overload
def quantized_scaled_dot_product_attention(
    queries: mx.array,
    q_keys: tuple[mx.array, mx.array, mx.array],
    q_values: tuple[mx.array, mx.array, mx.array],
    scale: float,
    mask: None | str | mx.array = None,
    group_size: int = 64,
    bits: int = 8,
    *,
    sinks: mx.array | None = None,
    window: int | None = None,
    exact: bool = False,
    starts: mx.array | None = None,
    ends: mx.array | None = None,
    return_logsumexp: Literal[False] = False,
    stream: StreamOrDevice = None,
) -> mx.array: ...


@overload
def quantized_scaled_dot_product_attention(
    queries: mx.array,
    q_keys: tuple[mx.array, mx.array, mx.array],
    q_values: tuple[mx.array, mx.array, mx.array],
    scale: float,
    mask: None | str | mx.array = None,
    group_size: int = 64,
    bits: int = 8,
    *,
    sinks: mx.array | None = None,
    window: int | None = None,
    exact: bool = False,
    starts: mx.array | None = None,
    ends: mx.array | None = None,
    return_logsumexp: Literal[True],
    stream: StreamOrDevice = None,
) -> tuple[mx.array, mx.array]: ...


@overload
def quantized_scaled_dot_product_attention(
    queries: mx.array,
    q_keys: tuple[mx.array, mx.array, mx.array],
    q_values: tuple[mx.array, mx.array, mx.array],
    scale: float,
    mask: None | str | mx.array = None,
    group_size: int = 64,
    bits: int = 8,
    *,
    sinks: mx.array | None = None,
    window: int | None = None,
    exact: bool = False,
    starts: mx.array | None = None,
    ends: mx.array | None = None,
    return_logsumexp: bool,
    stream: StreamOrDevice = None,
) -> mx.array | tuple[mx.array, mx.array]: ...


@defined_in_extension
def quantized_scaled_dot_product_attention(
    queries: mx.array,
    q_keys: tuple[mx.array, mx.array, mx.array],
    q_values: tuple[mx.array, mx.array, mx.array],
    scale: float,
    mask: None | str | mx.array = None,
    group_size: int = 64,
    bits: int = 8,
    *,
    sinks: mx.array | None = None,
    window: int | None = None,
    exact: bool = False,
    starts: mx.array | None = None,
    ends: mx.array | None = None,
    return_logsumexp: bool = False,
    stream: StreamOrDevice = None,
) -> mx.array | tuple[mx.array, mx.array]:
    """Attention over a packed key-value cache, read once as it is packed.

    Takes the arguments of ``mlx_lm.models.base.quantized_scaled_dot_product_attention``, and sinks and a window.
    Kernels cover 4 and 8 bits. Other calls are composed of mx operations: in these, NaN among hidden scales and biases
    reaches the result. ``queries``, an additive ``mask`` and ``sinks`` have gradients.

    Args:
        queries (array): Queries of shape ``[batch, heads, queries, width]``; float32, float16 or bfloat16.
        q_keys (tuple): ``(words, scales, biases)`` as ``mx.quantize`` gives them for keys of shape
            ``[batch, key_heads, keys, width]``; ``heads`` is a multiple of ``key_heads``.
        q_values (tuple): The same for values of shape ``[batch, key_heads, keys, value_width]``.
        scale (float): Factor of the scores.
        mask (str or array, optional): As in ``scaled_dot_product_attention``.
        group_size (int): 32, 64 or 128.
        bits (int): 1, 2, 3, 4, 5, 6 or 8.
        sinks (array, optional): A score for each head that takes part in the softmax without a value.
        window (int, optional): A query sees of the keys up to its own position the last ``window`` ones.
        exact (bool): As in ``scaled_dot_product_attention``.
        starts (array, optional): As in ``scaled_dot_product_attention``.
        ends (array, optional): As in ``scaled_dot_product_attention``.
        return_logsumexp (bool): As in ``scaled_dot_product_attention``.
        stream (optional): Stream or device to run on.

    Returns:
        array: Of shape ``[batch, heads, queries, value_width]`` and the promoted type of ``queries``, scales and
        biases. A query that sees no key gets the same as from ``scaled_dot_product_attention``. With
        ``return_logsumexp`` a pair of it and the logsumexp.

    Raises:
        DtypeError: Words are not uint32, or another argument not of a type named above.
        ValueError: Shapes, bits or group size do not fit together or do not exist, ``mask`` is another string, or
            ``window`` is not positive.

    Example:
        >>> q, k = mx.random.normal((1, 8, 1, 64)), mx.random.normal((1, 2, 10, 64))
        >>> packed = mx.quantize(k, 64, 8)
        >>> mm.quantized_scaled_dot_product_attention(q, packed, packed, 64**-0.5).shape
        (1, 8, 1, 64)

    Source:
        As ``scaled_dot_product_attention``; affine quantization in groups as in Jacob et al., 2017,
        https://arxiv.org/abs/1712.05877.
    """
    raise NotImplementedError


@defined_in_extension
def cascade_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    prefix_k: mx.array,
    prefix_v: mx.array,
    *,
    scale: float,
    mask: None | str | mx.array = None,
    sinks: mx.array | None = None,
    starts: mx.array | None = None,
    ends: mx.array | None = None,
    stream: StreamOrDevice = None,
) -> mx.array:
    """Attention of rows that share their first keys, which are read once for all of them.

    What ``scaled_dot_product_attention`` gives over the keys of the prefix and a row's own behind them, in three
    launches: one over the prefix, one over each row's own keys, and one that puts both together. On a CPU their results
    are rounded to the result's type before they are merged.

    Args:
        q (array): Queries of shape ``[batch, heads, queries, width]``; float32, float16 or bfloat16.
        k (array): Each row's own keys, of shape ``[batch, key_heads, keys, width]``.
        v (array): Their values, of shape ``[batch, key_heads, keys, value_width]``.
        prefix_k (array): The keys that all rows share, of shape ``[1, key_heads, prefix, width]``. Every query sees
            them.
        prefix_v (array): Their values.
        scale (float): Factor of the scores.
        mask (str or array, optional): Of a row's own keys, as in ``scaled_dot_product_attention``.
        sinks (array, optional): A score for each head that takes part in the softmax without a value.
        starts (array, optional): Of a row's own keys, as in ``scaled_dot_product_attention``.
        ends (array, optional): Of a row's own keys, as in ``scaled_dot_product_attention``.
        stream (optional): Stream or device to run on.

    Returns:
        array: Of shape ``[batch, heads, queries, value_width]`` and the promoted type of the arrays.

    Raises:
        DtypeError: An argument is not of a type named above.
        ValueError: Shapes do not fit together, or ``mask`` is another string.

    Example:
        >>> q, k, prefix = (mx.random.normal(shape) for shape in ((4, 8, 1, 64), (4, 2, 10, 64), (1, 2, 100, 64)))
        >>> mm.cascade_attention(q, k, k, prefix, prefix, scale=64**-0.5).shape
        (4, 8, 1, 64)

    Source:
        Ye et al., "Cascade Inference: Memory Bandwidth Efficient Shared Prefix Batch Decoding", 2024,
        https://flashinfer.ai/2024/02/02/cascade-inference.html.
    """
    raise NotImplementedError


@overload
def paged_attention(
    q: mx.array,
    key_blocks: mx.array | tuple[mx.array, mx.array, mx.array],
    value_blocks: mx.array | tuple[mx.array, mx.array, mx.array],
    block_table: mx.array,
    lengths: mx.array,
    *,
    scale: float,
    mask: str | None = None,
    sinks: mx.array | None = None,
    window: int | None = None,
    group_size: int = 64,
    bits: int = 8,
    exact: bool = False,
    return_logsumexp: Literal[False] = False,
    stream: StreamOrDevice = None,
) -> mx.array: ...


@overload
def paged_attention(
    q: mx.array,
    key_blocks: mx.array | tuple[mx.array, mx.array, mx.array],
    value_blocks: mx.array | tuple[mx.array, mx.array, mx.array],
    block_table: mx.array,
    lengths: mx.array,
    *,
    scale: float,
    mask: str | None = None,
    sinks: mx.array | None = None,
    window: int | None = None,
    group_size: int = 64,
    bits: int = 8,
    exact: bool = False,
    return_logsumexp: Literal[True],
    stream: StreamOrDevice = None,
) -> tuple[mx.array, mx.array]: ...


@overload
def paged_attention(
    q: mx.array,
    key_blocks: mx.array | tuple[mx.array, mx.array, mx.array],
    value_blocks: mx.array | tuple[mx.array, mx.array, mx.array],
    block_table: mx.array,
    lengths: mx.array,
    *,
    scale: float,
    mask: str | None = None,
    sinks: mx.array | None = None,
    window: int | None = None,
    group_size: int = 64,
    bits: int = 8,
    exact: bool = False,
    return_logsumexp: bool,
    stream: StreamOrDevice = None,
) -> mx.array | tuple[mx.array, mx.array]: ...


@defined_in_extension
def paged_attention(
    q: mx.array,
    key_blocks: mx.array | tuple[mx.array, mx.array, mx.array],
    value_blocks: mx.array | tuple[mx.array, mx.array, mx.array],
    block_table: mx.array,
    lengths: mx.array,
    *,
    scale: float,
    mask: str | None = None,
    sinks: mx.array | None = None,
    window: int | None = None,
    group_size: int = 64,
    bits: int = 8,
    exact: bool = False,
    return_logsumexp: bool = False,
    stream: StreamOrDevice = None,
) -> mx.array | tuple[mx.array, mx.array]:
    """Attention over keys and values in blocks of a pool, which a table names for each row of the batch.

    Key ``p`` of row ``b`` is ``key_blocks[block_table[b, p // n], :, p % n]``, where blocks have ``n`` keys. Rows may
    share blocks. Entries of the table behind a row's last key are not followed, nor with a window entries of keys that
    no query sees. A query that sees a key in a block outside of the pool is NaN, and so is a row whose length is
    negative or beyond the table; nothing is read there.

    Decoding and prompts have kernels for widths 64, 80, 96, 128 and 256, packed ones for 8 bits and 64, 96 and 128.
    Others are gathered and computed by mx. On a CPU there is native code for all, with 4 bits too.

    Args:
        q (array): Queries of shape ``[batch, heads, queries, width]``; float32, float16 or bfloat16.
        key_blocks (array or tuple): Pool of shape ``[blocks, key_heads, n, width]`` and of the type of ``q``, where
            ``n`` is 16, 32, 64 or another power of two; or ``(words, scales, biases)``, as ``mx.quantize`` gives them
            for that. Transposed views cost no copy: of a pool ``[blocks, n, key_heads, width]`` give
            ``pool.swapaxes(1, 2)``.
        value_blocks (array or tuple): Their values, of shape ``[blocks, key_heads, n, value_width]``.
        block_table (array): int32, of shape ``[batch, entries]``.
        lengths (array): How many keys each row has; int32, of shape ``[batch]``. The last ``queries`` of these
            belong to the queries.
        scale (float): Factor of the scores.
        mask (str, optional): ``"causal"``: query ``i`` sees the keys up to ``length - queries + i``.
        sinks (array, optional): A score for each head that takes part in the softmax without a value.
        window (int, optional): Number of the last keys, up to its own, that each query sees.
        group_size (int): Of packed keys and values: 32, 64 or 128.
        bits (int): Of packed keys and values.
        exact (bool): Whether a query gets, bit for bit, the result of an exact call of it and its keys alone, as in
            ``scaled_dot_product_attention``: in whichever blocks they lie, and whatever other rows there are.
        return_logsumexp (bool): Whether to return the logsumexp of each row's scores too.
        stream (optional): Stream or device to run on.

    Returns:
        array: Of shape ``[batch, heads, queries, value_width]`` and the type of ``q``. With ``return_logsumexp`` a pair
        of it and the logsumexp, of shape ``[batch, heads, queries]`` and float32: -infinity for a query that sees no
        key and has no sink, NaN where the result is.

    Raises:
        DtypeError: ``block_table`` or ``lengths`` is not int32, or a pool not of the type of ``q``.
        ValueError: Shapes do not fit together, ``mask`` is another string, or there is no kernel for an exact call.

    Example:
        >>> pool = mx.random.normal((10, 2, 16, 64))
        >>> q, table, lengths = mx.random.normal((2, 8, 1, 64)), mx.array([[3, 7], [5, 0]]), mx.array([20, 9])
        >>> mm.paged_attention(q, pool, pool, table, lengths, scale=64**-0.5).shape
        (2, 8, 1, 64)

    Source:
        Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023,
        https://arxiv.org/abs/2309.06180.
    """
    raise NotImplementedError
