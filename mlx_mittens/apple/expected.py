"""How far predictions of `model` were from published measurements, for each kind of work.

`errors.csv` is written by `bench/apple/errors.py`. Errors are of chips that were left out when the constants were
fitted.
"""

from __future__ import annotations

import csv
import functools
from dataclasses import dataclass
from importlib import resources

_KIND_OF_OP = {
    "rms_norm": "norm",
    "layer_norm": "norm",
    "add_rms_norm": "norm",
    "softmax": "norm",
    "norm_add_norm": "norm",
    "qk_norm": "norm",
    "softcap": "elementwise",
    "sample": "norm",
    "matmul": "gemv",
    "gemv": "gemv",
    "quantized_matmul": "4-bit",
    "quantized_swiglu": "4-bit",
    "block_matmul": "4-bit",
    "block_masked_mm": "gemv",
    "block_quantize": "elementwise",
    "block_dequantize": "elementwise",
    "quantized_embedding": "elementwise",
    "scaled_dot_product_attention": "attention",
    "quantized_scaled_dot_product_attention": "attention",
    "cascade_attention": "attention",
    "paged_attention": "attention",
    "rope_append": "elementwise",
    "index_scores": "attention",
    "paged_append": "elementwise",
    "take_tokens": "elementwise",
    "quantized_rope_append": "elementwise",
    "gather_qmm": "4-bit",
    "gather_mm": "gemv",
    "gather_swiglu": "4-bit",
    "gather_sum": "4-bit",
    "mixture": "4-bit",
    "quantized_matmuls": "4-bit",
    "route_top_k": "norm",
    "gated_delta_inputs": "elementwise",
    "gated_delta_token": "elementwise",
    "short_conv_token": "elementwise",
    "ssm_inputs": "elementwise",
    "ssm_token": "elementwise",
    "gated_delta_update": "elementwise",
    "ssm_update": "elementwise",
}


@dataclass(frozen=True)
class ExpectedError:
    """Errors seen on one kind of work, in percent of the measured time.

    Attributes:
        kind: The kind.
        points: Measurements that were compared.
        median: Half of the predictions were nearer.
        nine_in_ten: Nine of ten predictions were nearer.
        ratio: Half of the ratios of two predictions for the same chip were nearer to the measured ratio. None where
            no two measurements can be compared.
    """

    kind: str
    points: int
    median: float
    nine_in_ten: float
    ratio: float | None


@functools.cache
def _errors() -> dict[str, ExpectedError]:
    text = (resources.files(__package__) / "errors.csv").read_text()
    return {
        row["kind"]: ExpectedError(
            row["kind"],
            int(row["points"]),
            float(row["median_pct"]),
            float(row["nine_in_ten_pct"]),
            float(row["ratio_median_pct"]) if row["ratio_median_pct"] else None,
        )
        for row in csv.DictReader(text.splitlines())
    }


def expected_error(kind: str) -> ExpectedError:
    """The errors seen on a kind of work.

    Args:
        kind: A kind (`matmul`, `gemv`, `4-bit`, `attention`, `norm`, `elementwise`, ...) or the name of an op of this
            package, which stands for its kind.

    Raises:
        ValueError: If there is no such kind. The message lists those there are.
    """
    known = _errors()
    found = known.get(_KIND_OF_OP.get(kind, kind))
    if found is None:
        raise ValueError(f"no kind of work is {kind!r}; kinds are {', '.join(known)}, and the names of ops")
    return found
