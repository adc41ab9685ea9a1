"""Attention layers of mlx-lm's models for one token, whose queries, keys and values are one product.

A function here computes the call of a known class, and gives None where the original is to be called. Names of mlx-lm
and mx are the patch's, where these are patched. `layer_targets` names the classes by the digests of their calls;
classes of Llama's kind are in `csrc/patch/attention_layer.cpp`.
"""

from __future__ import annotations

import functools
import sys
from typing import Any, cast

import mlx.core as mx

from .. import _ext
from .digests import digest, plain
from .feed_forward import call_of
from .linears import products
from .model_attention import attend

__all__ = [
    "chosen_keys",
    "expanded_latent_attention",
    "gemma3_attention",
    "gpt_oss_attention",
    "kimi_k3_attention",
    "kimi_latent_attention",
    "latent_attention",
    "longcat_attention",
    "minimax_m3_attention",
    "qwen3_next_attention",
    "sparse_latent_attention",
]

_YARN = "a9fe6e45accde8ca"  # YarnRoPE.__call__
_LONG_ROPE = "6d918f6ebd35f609"  # SuScaledRoPE.__call__
_BLOCK_MASK = "9262347f44c55f8e"  # minimax_m3_vl.Attention._block_mask
_INDEXER = "32abbbcdb19a3967"  # deepseek_v32.Indexer.__call__
_INDEX_WIDTHS = (64, 128)  # of heads that index_scores has kernels for
_CACHES = "mlx_lm.models.cache"


@functools.partial(mx.compile, shapeless=True)
def _gated(output: mx.array, gate: mx.array) -> mx.array:
    return output * mx.sigmoid(gate)


def _is_token(x: mx.array, cache: Any) -> bool:
    return x.ndim == 3 and x.size == x.shape[-1] and cache is not None and not _ext.exporting()


def _refuse_packed(layer: Any, cache: Any) -> None:
    """Refuses quantized caches for a model of latents; mlx-lm's own call fails at an attribute of a list."""
    if hasattr(cache, "bits"):
        raise ValueError(
            f"[{type(layer).__name__}] the cache is a {type(cache).__name__}: expected one that is not quantized, "
            "as keys and values of this model are one latent, which attention takes as it is; leave kv_bits out"
        )


def _heads(x: mx.array, heads: int) -> mx.array:
    return x.reshape(1, 1, heads, -1).transpose(0, 2, 1, 3)


def _attention() -> Any:
    """The attention function: mlx-lm's, which the patch has replaced, or ours in a converted model."""
    function = sys.modules["mlx_lm.models.base"].scaled_dot_product_attention
    if isinstance(mx.fast.scaled_dot_product_attention, _ext.FunctionWrapper):
        return function
    return attend


def _attend(queries: mx.array, keys: mx.array, values: mx.array, cache: Any, **options: Any) -> mx.array:
    keys, values = cache.update_and_fetch(keys, values)
    return cast(mx.array, _attention()(queries, keys, values, cache=cache, **options))


def _unturned(heads: mx.array, offset: Any) -> mx.array:
    """The heads themselves, turned by no angle: an append to a cache takes them as it takes turned ones."""
    options = {"traditional": True, "base": 1.0, "scale": 0.0, "offset": 0}
    return cast(mx.array, _ext.try_rope(heads, heads.shape[-1], **options))


def _turned(rope: Any, heads: mx.array, offset: Any) -> mx.array:
    """The rotary embedding of heads, without a product by one."""
    if digest(call_of(rope)) == _LONG_ROPE and rope._scale == 1 and rope.dim == heads.shape[-1]:
        options = {"traditional": False, "base": None, "scale": 1.0, "freqs": rope._freqs}
        return cast(mx.array, _ext.try_rope(heads, rope.dim, offset=offset, **options))
    return cast(mx.array, rope(heads, offset=offset))


def _latent(
    layer: Any,
    x: mx.array,
    cache: Any,
    heads: int,
    query_scale: float | None = None,
    latent_scale: float | None = None,
    gate: mx.array | None = None,
) -> mx.array:
    """A token's attention over latents, whose heads of keys and values are one, where nothing is masked."""
    queries, latent = _queries_and_latent(layer, x)
    scale = layer.scale if query_scale is None else layer.scale * query_scale
    queries, turned, latent, keys = _appended(layer, queries, latent, cache, heads, scale, latent_scale)
    return _over_latents(layer, queries, turned, latent, keys, scale, cache, gate)


def _queries_and_latent(layer: Any, x: mx.array) -> tuple[mx.array, mx.array]:
    """A layer's queries, and its latent with the key that is to be turned."""
    is_low_rank = "q_a_proj" in layer
    first = layer["q_a_proj" if is_low_rank else "q_proj"]
    queries, latent = products(x, [first, layer["kv_a_proj_with_mqa"]], alone=True)
    return layer["q_b_proj"](layer["q_a_layernorm"](queries)) if is_low_rank else queries, latent


def _appended(
    layer: Any,
    queries: mx.array,
    latent: mx.array,
    cache: Any,
    heads: int,
    scale: float,
    latent_scale: float | None = None,
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    """The parts of queries, the turned one scaled, and the latents and turned keys that the cache then has."""
    queries, turned = mx.split(_heads(queries, heads), [layer.qk_nope_head_dim], axis=-1)
    latent, key = mx.split(latent, [layer.kv_lora_rank], axis=-1)
    latent = layer["kv_a_layernorm"](latent)
    if latent_scale is not None:
        latent = latent * latent_scale
    rope = layer.get("rope", _unturned)
    turned, key = (rope(part, offset=cache.offset) for part in (turned, _heads(key, 1)))
    turned = _ext.times_turned(turned, scale)
    return queries, turned, *cache.update_and_fetch(mx.expand_dims(latent, axis=1), key)


def _over_latents(
    layer: Any,
    queries: mx.array,
    turned: mx.array,
    latent: mx.array,
    keys: mx.array,
    scale: float,
    cache: Any,
    gate: mx.array | None = None,
) -> mx.array:
    options = {"cache": cache, "scale": scale, "mask": turned @ keys.swapaxes(-1, -2)}
    output = _attention()(layer["embed_q"](queries), latent, latent, **options)
    output = layer["unembed_out"](output).transpose(0, 2, 1, 3).reshape(1, 1, -1)
    return cast(mx.array, layer["o_proj"](output if gate is None else _gated(output, gate)))


@functools.cache
def _zeros(width: int, dtype: mx.Dtype, batch: int = 1) -> mx.array:
    """Values of a cache that has keys alone."""
    zeros = mx.zeros((batch, 1, 1, width), dtype)
    mx.eval(zeros)
    return zeros


def _chosen(indexer: Any, queries: mx.array, key: mx.array, weights: mx.array | None, cache: Any) -> mx.array | None:
    """The keys that an indexer chooses for a token, which it appends; None where it is to see all."""
    width, heads = indexer.head_dim, indexer.n_heads
    key = indexer["k_norm"](key).reshape(1, 1, 1, width)
    turned, key = (indexer.rope(part, offset=cache.offset) for part in (_heads(queries, heads), key))
    keys, _ = cache.update_and_fetch(key, _zeros(width, key.dtype))
    if weights is None:
        return None
    return mx.stop_gradient(_choice(indexer, turned, keys, weights))


def _choice(
    indexer: Any, turned: mx.array, keys: mx.array, weights: mx.array, mask: mx.array | None = None
) -> mx.array:
    """The keys that an indexer chooses for queries, of shape ``[batch, 1, queries, count]``."""
    most, scale = indexer.index_topk, indexer.n_heads**-0.5 * indexer.softmax_scale
    scores = mx.expand_dims(_ext.index_scores(turned, keys[:, 0], weights, scale=scale), 1)
    if mask is not None:
        scores = mx.where(mask, scores, -float("inf"))
    return mx.argpartition(scores, kth=-most, axis=-1)[..., -most:]


def _held(cache: Any) -> int | None:
    """How many tokens a cache holds that keeps all; None of other caches."""
    kind = type(cache)
    if kind.__module__ != _CACHES or kind.__name__ not in ("KVCache", "BatchKVCache") or cache.values is None:
        return None
    held = cache.offset if kind.__name__ == "KVCache" else cache._idx
    return held if isinstance(held, int) else None


def chosen_keys(indexer: Any, x: mx.array, qr: mx.array, mask: Any, cache: Any = None) -> mx.array | None:
    """mlx_lm.models.deepseek_v32.Indexer, of a token for each row of a batch that sees more keys than it chooses."""
    held, width = _held(cache), indexer.head_dim
    if held is None or held < indexer.index_topk or x.ndim != 3 or x.shape[1] != 1 or _ext.exporting():
        return None
    if width not in _INDEX_WIDTHS:
        return None
    batch = x.shape[0]
    queries = indexer["wq_b"](qr).reshape(batch, 1, indexer.n_heads, width).swapaxes(1, 2)
    key = indexer["k_norm"](indexer["wk"](x)).reshape(batch, 1, 1, width)
    turned, key = (indexer.rope(part, offset=cache.offset) for part in (queries, key))
    keys, _ = cache.update_and_fetch(key, _zeros(width, key.dtype, batch))
    return _choice(indexer, turned, keys, indexer["weights_proj"](x), mask)


def sparse_latent_attention(layer: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array | None:
    """mlx_lm.models.deepseek_v32.DeepseekV32Attention, where an indexer chooses keys."""
    if mask is not None or cache is None or not _is_token(x, cache[0]) or cache[1] is None:
        return None
    indexer = layer["indexer"]
    if digest(call_of(indexer)) != _INDEXER or cache[1].values is None or not isinstance(cache[1].offset, int):
        return None
    chooses = cache[1].offset + 1 > indexer.index_topk
    layers = [layer["q_a_proj"], layer["kv_a_proj_with_mqa"], indexer["wk"]]
    queries, latent, key, *weights = products(x, [*layers, indexer["weights_proj"]] if chooses else layers, alone=True)
    low_rank = layer["q_a_layernorm"](queries)
    queries, searching = products(low_rank, [layer["q_b_proj"], indexer["wq_b"]], alone=True)
    queries, turned, latent, keys = _appended(layer, queries, latent, cache[0], layer.num_heads, layer.scale)
    indices = _chosen(indexer, searching, key, weights[0] if chooses else None, cache[1])
    if indices is not None:
        latent, keys = _ext.take_tokens(latent, keys, indices[:, :, 0])
    # The indexer's cache is computed where nothing reads it, too.
    cache[0].keys = mx.depends(cache[0].keys, (cache[1].keys, cache[1].values))
    return _over_latents(layer, queries, turned, latent, keys, layer.scale, cache)


def latent_attention(layer: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array | None:
    """mlx_lm.models.deepseek_v3.DeepseekV3Attention, and layers built like it."""
    _refuse_packed(layer, cache)
    if mask is not None or not _is_token(x, cache):
        return None
    return _latent(layer, x, cache, layer.num_heads)


def expanded_latent_attention(layer: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array | None:
    """mlx_lm.models.deepseek_v2.DeepseekV2Attention, whose cache has heads that are made of the latents.

    With exact=True a token is computed as several are.
    """
    if not _is_token(x, cache) or _ext.is_exact():
        return None
    heads, width, rope = layer.num_heads, layer.qk_nope_head_dim, layer["rope"]
    queries, latent = _queries_and_latent(layer, x)
    latent, key = mx.split(latent, [layer.kv_lora_rank], axis=-1)
    made = _heads(layer["kv_b_proj"](layer["kv_a_layernorm"](latent)), heads)
    keys, values = mx.split(made, [width], axis=-1)
    queries = _heads(queries, heads)
    before, part = mx.split(queries, [width], axis=-1)
    turned, key = (_turned(rope, heads, cache.offset) for heads in (part, _heads(key, 1)))
    queries, keys = _ext.before_turned(before, turned, queries, part), _ext.before_turned(keys, key)
    scale = layer.softmax_scale if "softmax_scale" in vars(layer) else layer.scale
    output = _attend(queries, keys, values, cache, scale=scale, mask=mask).transpose(0, 2, 1, 3)
    return cast(mx.array, layer["o_proj"](output.reshape(1, 1, -1)))


def longcat_attention(layer: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array | None:
    """mlx_lm.models.longcat_flash.LongcatFlashMLA, which scales queries and latents.

    The factor of the queries is one of the scores here, where mlx-lm's call rounds behind it.
    """
    if mask is not None or not _is_token(x, cache) or _ext.is_exact():
        return None
    return _latent(layer, x, cache, layer.num_attention_heads, layer.mla_scale_q_lora, layer.mla_scale_kv_lora)


def kimi_latent_attention(layer: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array | None:
    """mlx_lm.models.kimi_linear.KimiMLAAttention, which turns nothing."""
    _refuse_packed(layer, cache)
    width = layer.qk_rope_head_dim
    if mask is not None or not _is_token(x, cache) or width == 0 or width % 2 != 0:
        return None
    return _latent(layer, x, cache, layer.num_heads)


def kimi_k3_attention(layer: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array | None:
    """mlx_lm.models.kimi_k3.KimiK3MLAAttention, whose output may have a gate."""
    _refuse_packed(layer, cache)
    width = layer.qk_rope_head_dim
    if mask is not None or not _is_token(x, cache) or width == 0 or width % 2 != 0:
        return None
    gate = layer["g_proj"](x) if layer.use_gate else None
    return _latent(layer, x, cache, layer.num_heads, gate=gate)


@functools.lru_cache(maxsize=16)
def _last_blocks(heads: int, blocks: int, count: int) -> mx.array:
    """Whether a block is one of the last, for each head."""
    last = mx.broadcast_to(mx.arange(blocks) >= blocks - count, (1, heads, 1, blocks))
    mx.eval(last)
    return last


def _chosen_blocks(layer: Any, queries: mx.array, key: mx.array, cache: Any) -> mx.array | None:
    """The mask of the key blocks that minimax_m3_vl's indexer chooses for a token; None where it is to see all."""
    heads, size, most = layer.index_n_heads, layer.index_block_size, layer.index_topk_blocks
    queries, key = layer["index_q_norm"](_heads(queries, heads)), layer["index_k_norm"](_heads(key, 1))
    queries, key = (layer.index_rope(part, offset=cache.offset) for part in (queries, key))
    keys, _ = cache.update_and_fetch(key, _zeros(0, key.dtype))
    count = keys.shape[2]
    blocks = -(-count // size)
    if most >= blocks:
        return None
    # The last blocks are chosen in any case: only whole ones are compared.
    last = layer.index_local_blocks
    others = blocks - last
    scores = queries.astype(mx.float32) @ keys.astype(mx.float32).swapaxes(-1, -2)
    scores = scores[..., : others * size].reshape(1, heads, 1, others, size).max(axis=-1)
    indices = mx.stop_gradient(mx.argpartition(-scores, kth=most - last - 1, axis=-1)[..., : most - last])
    keep = mx.put_along_axis(_last_blocks(heads, blocks, last), indices, mx.array(True), axis=-1)
    repeats = layer.num_attention_heads // heads
    keep = mx.broadcast_to(keep[:, :, None, :, :, None], (1, heads, repeats, 1, blocks, size))
    return keep.reshape(1, heads * repeats, 1, blocks * size)[..., :count]


def minimax_m3_attention(layer: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array | None:
    """mlx_lm.models.minimax_m3_vl.Attention, where an indexer chooses blocks of keys."""
    if mask is not None or cache is None or not _is_token(x, cache[0]):
        return None
    own, sparse = cache[0], layer.is_sparse_attn
    if sparse and not (
        digest(plain(type(layer)._block_mask)) == _BLOCK_MASK
        and 0 < layer.index_local_blocks < layer.index_topk_blocks
        and isinstance(own.offset, int)
        and own.offset == cache[1].offset
    ):
        return None
    names = ("q_proj", "k_proj", "v_proj")
    queries, keys, values = products(x, [layer[name] for name in names], alone=not sparse)
    queries = _heads(queries, layer.num_attention_heads)
    keys, values = (_heads(part, layer.num_key_value_heads) for part in (keys, values))
    if layer.use_qk_norm:
        queries, keys = layer["q_norm"](queries), layer["k_norm"](keys)
    queries, keys = (layer.rope(heads, offset=own.offset) for heads in (queries, keys))
    keys, values = own.update_and_fetch(keys, values)
    if sparse:
        searching, key = products(x, [layer["index_q_proj"], layer["index_k_proj"]])
        mask = _chosen_blocks(layer, searching, key, cache[1])
        # The indexer's cache is computed where nothing reads it, too.
        own.keys = mx.depends(own.keys, (cache[1].keys, cache[1].values))
    output = _attention()(queries, keys, values, cache=own, scale=layer.scale, mask=mask)
    return cast(mx.array, layer["o_proj"](output.transpose(0, 2, 1, 3).reshape(1, 1, -1)))


def qwen3_next_attention(layer: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array | None:
    """mlx_lm.models.qwen3_next.Qwen3NextAttention, whose queries come with gates of the results."""
    if not _is_token(x, cache):
        return None
    queries, keys, values = products(x, [layer[name] for name in ("q_proj", "k_proj", "v_proj")], alone=True)
    queries, gate = mx.split(queries.reshape(1, 1, layer.num_attention_heads, -1), 2, axis=-1)
    keys = keys.reshape(1, 1, layer.num_key_value_heads, -1)
    queries = layer["q_norm"](queries).transpose(0, 2, 1, 3)
    keys = layer["k_norm"](keys).transpose(0, 2, 1, 3)
    queries, keys = (layer["rope"](heads, offset=cache.offset) for heads in (queries, keys))
    values = _heads(values, layer.num_key_value_heads)
    output = _attend(queries, keys, values, cache, scale=layer.scale, mask=mask).transpose(0, 2, 1, 3)
    return cast(mx.array, layer["o_proj"](_gated(output, gate).reshape(1, 1, -1)))


def gemma3_attention(layer: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array | None:
    """mlx_lm.models.gemma3_text.Attention, whose norms of heads have a scale of 1 + weight."""
    if not _is_token(x, cache):
        return None
    queries, keys, values = products(x, [layer[name] for name in ("q_proj", "k_proj", "v_proj")], alone=True)
    values = _heads(values, layer.n_kv_heads)
    queries = layer["q_norm"](_heads(queries, layer.n_heads))
    keys = layer["k_norm"](_heads(keys, layer.n_kv_heads))
    queries, keys = (layer.rope(heads, offset=cache.offset) for heads in (queries, keys))
    output = _attend(queries, keys, values, cache, scale=layer.scale, mask=mask).transpose(0, 2, 1, 3)
    return cast(mx.array, layer["o_proj"](output.reshape(1, 1, -1)))


def gpt_oss_attention(layer: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array | None:
    """mlx_lm.models.gpt_oss.AttentionBlock. The factor of YaRN's queries is one of the scores.

    mlx-lm's call, which several tokens take, rounds the queries behind it. With exact=True we do so for one, too.
    """
    if not _is_token(x, cache):
        return None
    width, rope = layer.head_dim, layer["rope"]
    parts = products(x, [layer[name] for name in ("q_proj", "k_proj", "v_proj")], alone=True)
    queries, keys, values = (_heads(part, part.shape[-1] // width) for part in parts)
    scale, offset = layer.sm_scale, cache.offset
    is_yarn = digest(type(rope).__call__) == _YARN
    if is_yarn and rope.dims == width and rope.mscale != 1 and not _ext.is_exact():
        scale *= rope.mscale
        options = {"traditional": rope.traditional, "base": None, "scale": 1.0, "freqs": rope._freqs}
        queries = mx.fast.rope(queries, width, offset=offset, **options)
    else:
        queries = rope(queries, offset=offset)
    keys = rope(keys, offset=offset)
    output = _attend(queries, keys, values, cache, scale=scale, mask=mask, sinks=layer["sinks"])
    return cast(mx.array, layer["o_proj"](output.transpose(0, 2, 1, 3).reshape(1, 1, -1)))
