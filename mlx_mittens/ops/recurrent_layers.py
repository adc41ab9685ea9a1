"""Layers of recurrent models around their states: convolutions, norms and gates, for prompts and for a token."""

from __future__ import annotations

from typing import Literal, TypeVar

import mlx.core as mx

from ._declaration import StreamOrDevice, defined_in_extension

__all__ = [
    "gated_delta_inputs",
    "gated_delta_token",
    "short_conv_token",
    "ssm_inputs",
    "ssm_token",
]

# One of all channels of a convolution, or one each of queries, keys and values.
Convolved = TypeVar("Convolved", mx.array, tuple[mx.array, mx.array, mx.array])


@defined_in_extension
def gated_delta_inputs(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    conv_state: Convolved | None,
    conv_weight: Convolved,
    A_log: mx.array,
    dt_bias: mx.array,
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
    *,
    key_eps: float = 1e-6,
    stream: StreamOrDevice = None,
) -> tuple[mx.array, mx.array, mx.array, mx.array, mx.array, Convolved]:
    """Computes the inputs of ``gated_delta_update`` for a prompt, from a layer's projections: Qwen3-Next, Kimi Linear.

    A causal convolution of ``q``, ``k`` and ``v`` with the steps before, SiLU, the norms of queries and keys, gates
    and rates, in one launch::

        window = concatenate([conv_state, [q k v]]);  q k v = silu(convolution(window, conv_weight))
        q = q / |q| / sqrt(columns);  k = k / |k|
        gamma = exp(-exp(A_log) * softplus(a + dt_bias));  beta = sigmoid(b)

    Steps that the mask hides have zeros for ``q``, ``k`` and ``v`` before the convolution. All is computed in float32,
    and rounded once. The inputs may be views of one projection. Gradients come from mx operations.

    Args:
        q (array): Queries before the convolution, of shape ``[batch, steps, key_heads, columns]``; float32, float16 or
            bfloat16.
        k (array): Keys before the convolution, of ``q``'s shape.
        v (array): Values before the convolution, of shape ``[batch, steps, key_heads, heads of each, rows]``.
        a (array): Time steps before their bias, of shape ``[batch, steps, key_heads, heads of each]``, or with
            ``columns`` as a last dimension.
        b (array): Rates before their sigmoid, of shape ``[batch, steps, key_heads, heads of each]``.
        conv_state (array, tuple of arrays or None): The convolution's inputs of the steps before, the last one last, of
            shape ``[batch, taps - 1, channels]``: all channels of ``q``, then of ``k``, then of ``v``. Or three arrays,
            where ``conv_weight`` is three. ``None`` means zeros.
        conv_weight (array or tuple of arrays): Of shape ``[channels, taps]``, or ``[channels, taps, 1]`` as
            ``mlx.nn.Conv1d`` has it; or three arrays.
        A_log (array): Logarithms of the rates of decay, of shape ``[heads]``: all heads of the first key head first.
        dt_bias (array): Of shape ``[heads]``, or ``[heads, columns]`` where ``a`` has columns.
        mask (array, optional): The steps that are seen, of shape ``[batch, steps]`` and type bool.
        lengths (array, optional): The steps behind which the next state is taken, of shape ``[batch]`` and an integer
            type; by default all.
        key_eps (float): Added to the sums of squares of queries and keys. Default: ``1e-6``.
        stream (optional): Stream or device to run on.

    Returns:
        tuple: ``q`` and ``k`` of their shapes, ``v`` of shape ``[batch, steps, heads, rows]``, all of the promoted type
        of the first five arguments; ``gamma`` of shape ``[batch, steps, heads]``, with ``columns`` behind where ``a``
        has them, and ``beta`` of shape ``[batch, steps, heads]``, both float32; and the next ``conv_state``, of the
        type of the one given.

    Raises:
        DtypeError: An argument is not of a type named above.
        ValueError: Shapes do not fit together, or ``key_eps`` is negative or not finite.

    Example:
        >>> q = k = mx.random.normal((1, 5, 2, 64))
        >>> v = mx.random.normal((1, 5, 2, 2, 32))
        >>> a = b = mx.random.normal((1, 5, 2, 2))
        >>> weight = mx.random.normal((384, 4))
        >>> q, k, v, gamma, beta, past = mm.gated_delta_inputs(q, k, v, a, b, None, weight, mx.zeros(4), mx.zeros(4))
        >>> v.shape, gamma.shape, past.shape
        ((1, 5, 4, 32), (1, 5, 4), (1, 3, 384))

    Source:
        Yang, Kautz and Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024,
        https://arxiv.org/abs/2412.06464.
    """
    raise NotImplementedError


@defined_in_extension
def gated_delta_token(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    z: mx.array,
    a: mx.array,
    b: mx.array,
    conv_state: Convolved,
    conv_weight: Convolved,
    A_log: mx.array,
    dt_bias: mx.array,
    norm_weight: mx.array,
    state: mx.array,
    *,
    eps: float = 1e-6,
    key_eps: float = 1e-6,
    gate: Literal["silu", "sigmoid"] = "silu",
    stream: StreamOrDevice = None,
) -> tuple[mx.array, Convolved, mx.array]:
    """One token of a layer of the gated delta rule, from its projections to its gated norm: Qwen3-Next, Kimi Linear.

    A causal convolution of ``q``, ``k`` and ``v`` with the tokens before, SiLU, the norms of queries and keys, the
    gates, the step of each head's state ``S``, and the norm of the result, gated by ``z``::

        window = concatenate([conv_state, [q k v]]);  q k v = silu((window * conv_weight.T).sum(1))
        q = q / |q| / sqrt(columns);  k = k / |k|
        S = S * exp(-exp(A_log) * softplus(a + dt_bias))
        S = S + sigmoid(b) * (v - S @ k) outer k
        y = norm_weight * rms_norm(S @ q) * silu(z)

    Kimi Linear has a decay for each column of the state, convolutions of ``q``, of ``k`` and of ``v`` apart, and a
    sigmoid of ``z``. All is computed in float32, and ``y`` is rounded once. The inputs may be views of one projection.
    The state is float32 throughout, and written in place if nobody else needs it; so are states of convolutions apart,
    where each key head has one head. On a GPU a kernel has up to 512 columns and rows; mx operations
    compute the gradients.

    Args:
        q (array): Queries before the convolution, of shape ``[batch, key_heads, columns]``; float32, float16 or
            bfloat16.
        k (array): Keys before the convolution, of ``q``'s shape.
        v (array): Values before the convolution, of shape ``[batch, key_heads, heads of each, rows]``.
        z (array): Gates of the results, of ``v``'s shape.
        a (array): Time steps before their bias, of shape ``[batch, key_heads, heads of each]``, or with ``columns`` as
            a last dimension.
        b (array): Rates before their sigmoid, of shape ``[batch, key_heads, heads of each]``.
        conv_state (array or tuple of arrays): The convolution's inputs of the tokens before, the last one last, of
            shape ``[batch, taps - 1, channels]``: all channels of ``q``, then of ``k``, then of ``v``. Or three arrays.
        conv_weight (array or tuple of arrays): Of shape ``[channels, taps]``, or ``[channels, taps, 1]`` as
            ``mlx.nn.Conv1d`` has it; three arrays where ``conv_state`` is.
        A_log (array): Logarithms of the rates of decay, of shape ``[heads]``: all heads of the first key head first.
        dt_bias (array): Of shape ``[heads]``, or ``[heads, columns]`` where ``a`` has columns.
        norm_weight (array): Of shape ``[rows]``.
        state (array): Of shape ``[batch, heads, rows, columns]``.
        eps (float): Of the norm of the result. Default: ``1e-6``.
        key_eps (float): Added to the sums of squares of queries and keys. Default: ``1e-6``.
        gate (str): Activation of ``z``, ``"silu"`` or ``"sigmoid"``. Default: ``"silu"``.
        stream (optional): Stream or device to run on.

    Returns:
        tuple: ``y`` of shape ``[batch, heads, rows]`` and the promoted type of the first six arguments, and the next
        ``conv_state`` and ``state``, of the types of those given.

    Raises:
        DtypeError: An argument is not of a floating-point type named above.
        ValueError: Shapes do not fit together, ``eps`` or ``key_eps`` is negative or not finite, or ``gate`` is not
            one of those named.

    Example:
        >>> q = k = mx.random.normal((1, 2, 64))
        >>> v = z = mx.random.normal((1, 2, 2, 32))
        >>> a = b = mx.random.normal((1, 2, 2))
        >>> past, weight = mx.zeros((1, 3, 384)), mx.random.normal((384, 4))
        >>> y, past, state = mm.gated_delta_token(
        ...     q, k, v, z, a, b, past, weight, mx.zeros(4), mx.zeros(4), mx.ones(32), mx.zeros((1, 4, 32, 64))
        ... )
        >>> y.shape, past.shape, state.shape
        ((1, 4, 32), (1, 3, 384), (1, 4, 32, 64))

    Source:
        Yang, Kautz and Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024,
        https://arxiv.org/abs/2412.06464.
    """
    raise NotImplementedError


@defined_in_extension
def short_conv_token(
    projected: mx.array,
    conv_state: mx.array,
    conv_weight: mx.array,
    conv_bias: mx.array | None = None,
    *,
    stream: StreamOrDevice = None,
) -> tuple[mx.array, mx.array]:
    """One token of a short convolution with gates before and after it, as LFM2 has it::

        b, c, x = split(projected, 3)
        window = concatenate([conv_state, [b * x]])
        y = c * ((window * conv_weight.T).sum(1) + conv_bias)

    Several tokens, as of a prompt, are one launch too. All is computed in float32, but for ``b * x``, which is rounded
    as the state keeps it; ``y`` is rounded once. With one token the state is written in place if nobody else needs it.
    Gradients come from mx operations.

    Args:
        projected (array): ``b``, ``c`` and ``x`` side by side, of shape ``[batch, 3 * channels]`` or
            ``[batch, tokens, 3 * channels]``; float32, float16 or bfloat16.
        conv_state (array): The convolution's inputs of the tokens before, the last one last, of shape
            ``[batch, taps - 1, channels]``.
        conv_weight (array): Of shape ``[channels, taps]``, or ``[channels, taps, 1]`` as ``mlx.nn.Conv1d`` has it.
        conv_bias (array, optional): Of shape ``[channels]``.
        stream (optional): Stream or device to run on.

    Returns:
        tuple: ``y`` of the shape of ``projected``, but for ``channels`` last, and of its type, and the next
        ``conv_state``, of the type of the one given.

    Raises:
        DtypeError: An argument is not of a floating-point type named above.
        ValueError: Shapes do not fit together.

    Example:
        >>> past, weight = mx.zeros((1, 2, 64)), mx.random.normal((64, 3))
        >>> y, past = mm.short_conv_token(mx.random.normal((1, 192)), past, weight)
        >>> y.shape, past.shape
        ((1, 64), (1, 2, 64))

    Source:
        Liquid AI, "LFM2 Technical Report", 2025, https://arxiv.org/abs/2511.23404.
    """
    raise NotImplementedError


@defined_in_extension
def ssm_inputs(
    mixed: mx.array,
    conv_state: mx.array | None,
    conv_weight: mx.array,
    conv_bias: mx.array | None,
    inner: int,
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
    *,
    stream: StreamOrDevice = None,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """The inputs of ``ssm_update`` for a prompt, from the projection of a layer of Mamba 2, in one launch::

        window = concatenate([conv_state, mixed])
        x, B, C = split(silu(convolution(window, conv_weight) + conv_bias))

    Steps that the mask hides have zeros for ``mixed``. All is computed in float32, and rounded once. ``mixed`` may be a
    view of the projection. Gradients come from mx operations.

    Args:
        mixed (array): The channels of ``x``, ``B`` and ``C`` side by side, of shape ``[batch, steps, channels]``;
            float32, float16 or bfloat16.
        conv_state (array or None): The convolution's inputs of the steps before, the last one last, of shape
            ``[batch, taps - 1, channels]``. ``None`` means zeros.
        conv_weight (array): Of shape ``[channels, taps]``, or ``[channels, taps, 1]`` as ``mlx.nn.Conv1d`` has it.
        conv_bias (array or None): Of shape ``[channels]``.
        inner (int): How many channels ``x`` has. ``B`` and ``C`` share the rest.
        mask (array, optional): The steps that are seen, of shape ``[batch, steps]`` and type bool.
        lengths (array, optional): The steps behind which the next state is taken, of shape ``[batch]`` and an integer
            type; by default all.
        stream (optional): Stream or device to run on.

    Returns:
        tuple: ``x`` of shape ``[batch, steps, inner]``, ``B`` and ``C`` of shape
        ``[batch, steps, (channels - inner) / 2]``, all of the type of ``mixed``, and the next ``conv_state``, of the
        type of the one given.

    Raises:
        DtypeError: An argument is not of a type named above.
        ValueError: Shapes do not fit together.

    Example:
        >>> mixed, weight = mx.random.normal((1, 5, 128)), mx.random.normal((128, 4))
        >>> x, b, c, past = mm.ssm_inputs(mixed, None, weight, None, 64)
        >>> x.shape, b.shape, past.shape
        ((1, 5, 64), (1, 5, 32), (1, 3, 128))

    Source:
        Dao and Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space
        Duality", 2024, https://arxiv.org/abs/2405.21060.
    """
    raise NotImplementedError


@defined_in_extension
def ssm_token(
    projected: mx.array,
    conv_state: mx.array,
    conv_weight: mx.array,
    conv_bias: mx.array | None,
    A_log: mx.array,
    D: mx.array,
    dt_bias: mx.array,
    state: mx.array,
    *,
    time_step_limit: tuple[float, float] = (0.001, 100.0),
    gated: bool = True,
    stream: StreamOrDevice = None,
) -> tuple[mx.array, mx.array, mx.array]:
    """One token of a layer of state spaces, from its projection to the gate of its result, as Mamba 2 has it.

    A causal convolution of ``x``, ``B`` and ``C`` with the tokens before, SiLU, the time step, the step of each head's
    state ``S``, and the gate by ``z``::

        z, mixed, dt = split(projected)
        window = concatenate([conv_state, [mixed]])
        x, B, C = split(silu((window * conv_weight.T).sum(1) + conv_bias))
        step = clip(softplus(dt + dt_bias), *time_step_limit)
        S = S * exp(-exp(A_log) * step) + step * x outer B
        y = (S @ C + D * x) * silu(z)

    All is computed in float32, and ``y`` is rounded once. The state is float32 throughout, and written in place if
    nobody else needs it. The norm of ``y``, which takes all heads, is left to a call of its own. On a GPU a kernel has
    up to 512 columns and rows; gradients come from mx operations.

    Args:
        projected (array): ``z``, the channels of ``x``, ``B`` and ``C``, and ``dt`` side by side, of shape
            ``[batch, heads * rows + channels + heads]``; float32, float16 or bfloat16.
        conv_state (array): The convolution's inputs of the tokens before, the last one last, of shape
            ``[batch, taps - 1, channels]``: all channels of ``x``, then of ``B``, then of ``C``.
        conv_weight (array): Of shape ``[channels, taps]``, or ``[channels, taps, 1]`` as ``mlx.nn.Conv1d`` has it.
            There are ``heads * rows + 2 * groups * columns`` channels.
        conv_bias (array or None): Of shape ``[channels]``.
        A_log (array): Logarithms of the rates of decay, of shape ``[heads]``.
        D (array): Of shape ``[heads]``.
        dt_bias (array): Of shape ``[heads]``.
        state (array): Of shape ``[batch, heads, rows, columns]``.
        time_step_limit (tuple): The least and the greatest time step. Default: ``(0.001, 100.0)``.
        gated (bool): Whether ``y`` is multiplied with ``silu(z)``. Default: ``True``.
        stream (optional): Stream or device to run on.

    Returns:
        tuple: ``y`` of shape ``[batch, heads * rows]`` and the type of ``projected``, and the next ``conv_state`` and
        ``state``, of the types of those given.

    Raises:
        DtypeError: An argument is not of a floating-point type named above.
        ValueError: Shapes do not fit together, or the least time step is above the greatest.

    Example:
        >>> heads, rows, columns, channels = 4, 16, 32, 4 * 16 + 2 * 32
        >>> past, weight = mx.zeros((1, 3, channels)), mx.random.normal((channels, 4))
        >>> projected = mx.random.normal((1, heads * rows + channels + heads))
        >>> ones, state = mx.ones(heads), mx.zeros((1, heads, rows, columns))
        >>> y, past, state = mm.ssm_token(projected, past, weight, None, ones, ones, ones, state)
        >>> y.shape, past.shape, state.shape
        ((1, 64), (1, 3, 128), (1, 4, 16, 32))

    Source:
        Dao and Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space
        Duality", 2024, https://arxiv.org/abs/2405.21060.
    """
    raise NotImplementedError
