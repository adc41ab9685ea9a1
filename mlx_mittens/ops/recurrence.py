"""Linear recurrences: updates of a state that stands in the place of keys and values."""

from __future__ import annotations

import mlx.core as mx

from ._declaration import StreamOrDevice, defined_in_extension

__all__ = ["gated_delta_update", "ssm_update"]


@defined_in_extension
def gated_delta_update(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    gamma: mx.array,
    beta: mx.array,
    initial_state: mx.array | None = None,
    mask: mx.array | None = None,
    *,
    stream: StreamOrDevice = None,
) -> tuple[mx.array, mx.array]:
    """The gated delta rule, for one token or a prompt: ``mx.fast.gated_delta_update``, also with a gate per column.

    Each head has a state ``S`` of shape ``[rows, columns]``. A step computes::

        S = S * gamma;  S = S + beta * (v - S @ k) outer k;  y = S @ q

    Neither ``q`` nor ``k`` is scaled or normalized. The state is float32 throughout, and written in place if nobody
    else needs it. On a GPU a kernel has up to 512 columns; on an Apple GPU MLX's own runs where it has one. Gradients
    are native on the CPU, where states are computed again from one in 32; on a GPU they come from products of
    matrices over chunks of steps, or from MLX where its kernel ran.

    Args:
        q (array): Queries of shape ``[batch, steps, key_heads, columns]``; float32, float16 or bfloat16.
        k (array): Keys of ``q``'s shape.
        v (array): Values of shape ``[batch, steps, heads, rows]``, ``heads`` a multiple of ``key_heads``: as many
            neighbouring heads share a key head.
        gamma (array): Gates between 0 and 1, of shape ``[batch, steps, heads]`` or
            ``[batch, steps, heads, columns]``; they are taken in float32.
        beta (array): Rates of shape ``[batch, steps, heads]``.
        initial_state (array, optional): Of shape ``[batch, heads, rows, columns]``; zeros by default.
        mask (array, optional): Of bool and shape ``[batch, steps]``. A step where it is false leaves the state as it
            is, and its ``y`` is 0.
        stream (optional): Stream or device to run on.

    Returns:
        tuple: ``y`` of ``v``'s shape and the promoted type of ``q``, ``k`` and ``v``, and the last state, of the type
        of ``initial_state``, else float32.

    Raises:
        DtypeError: ``mask`` is not bool, or another argument not of a floating-point type named above.
        ValueError: Shapes do not fit together.

    Example:
        >>> q = k = mx.random.normal((1, 5, 2, 64)) * 0.1
        >>> v, gates = mx.random.normal((1, 5, 4, 32)), mx.full((1, 5, 4), 0.9)
        >>> y, state = mm.gated_delta_update(q, k, v, gates, gates)
        >>> y.shape, state.shape
        ((1, 5, 4, 32), (1, 4, 32, 64))

    Source:
        Yang, Kautz and Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024,
        https://arxiv.org/abs/2412.06464; Kimi Team, "Kimi Linear", 2025, https://arxiv.org/abs/2510.26692, for gates
        per column.
    """
    raise NotImplementedError


@defined_in_extension
def ssm_update(
    hidden_states: mx.array,
    A_log: mx.array,
    B: mx.array,
    C: mx.array,
    D: mx.array,
    dt: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    time_step_limit: tuple[float, float] = (0.001, 100.0),
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
    *,
    stream: StreamOrDevice = None,
) -> tuple[mx.array, mx.array]:
    """The state-space step of Mamba 2, for one token or a prompt: mlx-lm's ``ssm_update``.

    Each head has a state ``S`` of shape ``[rows, columns]``. A step computes, with ``x`` of ``hidden_states``::

        dt = clip(softplus(dt + dt_bias), *time_step_limit)
        S = S * exp(-exp(A_log) * dt);  S = S + dt * x outer B;  y = S @ C + D * x

    Time steps, decays and the state are float32 throughout, and the state is written in place if nobody else needs it.
    On a GPU a kernel has up to 512 columns; on Apple GPUs more than 8 steps are products of matrices over chunks of
    them, and so are all gradients on GPUs. On the CPU gradients are native.

    Args:
        hidden_states (array): ``x`` of shape ``[batch, steps, heads, rows]``; float32, float16 or bfloat16.
        A_log (array): Logarithms of the rates of decay, of shape ``[heads]``.
        B (array): Weights that write the state, of shape ``[batch, steps, groups, columns]``, ``heads`` a multiple of
            ``groups``: as many neighbouring heads share a group.
        C (array): Weights that read the state, of ``B``'s shape.
        D (array): Factors of the input that bypasses the state, of shape ``[heads]``.
        dt (array): Time steps before ``softplus``, of shape ``[batch, steps, heads]``.
        dt_bias (array): Of shape ``[heads]``.
        state (array, optional): Of shape ``[batch, heads, rows, columns]``; zeros by default.
        time_step_limit (tuple): The least and the greatest time step.
        mask (array, optional): Of bool and shape ``[batch, steps]``. A step where it is false leaves the state as it
            is, and its ``y`` is ``D * x``.
        lengths (array, optional): Of integers and shape ``[batch]``. Steps from there on are hidden, as by ``mask``.
        stream (optional): Stream or device to run on.

    Returns:
        tuple: ``y`` of the shape of ``hidden_states`` and the promoted type of it and ``D``, and the last state, of
        the type of ``state``, else float32.

    Raises:
        DtypeError: ``mask`` is not bool, ``lengths`` not of integers, or another argument not of a floating-point type
            named above.
        ValueError: Shapes do not fit together, or the limits are not in order.

    Example:
        >>> x, dt = mx.random.normal((1, 5, 4, 32)), mx.zeros((1, 5, 4))
        >>> b = c = mx.random.normal((1, 5, 2, 64))
        >>> head = mx.ones(4)
        >>> y, state = mm.ssm_update(x, head, b, c, head, dt, head)
        >>> y.shape, state.shape
        ((1, 5, 4, 32), (1, 4, 32, 64))

    Source:
        Dao and Gu, "Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured State Space
        Duality", 2024, https://arxiv.org/abs/2405.21060.
    """
    raise NotImplementedError
