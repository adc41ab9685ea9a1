"""The row of the table of ops for attention with a shared prefix; `specs` puts it into the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..ops import attention
from .attention import UNITS, draw_rows, exact_attention, front_of_cache, seen_of_rows
from .op import Case, Exact, Op, cases_for_tests, widen


@dataclass(frozen=True, kw_only=True)
class CascadeOp(Op):
    """The shape of a case is ``(batch, heads, key_heads, queries, keys, prefix, width)``."""

    smallest = (2, 2, 1, 1, 3, 64, 64)

    def shapes(self, case: Case) -> list[tuple[int, ...]]:
        batch, heads, key_heads, queries, keys, prefix, width = case.shape
        own, shared = (batch, key_heads, keys, width), (1, key_heads, prefix, width)
        return [(batch, heads, queries, width), own, own, shared, shared, (batch,), (batch,)]

    def draw(self, rng: np.random.Generator, case: Case, dtype: mx.Dtype) -> list[mx.array | None]:
        arrays: list[mx.array | None] = []
        for (name, kind), shape in zip(self.parameters, self.shapes(case), strict=True):
            if kind in ("starts", "ends"):
                keys = case.shape[4]
                span = (0, keys // 2) if kind == "starts" else (keys // 2, keys)
                rows = rng.integers(*span, shape, dtype=np.int32, endpoint=True)
                arrays.append(mx.array(rows) if self.arguments(case)["ragged"] else None)
            elif name == "q":
                batch, heads, queries, width = shape
                arrays.append(draw_rows(rng, (batch, queries, heads, width), dtype).swapaxes(1, 2))
            else:
                arrays.append(front_of_cache(lambda s: draw_rows(rng, s, dtype), shape))
        return arrays

    def bytes_moved(self, case: Case, dtype: mx.Dtype) -> int:
        *rows, starts, _ = self.shapes(case)
        own = sum(int(np.prod(shape)) for shape in (*rows, rows[0]))
        return own * dtype.size + 8 * starts[0] * self.arguments(case)["ragged"]

    def exact(self, case: Case, arrays: Sequence[mx.array | None], cotangents: Sequence[mx.array] = ()) -> list[Exact]:
        q, k, v, prefix_k, prefix_v = (a for a in arrays[:5] if a is not None)
        keys, values = (
            np.concatenate([np.repeat(widen(a), len(k), 0), widen(b)], 2) for a, b in ((prefix_k, k), (prefix_v, v))
        )
        starts, ends = arrays[5:]
        seen = mx.array(_seen(q, k, prefix_k, starts, ends, self.arguments(case)["mask"]))
        return [exact_attention(widen(q), keys, values, case.shape[-1] ** -0.5, seen)]


def _seen(q, k, prefix_k, starts, ends, mask):
    seen = seen_of_rows(starts, ends, mask == "causal", None, q.shape[0], q.shape[2], k.shape[2])
    return np.concatenate([np.ones((*seen.shape[:3], prefix_k.shape[2]), bool), seen], -1)


def _ours(q, k, v, prefix_k, prefix_v, starts, ends, *, mask, ragged):
    return attention.cascade_attention(
        q, k, v, prefix_k, prefix_v, scale=q.shape[-1] ** -0.5, mask=mask, starts=starts, ends=ends
    )


def _twin(q, k, v, prefix_k, prefix_v, starts, ends, *, mask, ragged):
    rows = [
        mx.concatenate([mx.broadcast_to(a, (len(k), *a.shape[1:])), b], 2) for a, b in ((prefix_k, k), (prefix_v, v))
    ]
    seen: Any = None
    if mask or ragged:
        seen = mx.array(_seen(q, k, prefix_k, starts, ends, mask))
    return mx.fast.scaled_dot_product_attention(q, *rows, scale=q.shape[-1] ** -0.5, mask=seen)


CASCADE_OPS: tuple[Op, ...] = (
    CascadeOp(
        name="cascade_attention",
        parameters=(
            *(("q", "rows"), ("k", "rows"), ("v", "rows"), ("prefix_k", "rows"), ("prefix_v", "rows")),
            *(("starts", "starts"), ("ends", "ends")),
        ),
        ours=_ours,
        twin=_twin,
        twin_text="`mx.fast.scaled_dot_product_attention` over both in one array",
        summary="attention of sequences that share a prefix, which is read once",
        options={"mask": None, "ragged": False},
        tests=(
            *cases_for_tests((3, 4, 2, 1, 12, 90, 64), (2, 2, 1, 2, 70, 33, 128), (1, 2, 2, 1, 1, 1, 64)),
            *cases_for_tests((2, 4, 2, 3, 40, 140, 64), mask="causal", ragged=True),
            *cases_for_tests((3, 2, 1, 7, 9, 70, 80), mask="causal"),  # 21 rows of the prefix
            *cases_for_tests((1, 1, 1, 1, 1200, 1200, 64)),  # more parts than one simdgroup adds up
        ),
        cases=(
            Case("prefix", (4, 8, 2, 1, 128, 1024, 64), quick=True),
            Case("prefix", (8, 32, 8, 1, 256, 4096, 128)),
            Case("prefix", (8, 32, 8, 1, 256, 4096, 128), {"ragged": True}, gpu_only=True),
            Case("prefix", (32, 32, 8, 1, 256, 4096, 128), gpu_only=True),
        ),
        units=UNITS,
    ),
)
