"""Where a model meets its ops: the functions and methods that the patch takes the place of, as data."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.distributed import sum_gradients

from .. import _ext
from ..promotion import result_type
from . import altup_layers, attention_layers, feed_forward, quantized_batches, recurrent_layers, routers
from .digests import digest, digest_in, plain

__all__ = [
    "CLIP_RESIDUAL",
    "TARGETS",
    "Target",
    "PatchError",
    "digest",
    "executed",
    "importing",
    "mixture_of",
    "unknown",
]

importing: set[str] = set()  # modules that are not yet what they will be
executed: set[str] = set()  # modules that were imported under the patch

Attempt = Callable[..., Any]  # an op's result, or None where the original is to be called


class PatchError(RuntimeError):
    """A function that the patch takes the place of is not where it was, or takes other arguments.

    Example:
        >>> try:
        ...     mm.patch()
        ... except mm.PatchError as error:  # mlx-lm is of another version: the message says which switch leaves it out
        ...     print(error)
        >>> mm.unpatch()
    """


def _all_to_sharded(module: Any, x: mx.array) -> mx.array | None:
    return _ext.try_linear(module, sum_gradients(module.group)(x))


def _sharded_to_all(module: Any, x: mx.array) -> mx.array | None:
    part = _ext.try_gemv(module["weight"], x)
    if part is None:
        return None
    y = mx.distributed.all_sum(part, group=module.group)
    return y + module["bias"] if "bias" in module else y


def _gemma3_block(block: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array | None:
    """A decoder layer of Gemma 3, whose sums a compiled function computes: that hides them from the norms after them.

    In float16 it keeps them finite too.
    """
    if digest_in(sys.modules[type(block).__module__], "clip_residual") != CLIP_RESIDUAL:
        return None
    norms = [block["post_attention_layernorm"], block["post_feedforward_layernorm"]]
    is_known = all(digest(plain(type(norm).__call__)) == _OFFSET_NORM for norm in norms)
    if x.dtype == mx.float16 and (_ext.exporting() or not is_known):
        return None
    h = _plus_norm(x, block.self_attn(block.input_layernorm(x), mask, cache), norms[0])
    return _plus_norm(h, block.mlp(block.pre_feedforward_layernorm(h)), norms[1])


def _plus_norm(residual: mx.array, x: mx.array, norm: Any) -> mx.array:
    """A sum of Gemma 3's, which the norm after it may compute."""
    if residual.dtype != mx.float16:
        return cast(mx.array, residual + norm(x))
    return _ext.norm_add_norm(x, residual, norm.weight, None, norm.eps, weight_offset=1.0, clip_sum=True)[1]


def _gemma2_logits(model: Any, inputs: mx.array, cache: Any = None) -> mx.array:
    """The logits of Gemma 2, bounded in one kernel."""
    return _ext.softcap(model.model.embed_tokens.as_linear(model.model(inputs, cache)), model.final_logit_softcapping)


@dataclass(frozen=True, eq=False)  # hashed by who it is, as a function
class _Sampler:
    """A sampler of mlx-lm's in one op: logarithmic probabilities to tokens."""

    temperature: float
    filters: dict[str, Any]

    def __call__(self, logprobs: mx.array) -> mx.array:
        top_k = self.filters["top_k"]
        if top_k >= logprobs.shape[-1]:
            from mlx_lm.sample_utils import apply_top_k

            apply_top_k(logprobs, top_k)  # says what is wrong
        return _ext.sample_logprobs(logprobs, self.temperature, **self.filters)


def _make_sampler(
    temp: float = 0.0,
    top_p: float = 0.0,
    min_p: float = 0.0,
    min_tokens_to_keep: int = 1,
    top_k: int = 0,
    xtc_probability: float = 0.0,
    xtc_threshold: float = 0.1,
    xtc_special_tokens: Any = None,
) -> _Sampler | None:
    """A sampler without what the op lacks: XTC, and min-p that keeps several tokens at least."""
    lacks = xtc_probability > 0 or (min_p != 0 and min_tokens_to_keep != 1)
    if lacks or not temp > 0 or not 0 <= min_p <= 1 or not isinstance(top_k, int):
        return None
    return _Sampler(temp, {"top_k": max(top_k, 0), "top_p": top_p if 0 < top_p < 1 else 0.0, "min_p": min_p})


@dataclass(frozen=True, eq=False)
class _Penalty:
    """A logits processor of mlx-lm's, which a sampler takes into its launches."""

    which: int  # repetition, presence, frequency
    penalty: float
    context: int
    original: Callable[[mx.array, mx.array], mx.array]

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        result = None
        if isinstance(tokens, mx.array) and not _ext.exporting():
            result = _ext.penalized_logits(logits, tokens, self.which, self.penalty, self.context)
        return self.original(tokens, logits) if result is None else result


def _make_logits_processors(
    logit_bias: dict[int, float] | None = None,
    repetition_penalty: float | None = None,
    repetition_context_size: int = 20,
    presence_penalty: float | None = None,
    presence_context_size: int = 20,
    frequency_penalty: float | None = None,
    frequency_context_size: int = 20,
) -> list[Any] | None:
    """mlx-lm's processors, of which those for the last tokens become part of the draw."""
    from mlx_lm import sample_utils

    processors = plain(sample_utils.make_logits_processors)(logit_bias)
    makers = (
        (sample_utils.make_repetition_penalty, repetition_penalty, repetition_context_size),
        (sample_utils.make_presence_penalty, presence_penalty, presence_context_size),
        (sample_utils.make_frequency_penalty, frequency_penalty, frequency_context_size),
    )
    for which, (make, penalty, size) in enumerate(makers):
        if penalty is None or penalty == 0:
            continue
        original = make(penalty, size)
        is_known = isinstance(penalty, (int, float)) and isinstance(size, int) and size >= 0
        context = size or 2**31 - 1  # tokens[-0:] are all of them
        processors.append(_Penalty(which, float(penalty), context, original) if is_known else original)
    return processors


def _causal_mask(
    N: int, offset: int = 0, window_size: int | None = None, right_padding: Any = None, left_padding: Any = None
) -> mx.array | None:
    """The mask of a window, or of rows that are padded on their left, which attention knows by the array."""
    if not isinstance(offset, int) or not N > 0 or right_padding is not None:
        return None
    if window_size is not None and not (isinstance(window_size, int) and window_size > 0):
        return None
    if left_padding is None:
        return None if window_size is None else _ext.window_mask(N, offset, window_size)
    if not isinstance(left_padding, mx.array) or left_padding.ndim != 1 or left_padding.dtype != mx.int32:
        return None
    return _ext.row_mask(N, offset, window_size, left_padding)


def _rotating_mask(cache: Any, N: int, window_size: int | None = None, return_array: bool = False) -> mx.array | None:
    """The mask of a batch of windows whose tokens are in their order."""
    if N == 1 and (cache.rotated or cache._idx >= cache.max_size):
        return None
    dropped = max(cache._idx - cache.max_size + int(N > 1), 0)
    padding = cache.left_padding - dropped if dropped else cache.left_padding
    return _causal_mask(N, min(cache.max_size - 1, cache._offset), window_size or cache.max_size, None, padding)


def _wide(state: mx.array | None) -> mx.array | None:
    """A state that a function returns in float32, whatever it is given."""
    return None if state is None else state.astype(mx.float32)


def _gated_delta(
    attempt: Attempt,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array] | None:
    """A token or a prompt of mlx-lm's, whose y has the type of the queries."""
    outputs = attempt(q, k, v, g, beta, state, mask)
    return outputs and (outputs[0].astype(q.dtype), outputs[1])


def _gated_delta_ops(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, mask: Any) -> Any:
    """mlx-lm's operations for each step, which give a state in float32."""
    return _ext.try_gated_delta_ops(q, k, v, g, beta, _wide(state), mask)


def _fast_gated_delta(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    gamma: mx.array,
    beta: mx.array,
    initial_state: mx.array | None = None,
    mask: mx.array | None = None,
    **options: Any,
) -> list[mx.array] | None:
    outputs = _ext.try_gated_delta_update(q, k, v, gamma, beta, _wide(initial_state), mask, **options)
    return outputs and [outputs[0].astype(result_type(q.dtype, k.dtype)), outputs[1]]


@functools.lru_cache(maxsize=64)
def _constant_weight(width: int, value: float, dtype: mx.Dtype) -> mx.array:
    weight = mx.full((width,), value, dtype=dtype)
    mx.eval(weight)  # which every stream and thread may read
    return weight


def _normalize_qk(q: mx.array, k: mx.array, *, inv_scale: float, eps: float) -> tuple[mx.array, mx.array] | None:
    """Both norms, and the scales of queries and keys as their weights."""
    if q.ndim == 0 or k.ndim == 0 or q.shape[-1] != k.shape[-1] or q.dtype != k.dtype or _ext.exporting():
        return None
    scales = (_constant_weight(q.shape[-1], scale, q.dtype) for scale in (inv_scale**2, inv_scale))
    return _ext.qk_norm(q, k, *scales, eps * inv_scale**2)


def _state_space(
    x: mx.array,
    A_log: mx.array,
    B: mx.array,
    C: mx.array,
    D: mx.array,
    dt: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    time_step_limit: tuple[float, float] = (0.001, 100.0),
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
    step: int = 256,
) -> tuple[mx.array, mx.array] | None:
    """A prompt, or a token off Apple's GPUs. Lengths without a mask mean something else there."""
    if lengths is not None and mask is None:
        return None
    return _ext.try_ssm_update(x, A_log, B, C, D, dt, dt_bias, _wide(state), time_step_limit, mask, lengths)


def _state_space_token(
    hidden_states: mx.array,
    A_log: mx.array,
    B: mx.array,
    C: mx.array,
    D: mx.array,
    dt: mx.array,
    dt_bias: mx.array,
    state: mx.array,
    time_step_limit: tuple[float, float],
) -> tuple[mx.array, mx.array] | None:
    """A token on Apple's GPUs, whose y has the type of hidden_states there, whatever D's is."""
    results = _ext.try_ssm_update(hidden_states, A_log, B, C, D, dt, dt_bias, state, time_step_limit)
    return results and (results[0].astype(hidden_states.dtype), results[1])


def _greedy(logprobs: mx.array) -> mx.array:
    return _ext.sample_logprobs(logprobs, 0.0)


@dataclass(frozen=True)
class Target:
    """A function of another package, and the op that stands in for it."""

    switch: str  # what patch() calls it
    op: str  # what stats() calls it
    module: str  # where the function is
    path: str  # and its name there, with dots
    attempt: Attempt
    parameters: tuple[str, ...] = ()  # of a Python function, which must be these; mx's own are those of its version
    optional: bool = False  # a package that need not be installed; patched once it is imported
    newer: bool = False  # only later releases of mlx have it: it is left alone where it is not there
    partial: bool = False  # some calls are the original's in strict mode too
    shared: bool = False  # the package's other modules import it by name
    text: str = ""  # the digest of the one function that is known here; another is left alone
    rests_on: tuple[str, ...] = ()  # functions of the same owner that digests are of instead, one behind the other
    needs: tuple[str, ...] = ()  # other switches, without which it is left alone

    @property
    def name(self) -> str:
        """The function's full name."""
        return f"{self.module}.{self.path}"

    def owner(self) -> tuple[Any, str]:
        """What holds the function, and under which name.

        Raises:
            PatchError: It is not there, or takes other arguments than those known.
        """
        *parents, leaf = self.path.split(".")
        try:
            # import_module waits for a thread that imports the module. One that has executed it waits for the patch.
            there = sys.modules.get(self.module) if self.module in executed else None
            owner = functools.reduce(getattr, parents, there or importlib.import_module(self.module))
            function = getattr(owner, leaf)
        except (ImportError, AttributeError) as error:
            raise PatchError(self._complaint(f"is not there ({error})")) from error
        if self.parameters and not hasattr(function, "__wrapped__"):
            found = tuple(inspect.signature(function).parameters)
            if found != self.parameters:
                raise PatchError(
                    self._complaint(f"takes ({', '.join(found)}): expected ({', '.join(self.parameters)})")
                )
        return owner, leaf

    def importers(self, function: Any) -> list[Any]:
        """The package's modules that hold a function under the target's name."""
        if not self.shared:
            return []
        inside = f"{self.module.rpartition('.')[0]}."
        modules = [module for name, module in list(sys.modules.items()) if name.startswith(inside)]
        return [module for module in modules if getattr(module, "__dict__", {}).get(self.path) is function]

    def is_wanted(self, switches: Collection[str]) -> bool:
        """Whether the switches that are on ask for it."""
        return self.switch in switches and all(name in switches for name in self.needs)

    def is_loaded(self) -> bool:
        """Whether its module has been imported; the others are imported when they are patched."""
        if self.newer and not self._is_there():
            return False
        return not self.optional or (self.module in sys.modules and self.module not in importing)

    def _is_there(self) -> bool:
        *parents, leaf = self.path.split(".")
        owner: Any = importlib.import_module(self.module)
        for name in parents:
            owner = getattr(owner, name, None)
        return hasattr(owner, leaf)

    def is_known(self) -> bool:
        """Whether the function is the one that it has to be, where just one will do."""
        if not self.text:
            return True
        try:
            owner, leaf = self.owner()
        except PatchError:
            return False
        functions = [getattr(owner, name, None) for name in self.rests_on or (leaf,)]
        return " ".join(map(digest, map(plain, functions))) == self.text

    def _complaint(self, what: str) -> str:
        import importlib.metadata

        package = self.module.split(".")[0].replace("_", "-")
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "of unknown version"
        return (
            f"[patch] {self.name} {what}; installed is {package} {version}. "
            f"mm.patch({self.switch}=False) leaves it alone."
        )


# What rotating caches rest on.
_ROTATING = ("_trim", "_temporal_order", "_update_concat", "_update_in_place")

TARGETS = [
    Target("rms_norm", "rms_norm", "mlx.core", "fast.rms_norm", _ext.try_pending_rms_norm),
    Target(
        "rms_norm",
        "rms_norm",
        "mlx.nn",
        "RMSNorm.__call__",
        _ext.try_rms_norm_layer,
        ("self", "x"),
        partial=True,  # what it leaves is mx.fast.rms_norm's
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
        partial=True,  # what it leaves is mx.quantized_matmul's
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
        _causal_mask,
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
        _rotating_mask,
        ("self", "N", "window_size", "return_array"),
        optional=True,
        partial=True,  # a cache that has rotated makes its own
        text="c0cc60064e78ff42",
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
    Target("linear", "gemv", "mlx.nn", "AllToShardedLinear.__call__", _all_to_sharded, ("self", "x")),
    Target("linear", "gemv", "mlx.nn", "ShardedToAllLinear.__call__", _sharded_to_all, ("self", "x")),
]

TARGETS += [
    Target(
        "recurrence",
        "gated_delta_update",
        "mlx.core",
        "fast.gated_delta_update",
        _fast_gated_delta,
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
            ("gated_delta_ops", functools.partial(_gated_delta, _gated_delta_ops)),
            ("gated_delta_kernel", functools.partial(_gated_delta, _ext.try_gated_delta_kernel)),
        )
    ),
    Target(
        "rms_norm",
        "qk_norm",
        "mlx_lm.models.gated_delta",
        "normalize_qk",
        _normalize_qk,
        ("q", "k", "inv_scale", "eps"),
        optional=True,
        partial=True,  # what it leaves is mx.fast.rms_norm's
        shared=True,
        text="ad0f44fb97b0842b",
    ),
    Target(
        "recurrence",
        "ssm_update",
        "mlx_lm.models.ssm",
        "ssm_attn",
        _state_space,
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
        _state_space_token,
        ("hidden_states", "A_log", "B", "C", "D", "dt", "dt_bias", "state", "time_step_limit"),
        optional=True,
    ),
]


@dataclass(frozen=True)
class _StateLayer:
    """A layer of mlx-lm's models that keeps states, known by what its call does.

    Attributes:
        op: Of ours, which computes a token between its projections. Prompts have others.
        attempt: Stands in for the call.
        text: The digest of the call.
        layers: Modules and classes that have it.
        parameters: Of the call.
        needs: Switches of the patch without which mlx-lm computes it.
    """

    op: str
    attempt: Attempt
    text: str
    layers: tuple[str, ...]
    parameters: tuple[str, ...] = ("self", "inputs", "mask", "cache")
    needs: tuple[str, ...] = ("rms_norm",)


_OF_HIDDEN_STATES = ("self", "hidden_states", "mask", "cache")
_STATE_LAYERS = (
    _StateLayer(
        "gated_delta_token",
        recurrent_layers.qwen3_next_delta,
        "0cdfe33557b5ff30",
        ("qwen3_next.Qwen3NextGatedDeltaNet",),
    ),
    _StateLayer("gated_delta_token", recurrent_layers.qwen3_5_delta, "ab4ea6085dd4ed44", ("qwen3_5.GatedDeltaNet",)),
    _StateLayer(
        "gated_delta_token",
        recurrent_layers.kimi_delta,
        "f3313d59a93c2dfe",
        ("kimi_linear.KimiDeltaAttention",),
        ("self", "x", "mask", "cache"),
    ),
    _StateLayer(
        "short_conv_token",
        recurrent_layers.lfm2_convolution,
        "014d36c50549ec90",
        ("lfm2.ShortConv", "lfm2_moe.ShortConv"),
        ("self", "x", "mask", "cache"),
        needs=(),
    ),
    _StateLayer(
        "ssm_token",
        recurrent_layers.mamba2_space,
        "6eea72843bb1b50f",
        ("mamba2.Mamba2Block",),
        _OF_HIDDEN_STATES,
    ),
    _StateLayer(
        "ssm_token",
        recurrent_layers.mamba2_space,
        "7e9d4648fce3eed5",
        ("granitemoehybrid.GraniteMoeHybridMamba2Mixer", "nemotron_h.NemotronHMamba2Mixer"),
        _OF_HIDDEN_STATES,
    ),
    _StateLayer(
        "ssm_token",
        recurrent_layers.falcon_h1_space,
        "50087509c036bf2b",
        ("falcon_h1.FalconH1Mixer",),
        ("self", "input_states", "cache", "mask"),
    ),
)

TARGETS += [
    Target(
        "recurrence",
        each.op,
        f"mlx_lm.models.{layer.partition('.')[0]}",
        f"{layer.partition('.')[2]}.__call__",
        each.attempt,
        each.parameters,
        optional=True,
        partial=True,  # not without a cache
        text=each.text,
        needs=each.needs,
    )
    for each in _STATE_LAYERS
    for layer in each.layers
]

TARGETS += [
    Target(
        "sample",
        "sample",
        "mlx_lm.sample_utils",
        "make_sampler",
        _make_sampler,
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
        _make_logits_processors,
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
        _greedy,
        ("logprobs",),
        optional=True,
        shared=True,
        text="244b29234949ba11",
    ),
]

# Attention layers of mlx-lm's models, by what their calls do: those of Llama's kind and those with norms of heads.
_LAYERS: tuple[tuple[Attempt, tuple[str, ...], str, tuple[str, ...]], ...] = (
    (
        _ext.try_attention_layer,
        ("cache", "scaled_dot_product_attention"),
        "0bc66a8672d86d63",
        (
            *("ernie4_5.Attention", "ernie4_5_moe.Attention", "gemma.Attention", "glm4.Glm4Attention"),
            *("granite.Attention", "granitemoe.GraniteMoeAttention", "helium.HeliumAttention", "internlm3.Attention"),
            *("llama.Attention", "mimo.Attention", "phimoe.Attention", "qwen2.Attention", "qwen2_moe.Attention"),
            *("seed_oss.Attention", "starcoder2.Attention"),
        ),
    ),
    (
        _ext.try_normed_attention_layer,
        ("cache", "scaled_dot_product_attention", "rms_norm"),
        "f20832211537a64d",
        ("dots1.Dots1Attention", "mellum.Attention", "qwen3.Attention", "qwen3_moe.Attention"),
    ),
    (
        _ext.try_lfm2_attention_layer,
        ("cache", "scaled_dot_product_attention", "rms_norm"),
        "03e9b59a6810ee67",
        ("lfm2.Attention", "lfm2_moe.Attention"),
    ),
    (
        attention_layers.qwen3_next_attention,
        ("cache", "scaled_dot_product_attention"),
        "154f0bf2a90459fb",
        ("qwen3_next.Qwen3NextAttention",),
    ),
    (
        attention_layers.gemma3_attention,
        ("cache", "scaled_dot_product_attention"),
        "2258d2b3a5d51489",
        ("gemma3_text.Attention",),
    ),
    (
        attention_layers.latent_attention,
        ("cache", "scaled_dot_product_attention"),
        "ce254d7b6c0cc43b",
        ("deepseek_v3.DeepseekV3Attention", "glm4_moe_lite.Glm4MoeLiteAttention"),
    ),
    *(
        (attention_layers.expanded_latent_attention, ("cache", "scaled_dot_product_attention"), text, layers)
        for text, layers in (
            ("9a022e43b1ae9287", ("deepseek_v2.DeepseekV2Attention", "youtu_llm.YoutuLLMAttention")),
            ("62b8d73446fda38f", ("minicpm3.Attention",)),
        )
    ),
    (
        attention_layers.sparse_latent_attention,
        ("cache", "scaled_dot_product_attention"),
        "852b38816ced0304",
        ("deepseek_v32.DeepseekV32Attention",),
    ),
    (
        attention_layers.kimi_latent_attention,
        ("cache", "scaled_dot_product_attention"),
        "b0898c86fdec7259",
        ("kimi_linear.KimiMLAAttention",),
    ),
    (
        attention_layers.kimi_k3_attention,
        ("cache", "scaled_dot_product_attention"),
        "ff8b5837fbd60545",
        ("kimi_k3.KimiK3MLAAttention",),
    ),
    (
        attention_layers.minimax_m3_attention,
        ("cache", "scaled_dot_product_attention"),
        "4bef3ecd2f588d39",
        ("minimax_m3_vl.Attention",),
    ),
    (
        attention_layers.longcat_attention,
        ("cache", "scaled_dot_product_attention"),
        "552eb8266e484353",
        ("longcat_flash.LongcatFlashMLA",),
    ),
    (
        attention_layers.gpt_oss_attention,
        ("cache", "scaled_dot_product_attention"),
        "666f870329209924",
        ("gpt_oss.AttentionBlock",),
    ),
)

# Mixtures of mlx-lm's models, by what their calls do.
_MIXTURES: tuple[tuple[Attempt, str, tuple[str, ...], tuple[str, ...]], ...] = (
    (routers.qwen3_mixture, "2a9a20a86d90a438", ("qwen3_moe.Qwen3MoeSparseMoeBlock",), ("self", "x")),
    (routers.qwen3_next_mixture, "0313c3d16a342105", ("qwen3_next.Qwen3NextSparseMoeBlock",), ("self", "x")),
    (routers.qwen2_mixture, "54e4f78f3734e168", ("qwen2_moe.Qwen2MoeSparseMoeBlock",), ("self", "x")),
    (routers.mixtral_mixture, "5cfd70c78b6a5528", ("mixtral.MixtralSparseMoeBlock",), ("self", "x")),
    (routers.olmoe_mixture, "b53932468e28e424", ("olmoe.OlmoeSparseMoeBlock",), ("self", "x")),
    (routers.gpt_oss_mixture, "5ead727eea53c6b9", ("gpt_oss.MLPBlock",), ("self", "x")),
    (routers.ernie_mixture, "b5c501d168204ec2", ("ernie4_5_moe.Ernie4_5_MoeMLP",), ("self", "x")),
    (routers.mellum_mixture, "320d35b3ff5b8a32", ("mellum.MellumSparseMoeBlock",), ("self", "x")),
    (routers.deepseek_gate, "b4c556f956e97230", ("deepseek.MoEGate",), ("self", "x")),
    (routers.deepseek_v2_gate, "f5c49a1d2678de7c", ("deepseek_v2.MoEGate",), ("self", "x")),
    (routers.deepseek_v2_mixture, "61457ba0a6bdd2e2", ("deepseek_v2.DeepseekV2MoE",), ("self", "x")),
    (
        routers.deepseek_v3_gate,
        "51d7e60aa00e0751",
        (
            *("deepseek_v3.MoEGate", "deepseek_v32.MoEGate", "dots1.Dots1TopkRouter", "exaone_moe.MoEGate"),
            *("glm4_moe.MoEGate", "glm4_moe_lite.MoEGate", "mimo_v2_flash.MoEGate"),
        ),
        ("self", "x"),
    ),
    (
        routers.deepseek_v3_mixture,
        "7dfae2f18c3a8b38",
        (
            *("deepseek_v3.DeepseekV3MoE", "deepseek_v32.DeepseekV32MoE", "glm4_moe.MoE"),
            "glm4_moe_lite.Glm4MoeLiteMoE",
        ),
        ("self", "x"),
    ),
    *(
        (routers.deepseek_v3_mixture, text, (name,), ("self", "x"))
        for text, name in (
            ("0aad2327addca86d", "dots1.Dots1MoE"),
            ("b6a2c566ef6080ac", "exaone_moe.MoE"),
            ("9c836a4a963ae066", "mimo_v2_flash.MoE"),
        )
    ),
    (routers.mistral4_mixture, "f1a994175c8705cd", ("mistral4.Mistral4MoE",), ("self", "x")),
    (
        routers.longcat_gate,
        "d607c77fa111e1a9",
        ("longcat_flash.LongcatFlashTopkRouter",),
        ("self", "hidden_states"),
    ),
    (
        routers.longcat_mixture,
        "0e7997ba34edcee8",
        ("longcat_flash.LongcatFlashMoE",),
        ("self", "hidden_states"),
    ),
    (routers.kimi_mixture, "b153316c706de4c2", ("kimi_linear.KimiSparseMoE",), ("self", "x")),
    (routers.kimi_k3_mixture, "a6949ed9b98a3189", ("kimi_k3.KimiK3SparseMoE",), ("self", "x")),
    (routers.minimax_m3_mixture, "60e4dd62573daafe", ("minimax_m3_vl.SparseMoeBlock",), ("self", "x")),
    (
        routers.granite_gate,
        "3fc5b5c918b88f8f",
        ("granitemoe.GraniteMoeTopKGating",),
        ("self", "hidden_states"),
    ),
    (
        routers.granite_hybrid_gate,
        "e593c4112bc047e7",
        ("granitemoehybrid.GraniteMoeHybridTopKGating",),
        ("self", "hidden_states"),
    ),
)

TARGETS += [
    Target(
        "router",
        "route_top_k",
        f"mlx_lm.models.{mixture.partition('.')[0]}",
        f"{mixture.partition('.')[2]}.__call__",
        attempt,
        parameters,
        optional=True,
        partial=True,  # not groups of experts, and no sharded layers
        text=text,
    )
    for attempt, text, mixtures, parameters in _MIXTURES
    for mixture in mixtures
]


def mixture_of(base: type) -> Attempt | None:
    """What computes the call of a class of mixtures or routers, where it is one that is known."""
    text = digest(plain(base.__call__))
    return next((attempt for attempt, known, _, _ in _MIXTURES if text == known), None)


# Norms of mlx-lm's models whose scale is 1 + weight, by what their calls do.
_OFFSET_NORMS = (
    ("2d57c26ef3b93b3f", ("gemma.RMSNorm", "gemma2.RMSNorm", "gemma3_text.RMSNorm", "recurrent_gemma.RMSNorm")),
    ("2d57c26ef3b93b3f", ("muse_glimmer.CenteredRMSNorm",)),
    ("f76fa6adf0a299f2", ("minimax_m3_vl.GemmaRMSNorm",)),
)

TARGETS += [
    Target(
        "rms_norm",
        "rms_norm",
        f"mlx_lm.models.{norm.partition('.')[0]}",
        f"{norm.partition('.')[2]}.__call__",
        _ext.try_offset_rms_norm_layer,
        ("self", "x"),
        optional=True,
        partial=True,  # what it leaves is mx.fast.rms_norm's
        text=text,
    )
    for text, norms in _OFFSET_NORMS
    for norm in norms
]

_OFFSET_NORM = _OFFSET_NORMS[0][0]
CLIP_RESIDUAL = "2faf093f497711a9"  # the digest of mlx-lm's gemma3_text.clip_residual

TARGETS += [
    Target(
        "rms_norm",
        "rms_norm",
        "mlx_lm.models.gemma3_text",
        "TransformerBlock.__call__",
        _gemma3_block,
        ("self", "x", "mask", "cache"),
        optional=True,
        partial=True,  # not where norms or the sum are others
        text="b4f558b84aa97783",
    ),
    Target(
        "softcap",
        "softcap",
        "mlx_lm.models.gemma2",
        "Model.__call__",
        _gemma2_logits,
        ("self", "inputs", "cache"),
        optional=True,
        text="e7841159ea6a3916",
    ),
]

TARGETS += [
    Target(
        "attention_layer",
        "attention_layer",
        f"mlx_lm.models.{layer.partition('.')[0]}",
        f"{layer.partition('.')[2]}.__call__",
        attempt,
        ("self", "x", "mask", "cache"),
        optional=True,
        partial=True,  # one token with a plain cache
        text=text,
        needs=needs,
    )
    for attempt, needs, text, layers in _LAYERS
    for layer in layers
]

TARGETS += [
    Target(
        "attention_layer",
        "attention_layer",
        "mlx_lm.models.gemma3n",
        "Gemma3nDecoderLayer.__call__",
        altup_layers.gemma3n_layer,
        ("self", "x", "mask", "cache", "per_layer_input", "offset"),
        optional=True,
        partial=True,  # one token with a cache
        text="acef24d9337512ef",
        needs=("cache", "scaled_dot_product_attention"),
    )
]


def unknown() -> list[str]:
    """Parts of the installed mlx-lm whose code is not known here: mlx-lm's own then runs.

    It imports the modules that have such a function. A model that this mlx-lm does not have is left out.
    """
    if importlib.util.find_spec("mlx_lm") is None:
        return []
    there = (target for target in TARGETS if target.text and importlib.util.find_spec(target.module))
    return [target.name for target in there if not target.is_known()]
