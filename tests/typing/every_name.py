"""Every public name with the types of its arguments and results, for a type checker; nothing of it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn

import mlx_mittens as mm

if sys.version_info >= (3, 11):
    from typing import assert_type
else:
    from typing_extensions import assert_type

Packed = tuple[mx.array, mx.array, mx.array]


def norms(x: mx.array, weight: mx.array) -> None:
    assert_type(mm.rms_norm(x, weight, 1e-5), mx.array)
    assert_type(mm.rms_norm(x, None, 1e-5, stream=mx.cpu), mx.array)
    assert_type(mm.layer_norm(x, weight, None, 1e-5), mx.array)
    assert_type(mm.softmax(x, axis=-1), mx.array)
    assert_type(mm.add_rms_norm(x, x, weight, 1e-5), tuple[mx.array, mx.array])
    assert_type(mm.norm_add_norm(x, x, weight, weight, 1e-5), tuple[mx.array, mx.array])
    assert_type(mm.qk_norm(x, x, weight, weight, 1e-5), tuple[mx.array, mx.array])
    assert_type(mm.softcap(x, 30.0), mx.array)


def products(x: mx.array, w: mx.array, packed: Packed) -> None:
    assert_type(mm.gemv(w, x), mx.array)
    assert_type(mm.quantized_matmul(x, *packed, group_size=64, bits=4), mx.array)
    assert_type(mm.quantized_swiglu(x, packed, packed), mx.array)
    assert_type(mm.block_matmul(x, mm.block_quantize(w, "q4_0"), "q4_0"), mx.array)
    assert_type(mm.block_dequantize(w, "q8_0"), mx.array)
    assert_type(mm.gather_mm(x, w, rhs_indices=w), mx.array)
    assert_type(mm.gather_qmm(x, *packed, rhs_indices=w), mx.array)
    assert_type(mm.gather_swiglu(x, packed, packed), mx.array)
    assert_type(mm.gather_sum(x, *packed, w, x), mx.array)
    assert_type(mm.route_top_k(x, 2), tuple[mx.array, mx.array])


def attention(q: mx.array, packed: Packed) -> None:
    assert_type(mm.scaled_dot_product_attention(q, q, q, scale=1.0, mask="causal"), mx.array)
    assert_type(mm.quantized_scaled_dot_product_attention(q, packed, packed, 1.0), mx.array)
    assert_type(mm.rope_append(q, q, q, 64, base=1e4, offset=0), tuple[mx.array, mx.array, mx.array])
    assert_type(mm.gated_delta_update(q, q, q, q, q), tuple[mx.array, mx.array])
    assert_type(mm.sample(q, temperature=0.7), mx.array | tuple[mx.array, mx.array])


def process(model: nn.Module, call: Callable[[], Any]) -> None:
    mm.patch(strict=True, softmax=False)
    mm.unpatch()
    with mm.patched(), mm.strict(), mm.simulator.enabled(seed=1):
        call()
    assert_type(mm.executors(), dict[str, str])
    print(mm.stats(reset=True), mm.nn.convert(model), mm.frontend.files())
    errors: tuple[type[Exception], ...] = (mm.DtypeError, mm.ExportError, mm.PatchError, mm.simulator.Fault)
    print(errors)
