"""Mixtures of experts: products of tokens with the experts that a router has chosen for them.

As the other ops they are lazy, run on the device of their stream and can be differentiated, vmapped and compiled. On
the CPU any number of tokens is native: each chosen expert is read once for all its tokens, and no other is read. On a
GPU the kernels read the expert of each row of results. Apple GPUs without matrix units sort more than 64 rows, as
prompts have, by their experts, and read an expert once for up to 64 of its rows. Other GPUs leave them to mx, unless a
calibration of this machine says that the kernels are faster. All have the formats of `mx.quantize` but 1 bit.

Indices are computed when MLX evaluates them, so that no call can refuse one that is out of range. Its results are NaN,
and nothing outside the arrays is read, also where mx computes them. Negative indices are out of range.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from ._declaration import StreamOrDevice, defined_in_extension

__all__ = ["gather_mm", "gather_qmm", "gather_sum", "gather_swiglu", "mixture", "route_top_k"]


@defined_in_extension
def gather_qmm(
    x: mx.array,
    w: mx.array,
    /,
    scales: mx.array,
    biases: mx.array | None = None,
    lhs_indices: mx.array | None = None,
    rhs_indices: mx.array | None = None,
    transpose: bool = True,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    global_scale: mx.array | None = None,
    *,
    sorted_indices: bool = False,
    stream: StreamOrDevice = None,
) -> mx.array:
    """Product of inputs with chosen quantized matrices: ``x[lhs] @ dequantize(w[rhs]).T`` for each pair of indices.

    The twin of ``mx.gather_qmm``, which has neither ``vmap`` nor forward derivatives. Kernels need ``transpose``.
    Sums are taken in float32 and rounded once.

    Args:
        x (array): Inputs of shape ``[batch..., rows, columns]``; float32, float16 or bfloat16.
        w (array): Integers packed in uint32 as ``mx.quantize`` does it, a stack of matrices.
        scales (array): Scale of each group, of ``w``'s leading shape.
        biases (array, optional): Offset of each group, of ``scales``' shape; in affine quantization alone.
        lhs_indices (array, optional): Integers, which index the batch of ``x`` as if it had one axis; all of the batch
            by default.
        rhs_indices (array, optional): The same for the stack of matrices. Both broadcast. A pair with an index out of
            range gives NaN.
        transpose (bool): Whether the groups go along the columns of ``x``.
        group_size (int, optional): 32, 64 or 128 in affine quantization; the default is as in ``mx.quantize``.
        bits (int, optional): 1, 2, 3, 4, 5, 6 or 8 in affine quantization; the default is as in ``mx.quantize``.
        mode (str): ``affine``, ``mxfp4``, ``mxfp8`` or ``nvfp4``.
        global_scale (array, optional): Scale of a matrix in ``nvfp4``; such calls go to mx.
        sorted_indices (bool): Promises mx that the indices are sorted. Kernels and the native code sort them
            themselves.
        stream (optional): Stream or device to run on.

    Returns:
        array: Of shape ``[indices..., rows, outputs]`` and the promoted type of ``x``, ``scales`` and ``biases``.

    Raises:
        DtypeError: ``w`` is not uint32, indices are no integers, or another argument not of a floating-point type
            named above.
        ValueError: Shapes, bits, group size or mode do not fit together or do not exist.

    Example:
        >>> x, experts = mx.random.normal((1, 64)), mx.quantize(mx.random.normal((8, 32, 64)), 64, 4)
        >>> mm.gather_qmm(x, *experts, rhs_indices=mx.array([3, 5]), group_size=64, bits=4).shape
        (2, 1, 32)

    Source:
        Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer", 2017,
        https://arxiv.org/abs/1701.06538.
    """
    raise NotImplementedError


@defined_in_extension
def gather_mm(
    a: mx.array,
    b: mx.array,
    /,
    lhs_indices: mx.array | None = None,
    rhs_indices: mx.array | None = None,
    *,
    sorted_indices: bool = False,
    stream: StreamOrDevice = None,
) -> mx.array:
    """Product of inputs with chosen matrices: ``a[lhs] @ b[rhs]`` for each pair of indices.

    The twin of ``mx.gather_mm``, which has neither ``vmap`` nor forward derivatives, and on the CPU no half types.
    Sums are taken in float32 and rounded once. On a GPU matrices whose columns are not contiguous are copied.

    Args:
        a (array): Inputs of shape ``[batch..., rows, columns]``; float32, float16 or bfloat16.
        b (array): Matrices of shape ``[stack..., columns, outputs]``. They are read where they lie if one of the last
            two axes is contiguous, as in the transpose of ``[stack..., outputs, columns]``.
        lhs_indices (array, optional): Integers, which index the batch of ``a`` as if it had one axis; all of the batch
            by default.
        rhs_indices (array, optional): The same for the stack of ``b``. Both broadcast. A pair with an index out of
            range gives NaN.
        sorted_indices (bool): Promises mx that the indices are sorted. The native code sorts them itself.
        stream (optional): Stream or device to run on.

    Returns:
        array: Of shape ``[indices..., rows, outputs]`` and the promoted type of ``a`` and ``b``.

    Raises:
        DtypeError: Indices are no integers, or another argument not of a floating-point type named above.
        ValueError: Shapes do not fit together.

    Example:
        >>> a, experts = mx.random.normal((1, 64)), mx.random.normal((8, 64, 32))
        >>> mm.gather_mm(a, experts, rhs_indices=mx.array([3, 5])).shape
        (2, 1, 32)

    Source:
        Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer", 2017,
        https://arxiv.org/abs/1701.06538.
    """
    raise NotImplementedError


@defined_in_extension
def gather_swiglu(
    x: mx.array,
    gate: Sequence[mx.array],
    up: Sequence[mx.array],
    lhs_indices: mx.array | None = None,
    rhs_indices: mx.array | None = None,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    *,
    bias: tuple[mx.array, mx.array] | None = None,
    activation: str = "swiglu",
    sorted_indices: bool = False,
    stream: StreamOrDevice = None,
) -> mx.array:
    """The gated half of chosen experts: ``silu(x[lhs] @ gate[rhs].T) * (x[lhs] @ up[rhs].T)``.

    Kernels compute everything in float32 and round once. On the CPU experts with a bias or clipped values are two
    products, and mx computes the rest.

    Args:
        x (array): Inputs of shape ``[batch..., rows, columns]``; float32, float16 or bfloat16.
        gate (tuple): ``(w, scales, biases)`` of a stack of matrices, as ``mx.quantize`` gives them; in modes but
            ``affine`` without biases.
        up (tuple): The same, of the same shape.
        lhs_indices (array, optional): As of ``gather_qmm``.
        rhs_indices (array, optional): As of ``gather_qmm``. A pair with an index out of range gives NaN.
        group_size (int, optional): As of ``gather_qmm``.
        bits (int, optional): As of ``gather_qmm``.
        mode (str): As of ``gather_qmm``.
        bias (tuple, optional): Added to the products of ``gate`` and of ``up``, each of shape
            ``[stack..., outputs]``.
        activation (str): ``swiglu``; ``geglu``, with ``nn.gelu_approx`` in the place of ``silu``, as Gemma 4 has it; or
            ``clipped``, as gpt-oss: ``g * sigmoid(1.702 * g) * (u + 1)`` of ``g = min(gate, 7)`` and
            ``u = clip(up, -7, 7)``.
        sorted_indices (bool): As of ``gather_qmm``.
        stream (optional): Stream or device to run on.

    Returns:
        array: Of shape ``[indices..., rows, outputs]`` and the promoted type of ``x``, scales and biases.

    Raises:
        DtypeError: A ``w`` is not uint32, indices are no integers, or another argument not of a floating-point type
            named above.
        ValueError: Shapes, bits, group size, mode or activation do not fit together or do not exist.

    Example:
        >>> x, experts = mx.random.normal((1, 64)), mx.quantize(mx.random.normal((8, 32, 64)), 64, 4)
        >>> mm.gather_swiglu(x, experts, experts, rhs_indices=mx.array([3, 5])).shape
        (2, 1, 32)

    Source:
        Shazeer, "GLU Variants Improve Transformer", 2020, https://arxiv.org/abs/2002.05202.
    """
    raise NotImplementedError


@defined_in_extension
def gather_sum(
    x: mx.array,
    w: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    indices: mx.array,
    weights: mx.array,
    *,
    bias: mx.array | None = None,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    stream: StreamOrDevice = None,
) -> mx.array:
    """Weighted sum of products with chosen experts: ``sum_i weights[i] * (x[i] @ w[indices[i]].T + bias[indices[i]])``.

    The last product of a mixture, with its router's weights of experts. On a GPU it is one launch for up to 16
    experts of each sum and up to 64 products in all. Sums are taken in float32 and rounded once; on the CPU, and of
    more products on Apple GPUs, their terms are rounded before. Other calls are `gather_qmm` and a sum in mx.

    Args:
        x (array): Of shape ``[..., chosen, columns]``; float32, float16 or bfloat16.
        w (array): Integers packed in uint32 as ``mx.quantize`` does it, a stack of matrices.
        scales (array): Scale of each group, of ``w``'s leading shape.
        biases (array, optional): Offset of each group, of ``scales``' shape; in affine quantization alone.
        indices (array): Integers of shape ``[..., chosen]``, which index the stack as if it had one axis. A sum with an
            index out of range is NaN.
        weights (array): Of shape ``[..., chosen]``, of a floating-point type; float32 is not rounded.
        bias (array, optional): Added to each product, of shape ``[stack..., outputs]``.
        group_size (int, optional): As of ``gather_qmm``.
        bits (int, optional): As of ``gather_qmm``.
        mode (str): As of ``gather_qmm``.
        stream (optional): Stream or device to run on.

    Returns:
        array: Of shape ``[..., outputs]`` and the promoted type of ``x``, ``scales``, ``biases`` and ``bias``.

    Raises:
        DtypeError: ``w`` is not uint32, indices are no integers, or another argument not of a floating-point type
            named above.
        ValueError: Shapes, bits, group size or mode do not fit together or do not exist.

    Example:
        >>> x, experts = mx.random.normal((2, 64)), mx.quantize(mx.random.normal((8, 32, 64)), 64, 4)
        >>> mm.gather_sum(x, *experts, mx.array([3, 5]), mx.array([0.7, 0.3])).shape
        (32,)

    Source:
        Shazeer et al., "Outrageously Large Neural Networks: The Sparsely-Gated Mixture-of-Experts Layer", 2017,
        https://arxiv.org/abs/1701.06538.
    """
    raise NotImplementedError


@defined_in_extension
def mixture(
    x: mx.array,
    logits: mx.array,
    k: int,
    gate: Sequence[mx.array],
    up: Sequence[mx.array],
    down: Sequence[mx.array],
    shared_gate: Sequence[mx.array] | None = None,
    shared_up: Sequence[mx.array] | None = None,
    shared_down: Sequence[mx.array] | None = None,
    shared_logits: mx.array | None = None,
    group_size: int | None = None,
    bits: int | None = None,
    mode: str = "affine",
    *,
    router_bias: mx.array | None = None,
    scores: str = "softmax",
    renormalize: bool = False,
    descending: bool = True,
    scale: float = 1.0,
    precise: bool = False,
    eps: float = 1e-20,
    groups: tuple[int, int] | None = None,
    dropped: float = 0.0,
    bias: Sequence[mx.array] | None = None,
    activation: str = "swiglu",
    stream: StreamOrDevice = None,
) -> mx.array:
    """A mixture from its router's logits on: the choice, the experts, and a shared expert if there is one.

    With an expert ``e(x) = (act(x @ gate[e].T) * (x @ up[e].T)) @ down[e].T``, and indices and weights that
    ``route_top_k`` gives::

        sum_i weights[i] * indices[i](x) + sigmoid(shared_logits) * shared(x)

    On a GPU it is two launches for up to 16 experts of a token, the shared one included, with weights of 4 or 8 bits or
    in ``mxfp4``, where the router has up to 512 experts: a threadgroup finds the expert that it is for by itself. Each
    token reads its experts, so that it is for few tokens. Other calls are a choice and products of their own, as are
    gradients. Sums are taken in float32.

    Args:
        x (array): Tokens of shape ``[..., columns]``; float32, float16 or bfloat16.
        logits (array): The router's, of shape ``[..., experts]``, of a floating-point type; converted to the
            type of ``x``.
        k (int): How many experts to choose.
        gate (sequence of array): Words, scales and, in affine quantization, biases, as ``mx.quantize`` gives them:
            a stack of matrices ``[experts, hidden, columns]``.
        up (sequence of array): The same, of ``gate``'s shapes.
        down (sequence of array): The same of matrices ``[experts, outputs, hidden]``.
        shared_gate (sequence of array, optional): The same of one matrix ``[hidden, columns]``. The four arguments of a
            shared expert are all there or none.
        shared_up (sequence of array, optional): The same, of ``shared_gate``'s shapes.
        shared_down (sequence of array, optional): The same of one matrix ``[outputs, hidden]``.
        shared_logits (array, optional): Of shape ``[...]`` or ``[..., 1]``.
        group_size (int, optional): As of ``gather_qmm``, for all weights.
        bits (int, optional): As of ``gather_qmm``, for all weights.
        mode (str): As of ``gather_qmm``, for all weights.
        router_bias (array, optional): As ``bias`` of ``route_top_k``, of shape ``[experts]``.
        scores (str): As of ``route_top_k``.
        renormalize (bool): As of ``route_top_k``.
        descending (bool): As of ``route_top_k``.
        scale (float): As of ``route_top_k``.
        precise (bool): As of ``route_top_k``.
        eps (float): As of ``route_top_k``.
        groups (tuple of int, optional): As of ``route_top_k``.
        dropped (float): As of ``route_top_k``.
        bias (sequence of array, optional): Of the products with ``gate``, ``up`` and ``down``, of shapes
            ``[experts, hidden]`` twice and ``[experts, outputs]``.
        activation (str): As of ``gather_swiglu``.
        stream (optional): Stream or device to run on.

    Returns:
        array: Of shape ``[..., outputs]`` and the promoted type of ``x``, ``gate``'s scales and ``bias``.

    Raises:
        DtypeError: Words are not uint32, or another argument not of a floating-point type.
        ValueError: Shapes, ``k``, scores, bits, group size, mode or activation do not fit together or do not exist.

    Example:
        >>> weights = lambda *shape: mx.quantize(mx.random.normal(shape), 64, 4)
        >>> gate, up, down = weights(8, 128, 64), weights(8, 128, 64), weights(8, 64, 128)
        >>> x, logits = mx.random.normal((1, 64)), mx.random.normal((1, 8))
        >>> mm.mixture(x, logits, 2, gate, up, down, renormalize=True).shape
        (1, 64)

    Source:
        Dai et al., "DeepSeekMoE: Towards Ultimate Expert Specialization in Mixture-of-Experts Language Models", 2024,
        https://arxiv.org/abs/2401.06066.
    """
    raise NotImplementedError


@defined_in_extension
def route_top_k(
    logits: mx.array,
    k: int,
    bias: mx.array | None = None,
    scores: str = "softmax",
    renormalize: bool = False,
    descending: bool = True,
    *,
    scale: float = 1.0,
    precise: bool = False,
    eps: float = 1e-20,
    groups: tuple[int, int] | None = None,
    dropped: float = 0.0,
    stream: StreamOrDevice = None,
) -> tuple[mx.array, mx.array]:
    """A router's choice: the ``k`` experts of the largest scores, and their weights.

    Scores are computed in float32. Experts are chosen by the scores rounded to the type of ``logits``, plus the bias in
    float32. Weights are scores without the bias, and rounded once.

    On a GPU a kernel chooses up to 32 of at most 512 experts, in up to 32 groups; mx computes the rest.

    Of equal scores those are chosen that mx chooses: the first for ``mx.argpartition(-scores, k - 1)[..., :k]``, which
    is the descending choice, and the last for ``mx.argpartition(scores, -k)[..., -k:]``, the ascending one. mx leaves
    the order of the chosen open, here they are sorted. Only the weights have gradients.

    Args:
        logits (array): Of shape ``[..., experts]``; float32, float16 or bfloat16.
        k (int): How many to choose.
        bias (array, optional): Of shape ``[experts]``; added where experts are chosen.
        scores (str): ``softmax`` or ``sigmoid`` of the logits, ``sqrtsoftplus`` for ``sqrt(log(1 + exp(logits)))``, or
            ``chosen``: experts are chosen by the logits, and weights are the softmax of the chosen.
        renormalize (bool): Whether weights are divided by their sum.
        descending (bool): Whether the largest comes first. NaN comes last in either order.
        scale (float): Factor of the weights.
        precise (bool): Whether experts are chosen by the scores in float32, as by models that cast their logits. Scores
            that are rounded to half types are often equal.
        eps (float): Number added to the sum that weights are divided by.
        groups (tuple of int, optional): How many groups of successive experts there are, and how many are kept: those
            with the largest sums of two scores with the bias, as DeepSeek-V3's.
        dropped (float): Score, with the bias, of other groups' experts where experts are chosen.
        stream (optional): Stream or device to run on.

    Returns:
        tuple: Indices in uint32 and weights in the type of ``logits``, both of shape ``[..., k]``.

    Raises:
        DtypeError: An argument is not of a floating-point type named above.
        ValueError: ``k`` is not one of 1 to the number of experts, ``scores`` is not known, ``scale`` or ``eps`` is not
            finite, ``eps`` is negative, there are not as many experts in all groups, or shapes do not fit together.

    Example:
        >>> indices, weights = mm.route_top_k(mx.array([[0.0, 2.0, 1.0]]), 2)
        >>> indices.tolist()
        [[1, 2]]

    Source:
        DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, https://arxiv.org/abs/2412.19437, for the bias and the
        renormalized sigmoid; Jiang et al., "Mixtral of Experts", 2024, https://arxiv.org/abs/2401.04088, for the
        softmax of the chosen.
    """
    raise NotImplementedError
