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
    mask: mx.array | None = None,
    tokens: mx.array | None = None,
    repetition_penalty: float | mx.array = 1.0,
    presence_penalty: float | mx.array = 0.0,
    frequency_penalty: float | mx.array = 0.0,
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
    mask: mx.array | None = None,
    tokens: mx.array | None = None,
    repetition_penalty: float | mx.array = 1.0,
    presence_penalty: float | mx.array = 0.0,
    frequency_penalty: float | mx.array = 0.0,
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
    mask: mx.array | None = None,
    tokens: mx.array | None = None,
    repetition_penalty: float | mx.array = 1.0,
    presence_penalty: float | mx.array = 0.0,
    frequency_penalty: float | mx.array = 0.0,
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
    mask: mx.array | None = None,
    tokens: mx.array | None = None,
    repetition_penalty: float | mx.array = 1.0,
    presence_penalty: float | mx.array = 0.0,
    frequency_penalty: float | mx.array = 0.0,
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

    Before all of that, and in the same launches, ``mask`` forbids tokens and penalties make ``tokens`` less
    probable. Tokens are then drawn from the changed logits, which also give every logarithmic probability. Penalties
    follow mlx-lm's ``make_logits_processors``, in its order, each step rounded to the type of the logits: repetition
    multiplies negative logits and divides others, once for each token; presence is subtracted once; frequency is
    subtracted for every time that the token is there. Whatever a penalty makes of a forbidden token, its logit is -inf.

    Args:
        logits (array): Logits, or logarithmic probabilities, of shape ``[..., vocabulary]``; float32, float16 or
            bfloat16.
        key (array, optional): As ``mx.random.key`` gives. With ``None`` it is the next one of ``mx.random.state``.
        temperature (float): Divides the logits that are kept. 0 gives the token of the largest logit: no key is used,
            and the filters, which keep that token, do nothing.
        top_k (int): Number of the largest logits to keep; 0 keeps all, and so does the vocabulary's size or more.
        top_p (float): Keep the largest logits whose probabilities add up to this share, and logits equal to the last
            of them; 0 and 1 keep all.
        min_p (float): Keep tokens at least this times as probable as the most probable token; 0 keeps all.
        mask (array, optional): The tokens that may be drawn, as xgrammar and llguidance fill it: uint32 or int32 words
            of shape ``[..., ceil(vocabulary / 32)]``, bit ``c % 32`` of word ``c // 32`` for token ``c``, for each row;
            or of shape ``[ceil(vocabulary / 32)]`` for all of them. Of a row that may draw nothing the token is 0 and
            the logarithmic probability NaN.
        tokens (array, optional): The last tokens of each row, of shape ``[..., n]``, or ``[n]`` for all rows; int32,
            uint32, int64 or uint64. A number that is negative, or not less than the vocabulary, is no token: it pads
            rows that have fewer.
        repetition_penalty (float or array): For all rows, or float32 of shape ``[...]`` with one for each. 1 changes
            nothing, and neither does 0.
        presence_penalty (float or array): The same; 0 changes nothing.
        frequency_penalty (float or array): The same; 0 changes nothing.
        logprobs (bool or str): Whether to return the tokens' logarithmic probabilities too, by the softmax of the
            logits, without temperature and filters. ``"all"`` returns them for all logits, in two launches with the
            tokens: ``logits - mx.logsumexp(logits, axis=-1, keepdims=True)``, rounded once.
        stream (optional): Stream or device to run on.

    Returns:
        array or tuple(array, array): Tokens, uint32, of shape ``[...]``; with ``logprobs`` their logarithmic
            probabilities as well, float32, or with ``"all"`` an array of the shape and type of ``logits``.

    Raises:
        DtypeError: ``logits`` is not of a floating-point type, ``key`` is not uint32, or ``mask``, ``tokens`` or an
            array of penalties is of another type than those above.
        ValueError: ``logits`` has no axis or no logits in a row, ``key`` is not of shape ``[2]``, ``temperature`` or
            ``top_k`` is negative, ``top_p`` or ``min_p`` is not from 0 to 1, ``logprobs`` is another text, ``mask``,
            ``tokens`` or penalties have another shape, a penalty is not finite, ``repetition_penalty`` is negative, or
            there is a penalty without ``tokens``.

    Example:
        >>> token = mm.sample(mx.random.normal((1, 1000)), mx.random.key(0), temperature=0.7, top_k=40, top_p=0.9)

    Source:
        Top-p sampling follows Holtzman et al., "The Curious Case of Neural Text Degeneration", 2019,
        https://arxiv.org/abs/1904.09751; min-p follows Nguyen et al., "Turning Up the Heat", 2024,
        https://arxiv.org/abs/2407.01082. Numbers are drawn by Threefry of Salmon et al., "Parallel Random Numbers: As
        Easy as 1, 2, 3", 2011, https://doi.org/10.1145/2063384.2063405. The penalty of repetition follows Keskar et
        al., "CTRL", 2019, https://arxiv.org/abs/1909.05858.
    """
    raise NotImplementedError
