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


def misspelt(x: mx.array) -> None:
    """Each line is an error, or the comment behind it is one."""
    mm.softmx(x)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    mm.softmax(x, axes=-1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def products(x: mx.array, w: mx.array, packed: Packed) -> None:
    assert_type(mm.matmul(x, w), mx.array)
    assert_type(mm.gemv(w, x), mx.array)
    assert_type(mm.quantized_matmul(x, *packed, group_size=64, bits=4), mx.array)
    assert_type(mm.quantized_swiglu(x, packed, packed), mx.array)
    assert_type(mm.block_matmul(x, mm.block_quantize(w, "q4_0"), "q4_0"), mx.array)
    assert_type(mm.block_dequantize(w, "q8_0"), mx.array)
    assert_type(mm.block_masked_mm(x, w, 32, None, x, w), mx.array)
    assert_type(mm.gather_mm(x, w, rhs_indices=w), mx.array)
    assert_type(mm.gather_qmm(x, *packed, rhs_indices=w), mx.array)
    assert_type(mm.gather_swiglu(x, packed, packed), mx.array)
    assert_type(mm.gather_sum(x, *packed, w, x), mx.array)
    assert_type(mm.route_top_k(x, 2), tuple[mx.array, mx.array])
    assert_type(mm.mixture(x, x, 2, packed, packed, packed, packed, packed, packed, x), mx.array)
    assert_type(mm.quantized_embedding(x, *packed), mx.array)
    assert_type(mm.quantized_matmuls(x, [packed, packed], bias=[w, w]), list[mx.array])


def attention(q: mx.array, packed: Packed) -> None:
    assert_type(mm.scaled_dot_product_attention(q, q, q, scale=1.0, mask="causal"), mx.array)
    assert_type(mm.quantized_scaled_dot_product_attention(q, packed, packed, 1.0), mx.array)
    assert_type(
        mm.scaled_dot_product_attention(q, q, q, scale=1.0, starts=q, return_logsumexp=True), tuple[mx.array, mx.array]
    )
    assert_type(
        mm.quantized_scaled_dot_product_attention(q, packed, packed, 1.0, return_logsumexp=True),
        tuple[mx.array, mx.array],
    )
    assert_type(mm.cascade_attention(q, q, q, q, q, scale=1.0, ends=q), mx.array)
    assert_type(mm.paged_attention(q, q, packed, q, q, scale=1.0), mx.array)
    assert_type(mm.paged_attention(q, q, q, q, q, scale=1.0, return_logsumexp=True), tuple[mx.array, mx.array])
    assert_type(mm.index_scores(q, q, q, scale=0.5), mx.array)
    assert_type(mm.take_tokens(q, q, q), tuple[mx.array, mx.array])
    assert_type(mm.paged_append(q, q, q, q, q, q), tuple[mx.array, mx.array, mx.array])
    assert_type(mm.paged_append(q, q, packed, packed, q, q), tuple[Packed, Packed, mx.array])
    assert_type(mm.rope_append(q, q, q, 64, base=1e4, offset=0), tuple[mx.array, mx.array, mx.array])
    appended = mm.quantized_rope_append(q, packed, packed, 64, base=1e4, offset=0)
    assert_type(appended, tuple[mx.array, tuple[mx.array, mx.array, mx.array], tuple[mx.array, mx.array, mx.array]])
    assert_type(mm.gated_delta_update(q, q, q, q, q), tuple[mx.array, mx.array])
    inputs = mm.gated_delta_inputs(q, q, q, q, q, None, q, q, q, q, q, key_eps=1e-5)
    assert_type(inputs, tuple[mx.array, mx.array, mx.array, mx.array, mx.array, mx.array])
    token = mm.gated_delta_token(q, q, q, q, q, q, q, q, q, q, q, q, eps=1e-5)
    assert_type(token, tuple[mx.array, mx.array, mx.array])
    assert_type(mm.short_conv_token(q, q, q), tuple[mx.array, mx.array])
    of_space = mm.ssm_inputs(q, None, q, None, 8, q, q)
    assert_type(of_space, tuple[mx.array, mx.array, mx.array, mx.array])
    space = mm.ssm_token(q, q, q, None, q, q, q, q, time_step_limit=(0.0, 1.0), gated=False)
    assert_type(space, tuple[mx.array, mx.array, mx.array])
    assert_type(mm.ssm_update(q, q, q, q, q, q, q), tuple[mx.array, mx.array])
    assert_type(mm.sample(q, temperature=0.7), mx.array)
    assert_type(mm.sample(q, logprobs=True), tuple[mx.array, mx.array])
    assert_type(mm.sample(q, mask=q, tokens=q, repetition_penalty=1.1, presence_penalty=q), mx.array)
    assert_type(mm.sample(q, logprobs="all"), tuple[mx.array, mx.array])


def process(model: nn.Module, call: Callable[[], Any]) -> None:
    mm.patch(strict=True, softmax=False)
    mm.patch(sofmax=False)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    mm.unpatch()
    with mm.patched(), mm.strict(), mm.simulator.enabled(seed=1):
        call()
    assert_type(mm.executors(), dict[str, str])
    print(mm.stats(reset=True), mm.frontend.files())
    answer = mm.supports("softmax", shapes=[(2, 8), ((2,), mx.uint32), None], dtype=mx.float16, device=mx.cpu, axis=-1)
    assert_type(answer, mm.Support)
    assert_type(bool(answer), bool)
    assert_type(answer.reason, str)
    assert_type(mm.build_info(), mm.BuildInfo)
    assert_type(mm.__version__, str)
    errors: tuple[type[Exception], ...] = (mm.DtypeError, mm.ExportError, mm.PatchError, mm.simulator.Fault)
    print(errors)


def modules(x: mx.array, model: nn.Module) -> None:
    assert_type(mm.nn.convert(model, fuse=False), nn.Module)
    for norm in (mm.nn.RMSNorm(8), mm.nn.LayerNorm(8)):
        assert_type(norm(x), mx.array)
    assert_type(mm.nn.Linear(8, 8)(x), mx.array)
    assert_type(mm.nn.QuantizedLinear(64, 8)(x), mx.array)
    assert_type(mm.nn.Embedding(8, 8).as_linear(x), mx.array)
    assert_type(mm.nn.QuantizedEmbedding(8, 64).as_linear(x), mx.array)
    assert_type(mm.nn.BatchQuantizedKVCache([0]).update_and_fetch(x, x), tuple[Packed, Packed])
    assert_type(mm.nn.BatchRotatingQuantizedKVCache(8, [0]).update_and_fetch(x, x), tuple[Packed, Packed])


def simulated(x: mx.array, call: Callable[[], Any]) -> None:
    kernel = mm.simulator.metal_kernel("copied", ["x"], ["y"], "y[0] = x[0];")
    assert_type(kernel, mm.simulator.Kernel)
    sizes: dict[str, Any] = {"grid": (1, 1, 1), "threadgroup": (1, 1, 1), "output_shapes": [x.shape]}
    assert_type(kernel(inputs=[x], output_dtypes=[x.dtype], **sizes), list[mx.array])
    assert_type(kernel.predict(chip="m1", inputs=[x]), mm.simulator.PredictedLaunch)
    with mm.simulator.profiled() as launches:
        call()
    assert_type(launches, mm.simulator.ProfiledLaunches)
    assert_type(launches[0], mm.simulator.Launch)
    assert_type(launches[0].lines, tuple[mm.simulator.LineCounts, ...])
    with mm.simulator.predicted("m1", peer="metal") as predicted:
        call()
    either = mm.simulator.PredictedLaunch | mm.simulator.EstimatedLaunch
    print(isinstance(predicted, mm.simulator.PredictedLaunches), isinstance(predicted[0], either))
    assert_type(mm.simulator.launched(), int)
    assert_type(mm.simulator.notes(), list[str])
