"""The rows of the table of ops for keys that an indexer chooses; `specs` puts them into the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..ops import cache
from .op import Case, Exact, ModelOp, Op, add_outliers, cases_for_tests, widen
from .shaped import ShapedOp


def exact_index_scores(q: np.ndarray, k: np.ndarray, weights: np.ndarray, scale: float = 1.0) -> Exact:
    """In float64; terms cancel within a head's score and between heads."""
    heads = np.abs(weights).transpose(0, 2, 1)[..., None]
    keys = k[:, None].swapaxes(-1, -2)
    scores = np.maximum(q @ keys, 0)
    y = scale * (weights.transpose(0, 2, 1)[..., None] * scores).sum(1)
    size = np.sqrt(np.square(q) @ np.square(keys))
    return Exact(y, abs(scale) * (heads * (scores + size)).sum(1))


def _mx_scores(q, k, weights, scale):
    scores = mx.maximum(q @ k[:, None].swapaxes(-1, -2), 0) * (weights * scale).swapaxes(-1, -2)[..., None]
    return scores.sum(axis=1)


@dataclass(frozen=True, kw_only=True)
class TakeOp(ModelOp):
    """Keys, values and indices.

    The shape of a case is ``(batch, heads, tokens, width, value width, count)``. The label ``strided`` has views into
    longer rows, ``uint32`` indices without a sign, and ``shared`` the same ones for all heads.
    """

    outputs: int = 2
    smallest = (1, 1, 2, 8, 8, 2)

    def shapes(self, case: Case) -> list[tuple[int, ...]]:
        batch, heads, tokens, width, value_width, count = case.shape
        of_heads = 1 if case.label == "shared" else heads
        return [(batch, heads, tokens, width), (batch, heads, tokens, value_width), (batch, of_heads, count)]

    def draw(self, rng: np.random.Generator, case: Case, dtype: mx.Dtype) -> list[mx.array | None]:
        *rows, of_indices = self.shapes(case)
        arrays: list[mx.array | None] = []
        for shape in rows:
            more = 3 if case.label == "strided" else 0
            numbers = rng.standard_normal((*shape[:-1], shape[-1] + more), dtype=np.float32)
            add_outliers(rng, numbers)
            arrays.append(mx.array(numbers).astype(dtype)[..., more:])
        first = 0 if case.label == "uint32" else -case.shape[2]
        indices = rng.integers(first, case.shape[2], of_indices)
        return [*arrays, mx.array(indices.astype(np.uint32 if first == 0 else np.int32))]

    def bytes_moved(self, case: Case, dtype: mx.Dtype) -> int:
        batch, heads, _, width, value_width, count = case.shape
        return batch * heads * count * (4 + 2 * (width + value_width) * dtype.size)

    def exact(self, case: Case, arrays: Sequence[mx.array | None], cotangents: Sequence[mx.array] = ()) -> list[Exact]:
        keys, values, indices = (a for a in arrays if a is not None)
        tokens = np.array(indices).astype(np.int64)[..., None] % case.shape[2]
        return [Exact(np.take_along_axis(rows, tokens, 2)) for rows in map(widen, (keys, values))]


def _mx_take(keys, values, indices):
    shape = (*keys.shape[:2], indices.shape[2])
    tokens = mx.broadcast_to(indices, shape)[..., None]
    return tuple(mx.take_along_axis(a, mx.broadcast_to(tokens, (*shape, a.shape[-1])), axis=2) for a in (keys, values))


CHOSEN_KEY_OPS: tuple[Op, ...] = (
    ShapedOp(
        name="index_scores",
        layout="batch heads queries width, batch keys width, batch queries heads -> batch queries keys",
        ours=cache.index_scores,
        twin=_mx_scores,
        twin_text="a product, `mx.maximum`, a weighted sum over heads",
        reference=exact_index_scores,
        summary="scores of keys by an indexer of several heads, in one kernel",
        options={"scale": 0.125},
        tests=cases_for_tests(
            *((2, 3, 2, 64, 37), (1, 1, 1, 128, 1), (1, 17, 1, 128, 70), (1, 8, 3, 64, 32)),
        ),
        cases=(
            Case("DeepSeek-V3.2", (1, 64, 1, 128, 4096), quick=True),
            Case("DeepSeek-V3.2", (1, 64, 1, 128, 65536), gpu_only=True),
            Case("GLM-5", (1, 32, 1, 128, 16384)),
        ),
    ),
    TakeOp(
        name="take_tokens",
        parameters=(("keys", "rows"), ("values", "rows"), ("indices", "rows")),
        ours=cache.take_tokens,
        twin=_mx_take,
        twin_text="two `mx.take_along_axis`",
        summary="keys and values of chosen tokens, in one kernel",
        tests=(
            *cases_for_tests((1, 1, 9, 64, 32, 5), (2, 3, 7, 33, 5, 4), (1, 2, 3, 1, 1, 9)),
            *(Case(label, (2, 2, 9, 64, 40, 6)) for label in ("strided", "uint32", "shared")),
        ),
        cases=(
            Case("DeepSeek-V3.2", (1, 1, 4096, 512, 64, 2048), quick=True),
            Case("DeepSeek-V3.2", (1, 1, 65536, 512, 64, 2048), gpu_only=True),
        ),
    ),
)
