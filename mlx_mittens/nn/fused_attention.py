"""A model's attention on our ops, its queries, keys and values multiplied out as one: for `fusion`.

A token's three products read one input and are too small to fill a GPU, and what launching them costs the host is what
a small model waits for. So the three layers' weights are put behind one another, and the layers keep views of them; a
rotary embedding that is known here goes, with the norms of heads and the append to the cache, into one kernel.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import types
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .. import _ext
from ..patching.linears import products
from ..patching.model_attention import attend
from . import caches
from .modules import Linear, QuantizedLinear
from .norms import call_of, is_norm, offset_of, scale_of
from .rebinding import class_before, is_appended_to, update_and_fetch

__all__ = [
    "are_alike",
    "code_of",
    "decode_a_little",
    "join",
    "joinable",
    "joined_attention",
    "part",
]

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
# All that the call of an attention may mention to be one that is known here; a clip or a second kind of scale is none.
_KNOWN = {
    *(*_PROJECTIONS, "q_norm", "k_norm", "o_proj", "rope", "n_heads", "n_kv_heads", "scale", "offset"),
    *("shape", "reshape", "transpose", "swapaxes", "update_and_fetch", "scaled_dot_product_attention"),
}
_KNOWN_NUMBERS = {-1, 0, 1, 2, 3}  # axes; code within code is none
# Above this many tokens the products are matrices by matrices, which gain nothing from being one.
_MOST_TOKENS = 16


def _are_one_kernel(owner: Any) -> bool:
    """Whether the norms of an attention's heads are of one kind."""
    first, second = owner["q_norm"], owner["k_norm"]
    return is_norm(first) and is_norm(second) and first.eps == second.eps and offset_of(first) == offset_of(second)


def _rotary_of(owner: nn.Module) -> tuple[_ext.Rotary | None, list[str]]:
    """How an attention turns its heads, if that is known here, and which of its modules say so."""
    from mlx_lm.models.rope_utils import Llama3RoPE

    rope = owner["rope"]
    kind = class_before(rope)
    if kind not in (nn.RoPE, Llama3RoPE):
        return None, []
    turn: dict[str, Any] = {"traditional": rope.traditional}
    turn |= {"freqs": rope["_freqs"]} if kind is Llama3RoPE else {"base": rope.base, "scale": rope.scale}
    if "q_norm" not in owner:
        return _ext.Rotary(rope.dims, **turn), ["rope"]
    if not _are_one_kernel(owner):
        return None, []
    first, second = owner["q_norm"], owner["k_norm"]
    turn |= {"query_norm": scale_of(first), "key_norm": scale_of(second), "eps": first.eps}
    return _ext.Rotary(rope.dims, **turn), ["rope", "q_norm", "k_norm"]


class _Joined:
    """Linear layers of one input as one layer, and the rotary embedding of its heads, until any of them changes."""

    def __init__(self, owner: nn.Module, names: Sequence[str]):
        from mlx_lm.models.cache import KVCache, QuantizedKVCache

        self.plain_cache, self.quantized_cache = KVCache, QuantizedKVCache
        layers = [owner[name] for name in names]
        self.layer = copy.copy(layers[0])
        for name in layers[0]:
            ends = list(itertools.accumulate(layer[name].shape[0] for layer in layers))
            self.layer[name] = mx.concatenate([layer[name] for layer in layers])
            for layer, view in zip(layers, mx.split(self.layer[name], ends[:-1])):
                layer[name] = view
        mx.eval(self.layer.parameters(), [layer.parameters() for layer in layers])
        self.rotary, turning = _rotary_of(owner)
        self.modules = {name: owner[name] for name in (*names, *turning)}
        self.parts = _ext.ModuleParts(self.modules)

    def is_current(self, owner: dict[str, Any]) -> bool:
        return self.parts.are_those_of(owner)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Joined | None:
        if not self.is_current(self.modules):
            return None
        result = copy.copy(self)
        result.layer, result.modules = copy.deepcopy((self.layer, self.modules), memo)
        result.parts = _ext.ModuleParts(result.modules)
        return result


def are_alike(layers: Sequence[nn.Module]) -> bool:
    """Whether one product can replace all of them."""
    first = layers[0]
    if type(first) not in (Linear, QuantizedLinear):
        return False
    if any(type(layer) is not type(first) or layer.keys() != first.keys() for layer in layers):
        return False
    if type(first) is QuantizedLinear and len({(layer.group_size, layer.bits, layer.mode) for layer in layers}) > 1:
        return False
    return all(len({(layer[name].dtype, layer[name].shape[1:]) for layer in layers}) == 1 for name in first)


def code_of(module: nn.Module) -> types.CodeType | None:
    """The code of a module's call; none where that takes anything but an input, a mask and a cache."""
    call = call_of(module)
    if not inspect.isfunction(call) or list(inspect.signature(call).parameters)[2:] != ["mask", "cache"]:
        return None
    return call.__code__


def _is_known(code: types.CodeType | None) -> bool:
    """Whether a call does nothing that this module has not seen; that it does it in the same order, a trial shows."""
    if code is None or code.co_freevars or code.co_cellvars:
        return False
    needed = {*_PROJECTIONS, "o_proj", "rope", "scaled_dot_product_attention"}
    others = [value for value in code.co_consts if not isinstance(value, (str, tuple, type(None)))]
    return needed <= set(code.co_names) <= _KNOWN and set(others) <= _KNOWN_NUMBERS


def joinable(module: nn.Module) -> bool:
    """Whether a module is an attention whose three projections can be one, by its parts and the names in its call."""
    return (
        _is_known(code_of(module))
        and all(name in module for name in (*_PROJECTIONS, "o_proj", "rope"))
        and are_alike([module[name] for name in _PROJECTIONS])
    )


def join(module: nn.Module) -> None:
    """Joins the projections of such a module, which then may take `joined_attention` as its call."""
    module._joined = _Joined(module, _PROJECTIONS)


def part(module: nn.Module) -> None:
    """Undoes `join`, but the weights stay views."""
    del module._joined


def decode_a_little(module: nn.Module, x: mx.array) -> list[mx.array]:
    """The results of such a module for a few tokens, the last one with a cache of the others, and the cached arrays."""
    from mlx_lm.models.cache import KVCache

    cache = KVCache()
    results = [module(x[:, :-1], "causal", cache), module(x[:, -1:], None, cache), module(x, "causal", None)]
    return results + ([cache.keys, cache.values] if cache.offset == x.shape[1] else [])


def _norm_heads(attention: Any, queries: mx.array, keys: mx.array) -> tuple[mx.array, mx.array]:
    first, second = attention["q_norm"], attention["k_norm"]
    if not _are_one_kernel(attention):
        return first(queries), second(keys)
    try:
        return _ext.qk_norm(queries, keys, first["weight"], second["weight"], first.eps, weight_offset=offset_of(first))
    except _ext.ExportError:
        return first(queries), second(keys)


def _turn(attention: Any, heads: mx.array, cache: Any, asked: bool) -> tuple[mx.array, mx.array, mx.array]:
    """Turned queries, and keys and values behind the cached ones, by the modules of an attention.

    asked: whether our append has been asked for, and is not to be.
    """
    n_queries, n_keys = attention.n_heads, attention.n_kv_heads
    offset = 0 if cache is None else cache.offset
    rope = attention["rope"]
    has_norms, is_appended = "q_norm" in attention, not asked and is_appended_to(cache)
    if has_norms or is_appended:
        queries, keys, values = mx.split(heads, (n_queries, n_queries + n_keys), axis=1)
        if has_norms and is_appended:  # the append has them in it
            queries, keys = attention["q_norm"](queries), attention["k_norm"](keys)
        elif has_norms:
            queries, keys = _norm_heads(attention, queries, keys)
        queries, keys = rope(queries, offset=offset), rope(keys, offset=offset)
    else:
        both, values = mx.split(heads, (n_queries + n_keys,), axis=1)
        queries, keys = mx.split(rope(both, offset=offset), (n_queries,), axis=1)
    if cache is not None:
        keys, values = (update_and_fetch if is_appended else type(cache).update_and_fetch)(cache, keys, values)
    return queries, keys, values


def joined_attention(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
    """The call of an attention whose projections are joined."""
    joined = self._joined
    if joined is not None and not joined.is_current(self):  # weights were loaded or trained, adapters came
        joined = self._joined = None
    batch, tokens, _ = x.shape
    if joined is None or tokens > _MOST_TOKENS:
        return super(type(self), self).__call__(x, mask, cache)
    count = self.n_heads + 2 * self.n_kv_heads
    heads = products(x, [joined.layer], alone=True)[0]
    if tokens == 1:
        heads = heads.reshape(batch, count, 1, -1)
    else:
        heads = heads.reshape(batch, tokens, count, -1).transpose(0, 2, 1, 3)
    plain, quantized = type(cache) is joined.plain_cache, type(cache) is joined.quantized_cache
    if joined.rotary is not None and (plain or quantized):
        caches.make_room(cache, tokens, self.n_kv_heads, heads)
    plain = plain and cache.keys is not None
    turned = None
    asked = plain and joined.rotary is not None
    if asked:
        if tokens == 1 and mask is None:
            y = caches.attend(cache, heads, joined.rotary, self.scale)
            if y is not None:
                return self["o_proj"](y)
        turned = caches.turn_and_append(cache, heads, joined.rotary)
    elif quantized and joined.rotary is not None:
        turned = caches.turn_and_quantize(cache, heads, joined.rotary)
    queries, keys, values = turned or _turn(self, heads, cache, asked)
    y = attend(queries, keys, values, cache, self.scale, mask)
    if tokens > 1:
        y = y.transpose(0, 2, 1, 3)
    return self["o_proj"](y.reshape(batch, tokens, -1))
