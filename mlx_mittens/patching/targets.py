"""Where a model meets its ops: the functions and methods that the patch takes the place of, as data."""

from __future__ import annotations

import functools
import importlib.util

from .. import _ext
from . import adapters, feed_forward, quantized_batches, samplers, state_updates
from .layer_targets import ATTENTION, GEMMA, MIXTURES, NORMS, STATES
from .target import Target

# Functions that rotating caches rest on.
_ROTATING = ("_trim", "_temporal_order", "_update_concat", "_update_in_place")

_FUNCTIONS = [
    Target("rms_norm", "rms_norm", "mlx.core", "fast.rms_norm", _ext.try_pending_rms_norm),
    Target(
        "rms_norm",
        "rms_norm",
        "mlx.nn",
        "RMSNorm.__call__",
        _ext.try_rms_norm_layer,
        ("self", "x"),
        partial=True,  # mx.fast.rms_norm computes the rest
    ),
    Target("layer_norm", "layer_norm", "mlx.core", "fast.layer_norm", _ext.try_layer_norm),
    Target("softmax", "softmax", "mlx.core", "softmax", _ext.try_softmax),
    Target("quantized_matmul", "quantized_matmul", "mlx.core", "quantized_matmul", _ext.try_quantized_matmul),
    Target(
        "quantized_matmul",
        "quantized_matmul",
        "mlx.nn",
        "QuantizedLinear.__call__",
        _ext.try_quantized_linear,
        ("self", "x"),
        partial=True,  # mx.quantized_matmul computes the rest
    ),
    Target(
        "quantized_matmul",
        "quantized_embedding",
        "mlx.nn",
        "QuantizedEmbedding.__call__",
        _ext.try_quantized_embedding_layer,
        ("self", "x"),
    ),
    Target(
        "scaled_dot_product_attention",
        "scaled_dot_product_attention",
        "mlx.core",
        "fast.scaled_dot_product_attention",
        _ext.try_scaled_dot_product_attention,
    ),
    Target(
        "quantized_scaled_dot_product_attention",
        "quantized_scaled_dot_product_attention",
        "mlx_lm.models.base",
        "quantized_scaled_dot_product_attention",
        _ext.try_quantized_scaled_dot_product_attention,
        ("queries", "q_keys", "q_values", "scale", "mask", "group_size", "bits"),
        optional=True,
    ),
    Target(
        "scaled_dot_product_attention",
        "scaled_dot_product_attention",
        "mlx_lm.models.base",
        "create_causal_mask",
        adapters.causal_mask,
        ("N", "offset", "window_size", "right_padding", "left_padding"),
        optional=True,
        partial=True,  # masks of windows and of padded rows
        shared=True,
    ),
    Target(
        "scaled_dot_product_attention",
        "scaled_dot_product_attention",
        "mlx_lm.models.cache",
        "BatchRotatingKVCache.make_mask",
        adapters.rotating_mask,
        ("self", "N", "window_size", "return_array"),
        optional=True,
        partial=True,  # a cache that has rotated makes its own
        text="c0cc60064e78ff42",
    ),
    Target(
        "scaled_dot_product_attention",
        "scaled_dot_product_attention",
        "mlx_lm.models.cache",
        "RotatingKVCache.make_mask",
        adapters.window_mask,
        ("self", "N", "window_size", "return_array"),
        optional=True,
        partial=True,  # a full window that exact attention reads in its order
        text="31880f32207f3401",
    ),
    Target(
        "cache",
        "cache",
        "mlx_lm.models.cache",
        "KVCache.update_and_fetch",
        _ext.try_update_and_fetch,
        ("self", "keys", "values"),
        optional=True,
        partial=True,  # a cache that has no room makes it where keys have not just been turned
    ),
    Target(
        "cache",
        "cache",
        "mlx_lm.models.cache",
        "ChunkedKVCache.update_and_fetch",
        _ext.try_chunked_update_and_fetch,
        ("self", "keys", "values"),
        optional=True,
        partial=True,  # as above
    ),
    Target(
        "cache",
        "cache",
        "mlx_lm.models.cache",
        "BatchKVCache.update_and_fetch",
        _ext.try_batch_update_and_fetch,
        ("self", "keys", "values"),
        optional=True,
        partial=True,  # as above
    ),
    Target(
        "cache",
        "cache",
        "mlx_lm.models.cache",
        "RotatingKVCache.update_and_fetch",
        _ext.try_rotating_update_and_fetch,
        ("self", "keys", "values"),
        optional=True,
        partial=True,  # buffers grow and shrink where keys have just been turned
        text="dc758372d7f04f3c b24232dd01c2755c 2d38701d455e1198 d0410a633604cfa8",
        rests_on=_ROTATING,
    ),
    Target(
        "cache",
        "cache",
        "mlx_lm.models.cache",
        "BatchRotatingKVCache.update_and_fetch",
        _ext.try_batch_rotating_update_and_fetch,
        ("self", "keys", "values"),
        optional=True,
        partial=True,  # as above
        text="7748261234fe942f fa6d0adde54acaa9 e0848c6724124f1d a377da578739c8fd",
        rests_on=_ROTATING,
    ),
    Target(
        "cache",
        "cache",
        "mlx_lm.models.cache",
        "QuantizedKVCache.update_and_fetch",
        _ext.try_quantized_update_and_fetch,
        ("self", "keys", "values"),
        optional=True,
        partial=True,  # keys that have just been turned
        text="e12d801a3f3ff204",
    ),
    Target(
        "cache",
        "cache",
        "mlx_lm.generate",
        "_merge_caches",
        quantized_batches.merge_caches,
        ("caches",),
        optional=True,
        partial=True,  # caches that are not quantized
    ),
    Target(
        "cache",
        "cache",
        "mlx_lm.generate",
        "BatchGenerator.insert_segments",
        quantized_batches.quantize_new,  # releases name the third argument, the caches, differently
        optional=True,
        partial=True,  # it goes on with the caches that it was given
    ),
    Target(
        "cache",
        "cache",
        "mlx_lm.server",
        "ResponseGenerator._is_batchable",
        quantized_batches.is_batchable,
        ("self", "args"),
        optional=True,
        partial=True,  # requests whose caches are not quantized
        text="1f19620c63e3a6f4",
    ),
    Target(
        "cache",
        "rope",
        "mlx.core",
        "fast.rope",
        _ext.try_rope,
        partial=True,  # mx's own, which an append to a cache may find
    ),
    Target("cache", "rope", "mlx.nn", "RoPE.__call__", _ext.try_rope_layer, ("self", "x", "offset"), partial=True),
    Target(
        "cache",
        "rope",
        "mlx_lm.models.rope_utils",
        "Llama3RoPE.__call__",
        _ext.try_rope_layer,
        ("self", "x", "offset"),
        optional=True,
        partial=True,
    ),
    Target(
        "swiglu",
        "quantized_swiglu",
        "mlx_lm.models.activations",
        "swiglu",
        _ext.try_swiglu,
        optional=True,
        partial=True,  # only two quantized products, of experts or not, that are still to be computed are one
        shared=True,
    ),
    Target(
        "swiglu",
        "quantized_swiglu",
        "mlx_lm.models.gemma4_text",
        "geglu",
        _ext.try_geglu,
        optional=True,
        partial=True,  # as of swiglu
    ),
    *(
        Target(
            "swiglu",
            "quantized_swiglu",
            f"mlx_lm.models.{module}",
            "MLP.__call__",
            feed_forward.geglu_layer,
            ("self", "x"),
            optional=True,
            text="77acdfac2b5d9004",
        )
        for module in ("gemma2", "gemma3_text")
    ),
    Target("experts", "gather_qmm", "mlx.core", "gather_qmm", _ext.try_gather_qmm),
    Target("experts", "gather_mm", "mlx.core", "gather_mm", _ext.try_gather_mm),
    Target("linear", "gemv", "mlx.nn", "Linear.__call__", _ext.try_linear, ("self", "x")),
    Target("linear", "gemv", "mlx.nn", "Embedding.as_linear", _ext.try_linear, ("self", "x")),
    Target("linear", "gemv", "mlx.nn", "AllToShardedLinear.__call__", adapters.all_to_sharded, ("self", "x")),
    Target("linear", "gemv", "mlx.nn", "ShardedToAllLinear.__call__", adapters.sharded_to_all, ("self", "x")),
]

_RECURRENCES = [
    Target(
        "recurrence",
        "gated_delta_update",
        "mlx.core",
        "fast.gated_delta_update",
        state_updates.fast_gated_delta,
        newer=True,
    ),
    *(
        Target(
            "recurrence",
            "gated_delta_update",
            "mlx_lm.models.gated_delta",
            name,
            attempt,
            ("q", "k", "v", "g", "beta", "state", "mask"),
            optional=True,
        )
        for name, attempt in (
            ("gated_delta_ops", functools.partial(state_updates.gated_delta, state_updates.gated_delta_ops)),
            ("gated_delta_kernel", functools.partial(state_updates.gated_delta, _ext.try_gated_delta_kernel)),
        )
    ),
    Target(
        "rms_norm",
        "qk_norm",
        "mlx_lm.models.gated_delta",
        "normalize_qk",
        state_updates.normalize_qk,
        ("q", "k", "inv_scale", "eps"),
        optional=True,
        partial=True,  # mx.fast.rms_norm computes the rest
        shared=True,
        text="ad0f44fb97b0842b",
    ),
    Target(
        "recurrence",
        "ssm_update",
        "mlx_lm.models.ssm",
        "ssm_attn",
        state_updates.state_space,
        (
            *("x", "A_log", "B", "C", "D", "dt", "dt_bias", "state", "time_step_limit", "mask", "lengths"),
            "step",
        ),
        optional=True,
        partial=True,  # not lengths without a mask
    ),
    Target(
        "recurrence",
        "ssm_update",
        "mlx_lm.models.ssm",
        "ssm_update_kernel",
        state_updates.state_space_token,
        ("hidden_states", "A_log", "B", "C", "D", "dt", "dt_bias", "state", "time_step_limit"),
        optional=True,
    ),
]

_SAMPLERS = [
    Target(
        "sample",
        "sample",
        "mlx_lm.sample_utils",
        "make_sampler",
        samplers.make_sampler,
        optional=True,
        partial=True,  # not XTC
        shared=True,
        text="e0f79a4e34185a13",
    ),
    Target(
        "sample",
        "sample",
        "mlx_lm.sample_utils",
        "make_logits_processors",
        samplers.make_logits_processors,
        optional=True,
        shared=True,
        rests_on=(
            *("make_logits_processors", "make_repetition_penalty", "make_presence_penalty"),
            "make_frequency_penalty",
        ),
        text="75d38cdaa84176e2 731477de6668f656 8e9bf7c7d5d43799 ee67e4f02f519ed1",
    ),
    Target(
        "sample",
        "sample",
        "mlx_lm.sample_utils",
        "greedy_sampler",
        samplers.greedy,
        ("logprobs",),
        optional=True,
        shared=True,
        text="244b29234949ba11",
    ),
]

TARGETS = [*_FUNCTIONS, *_RECURRENCES, *STATES, *_SAMPLERS, *MIXTURES, *NORMS, *GEMMA, *ATTENTION]


def unknown() -> list[str]:
    """Parts of the installed mlx-lm whose code is not known here: mlx-lm's own then runs.

    It imports the modules that have such a function. A model that this mlx-lm does not have is left out.
    """
    if importlib.util.find_spec("mlx_lm") is None:
        return []
    there = (target for target in TARGETS if target.text and importlib.util.find_spec(target.module))
    return [target.name for target in there if not target.is_known()]
