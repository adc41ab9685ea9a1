"""The row of the table of ops for the embedding of a quantized model; `specs` puts it into the table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from ..ops.matmul import quantized_embedding
from .op import FLOAT_MODES, Case, Exact, ModelOp, all_rows, dequantized, draw_packed, mode_of, weight_bytes, widen


@dataclass(frozen=True, kw_only=True)
class EmbeddingOp(ModelOp):
    """Indices and a quantized matrix.

    The shape of a case is ``(indices, columns, rows)``. The label ``strided`` takes every other row of the matrix, and
    ``uint32`` has indices without a sign.
    """

    smallest = (2, 64, 3)

    def dtypes(self, case: Case) -> Iterable[str]:
        return ("bfloat16",) if self._is_floating(case) else super().dtypes(case)

    def _is_floating(self, case: Case) -> bool:
        return mode_of(self.arguments(case)) != "affine"

    def shapes(self, case: Case) -> list[tuple[int, ...]]:
        count, columns, rows = case.shape
        options = self.arguments(case)
        groups = (rows, columns // options["group_size"])
        return [(count,), (rows, columns * options["bits"] // 32), groups, groups]

    def draw(self, rng: np.random.Generator, case: Case, dtype: mx.Dtype) -> list[mx.array | None]:
        _, columns, rows = case.shape
        options = self.arguments(case)
        step = 2 if case.label == "strided" else 1
        first = 0 if case.label == "uint32" else -rows
        indices = mx.array(rng.integers(first, rows, case.shape[:1]).astype(np.uint32 if first == 0 else np.int32))
        arrays: list[mx.array | None] = [indices]
        for (name, _), shape in zip(self.parameters[1:], self.shapes(case)[1:], strict=True):
            if name == "biases" and self._is_floating(case):
                arrays.append(None)
                continue
            mode = mode_of(options)
            drawn = draw_packed(rng, name, (shape[0] * step, shape[1]), options["bits"], dtype, mode=mode)
            arrays.append(drawn[::step])
        return arrays

    def bytes_moved(self, case: Case, dtype: mx.Dtype) -> int:
        count, columns, _ = case.shape
        size = 2 if self._is_floating(case) else dtype.size
        return int(count * (4 + columns * (weight_bytes(self.arguments(case), dtype) + size)))

    def exact(self, case: Case, arrays: Sequence[mx.array | None], cotangents: Sequence[mx.array] = ()) -> list[Exact]:
        options = self.arguments(case)
        indices, words, scales, biases = arrays
        assert indices is not None and words is not None and scales is not None
        chosen = mx.array(np.array(indices) % len(words))
        rows = (words[chosen], scales[chosen], None if biases is None else biases[chosen])
        y = dequantized(*rows, options["group_size"], options["bits"], mode_of(options))
        if biases is None:
            return [Exact(y)]
        # The product is rounded before the bias is added, from which it may cancel.
        offset = np.repeat(np.abs(widen(biases[chosen])), options["group_size"], -1)
        return [Exact(y, np.abs(y) + 2 * offset)]


def _mx_embedding(indices, w, scales, biases, **options):
    return mx.dequantize(w[indices], scales[indices], None if biases is None else biases[indices], **options)


EMBEDDING_OPS: tuple[ModelOp, ...] = (
    EmbeddingOp(
        name="quantized_embedding",
        parameters=all_rows("indices", "w", "scales", "biases"),
        ours=quantized_embedding,
        twin=_mx_embedding,
        twin_text="`mx.dequantize` of rows of `w`, `scales` and `biases`",
        summary="rows of a quantized matrix by their indices, in one kernel",
        options={"group_size": 64, "bits": 4},
        tests=tuple(
            Case("test", shape, {"bits": bits, "group_size": group_size})
            for bits in (1, 2, 3, 4, 5, 6, 8)
            for shape, group_size in (((1, 64, 7), 64), ((5, 288, 9), 32), ((3, 1152, 4), 128))
        )
        + tuple(
            Case("test", shape, {"mode": mode, "bits": bits, "group_size": group_size})
            for mode, bits, group_size in FLOAT_MODES
            for shape in ((1, 64, 7), (5, 288, 9))
        )
        + (
            Case("strided", (5, 256, 9), {"bits": 4}),
            Case("uint32", (5, 256, 9), {"bits": 8}),
        ),
        cases=(
            Case("Llama-3.2-1B", (1, 2048, 128256), {"bits": 4}, quick=True),
            Case("Llama-3.2-1B", (512, 2048, 128256), {"bits": 4}),
            Case("Llama-3.1-8B", (1, 4096, 128256), {"bits": 4}, gpu_only=True),
            Case("gpt-oss-20b", (1, 2880, 201088), {"bits": 8}, gpu_only=True),
        ),
    ),
)
