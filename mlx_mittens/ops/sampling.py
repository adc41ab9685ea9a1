"""Tokens drawn from logits."""

from __future__ import annotations

from typing import Literal, overload

import mlx.core as mx

from ._declaration import StreamOrDevice, defined_in_extension

__all__ = ["sample"]


@overload
def sample(
    logits: mx.array,
    key: mx.array | None = None,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 0.0,
    min_p: float = 0.0,
    logprobs: Literal[False] = False,
    stream: StreamOrDevice = None,
) -> mx.array: ...


@overload
def sample(
    logits: mx.array,
    key: mx.array | None = None,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 0.0,
    min_p: float = 0.0,
    logprobs: Literal[True, "all"],
    stream: StreamOrDevice = None,
) -> tuple[mx.array, mx.array]: ...


@overload
def sample(
    logits: mx.array,
    key: mx.array | None = None,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 0.0,
    min_p: float = 0.0,
    logprobs: bool | Literal["all"] = False,
    stream: StreamOrDevice = None,
) -> mx.array | tuple[mx.array, mx.array]: ...


@defined_in_extension
def sample(
    logits: mx.array,
    key: mx.array | None = None,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 0.0,
    min_p: float = 0.0,
    logprobs: bool | Literal["all"] = False,
    stream: StreamOrDevice = None,
) -> mx.array | tuple[mx.array, mx.array]:
    """Draws a token from each row of logits, in one or two kernels and without a sort.

    It keeps what mlx-lm's ``apply_top_p``, ``apply_min_p`` and ``apply_top_k`` keep one after the other, and draws from
    it with the probabilities of ``mx.random.categorical(logits / temperature)``, in float32: the token is the argmax of
    ``logits / temperature + mx.random.gumbel(logits.shape, key=key)``. By one key mx draws the same from several rows,
    and from one row by a single number.

    NaN counts as -inf. Of equal logits top-k keeps the first, and greedy sampling gives the first. A row without a
    logit above -inf gives token 0, one with +inf the first +inf; the logarithmic probability is NaN for both. Of all
    logits NaN is as in mx: everywhere in a row that has one.

    Args:
        logits (array): Logits, or logarithmic probabilities, of shape ``[..., vocabulary]``; float32, float16 or
            bfloat16.
        key (array, optional): As ``mx.random.key`` gives. With ``None`` it is the next one of ``mx.random.state``.
        temperature (float): Divides the logits that are kept. 0 gives the token of the largest logit: no key is used,
            and the filters, which keep that token, do nothing.
        top_k (int): Keep so many of the largest logits; 0 keeps all, and so does the vocabulary's size or more.
        top_p (float): Keep the largest logits whose probabilities add up to this share, and what equals the last of
            them; 0 and 1 keep all.
        min_p (float): Keep what is at least this times as probable as the most probable token; 0 keeps all.
        logprobs (bool or str): Whether to return the tokens' logarithmic probabilities too: those of the softmax of the
            logits, without temperature and filters. ``"all"`` returns those of all logits, in two launches with the
            tokens: ``logits - mx.logsumexp(logits, axis=-1, keepdims=True)``, rounded once.
        stream (optional): Stream or device to run on.

    Returns:
        array or tuple(array, array): Tokens, uint32, of shape ``[...]``; with ``logprobs`` their logarithmic
            probabilities as well, float32, or those of all logits, of the shape and type of ``logits``.

    Raises:
        DtypeError: ``logits`` is not of a floating-point type, or ``key`` is not uint32.
        ValueError: ``logits`` has no axis or no logits in a row, ``key`` is not of shape ``[2]``, ``temperature`` or
            ``top_k`` is negative, ``top_p`` or ``min_p`` is not from 0 to 1, or ``logprobs`` is another text.

    Example:
        >>> token = mm.sample(mx.random.normal((1, 1000)), mx.random.key(0), temperature=0.7, top_k=40, top_p=0.9)

    Source:
        Top-p sampling is that of Holtzman et al., "The Curious Case of Neural Text Degeneration", 2019,
        https://arxiv.org/abs/1904.09751; min-p that of Nguyen et al., "Turning Up the Heat", 2024,
        https://arxiv.org/abs/2407.01082. Numbers are drawn by Threefry of Salmon et al., "Parallel Random Numbers: As
        Easy as 1, 2, 3", 2011, https://doi.org/10.1145/2063384.2063405.
    """
    raise NotImplementedError
