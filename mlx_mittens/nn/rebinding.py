"""Calls of a model's modules on our ops, found by names in their code: `convert` knows the layers that the patch knows.

The patch puts our functions in the place of mx's and mlx-lm's for everybody. Here a module gets a subclass of its own
class, whose functions are the same code, but find ours under these names. A cache is mlx-lm's own; a call that appends
to one is handed it behind an object that appends by our kernels.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from .. import _ext
from ..patching import altup_layers, attention_layers, hyper_connections
from ..patching.digests import plain
from ..patching.model_attention import attend
from ..patching.target import Target
from ..patching.targets import TARGETS
from .modules import Linear, QuantizedLinear

__all__ = ["class_before", "is_appended_to", "rebind", "update_and_fetch", "wrappers"]

_MODELS = "mlx_lm."
# Calls of classes that come from the patch as they are; others have modules or fusions of their own in `nn`.
_CALLS = {"cache", "softcap", "linear"}
# Calls that stand before a class's own, which finds our functions where they leave it to that.
_LAYERS = {"recurrence"}
_OF_STREAMS = (hyper_connections.clamped_swiglu, hyper_connections.hyper_connection)
# Attention layers that stand before a class's own call likewise: there is no fusion of theirs in `nn`.
_ATTENTIONS = (
    altup_layers.gemma3n_layer,
    attention_layers.expanded_latent_attention,
    attention_layers.kimi_k3_attention,
    attention_layers.kimi_latent_attention,
    attention_layers.latent_attention,
    attention_layers.longcat_attention,
    attention_layers.minimax_m3_attention,
    attention_layers.sparse_latent_attention,
)


@functools.cache
def _wrapper(target: Target) -> Any:
    """Ours in the place of a target's function, which stays where it is."""
    owner, leaf = target.owner()
    return _before(plain(getattr(owner, leaf)), target)


def _before(original: Any, target: Target) -> Any:
    """A function that asks a target's attempt first."""
    ours = _ext.FunctionWrapper(target.op, original)
    functools.update_wrapper(ours, original)
    ours.attempt = target.attempt
    return ours


def _ready(is_of_class: bool) -> Iterator[tuple[Target, Any, str]]:
    """The targets that are methods, or functions, with their owners."""
    for target in TARGETS:
        if target.module.startswith("mlx.") or target.module in sys.modules:
            if target.is_known():
                owner, leaf = target.owner()
                if isinstance(owner, type) == is_of_class:
                    yield target, owner, leaf


def wrappers(op: str) -> list[Any]:
    """Functions that converted models call in the place of an op's, in any model."""
    ready = [each for is_of_class in (False, True) for each in _ready(is_of_class)]
    return [_wrapper(target) for target, _, _ in ready if target.op == op]


class _Names(types.ModuleType):
    """A module of mx's with some functions of ours."""

    def __init__(self, module: Any, ours: dict[str, Any]):
        super().__init__(module.__name__)
        self.__dict__.update({**vars(module), **ours})


def _names_of_mx() -> tuple[_Names, set[str]]:
    """mx with ours in it, and the names of these."""
    of_mx: dict[str, Any] = {}
    of_fast: dict[str, Any] = {}
    for target, owner, leaf in _ready(is_of_class=False):
        if owner is mx or owner is mx.fast:
            (of_mx if owner is mx else of_fast)[leaf] = _wrapper(target)
    return _Names(mx, {**of_mx, "fast": _Names(mx.fast, of_fast)}), {*of_mx, *of_fast}


class _Rebinding:
    """Replacements of mlx-lm's functions, each made once."""

    def __init__(self) -> None:
        self.mx, self.mx_names = _names_of_mx()
        self.ours: dict[int, Any] = {}  # by the id of the replaced function, which modules keep alive
        for target, owner, leaf in _ready(is_of_class=False):
            if owner is not mx and owner is not mx.fast:
                self.ours[id(plain(getattr(owner, leaf)))] = _wrapper(target)
        base = sys.modules.get("mlx_lm.models.base")
        if base is not None:
            self.ours[id(plain(base.scaled_dot_product_attention))] = attend
        self.calls = {
            owner: _wrapper(target)
            for target, owner, leaf in _ready(is_of_class=True)
            if leaf == "__call__" and target.switch in _CALLS
        }
        self.layers = {
            owner: target
            for target, owner, leaf in _ready(is_of_class=True)
            if leaf == "__call__" and (target.switch in _LAYERS or target.attempt in _OF_STREAMS)
        }
        self.attentions = {
            owner: target for target, owner, _ in _ready(is_of_class=True) if target.attempt in _ATTENTIONS
        }
        self.functions: dict[types.FunctionType, types.FunctionType] = {}

    def function(self, function: types.FunctionType) -> types.FunctionType:
        """A function of mlx-lm's that finds ours; the same one where it names none."""
        if function not in self.functions:
            self.functions[function] = function  # ends the recursion: a function that calls itself calls the original
            self.functions[function] = self._rebound(function)
        return self.functions[function]

    def _rebound(self, function: types.FunctionType) -> types.FunctionType:
        named = _names_in(function.__code__)
        replaced = {}
        for name in named & function.__globals__.keys():
            value = function.__globals__[name]
            ours = self._stand_in(value, named)
            if ours is not value:
                replaced[name] = ours
        return _with_names(function, replaced) if replaced else function

    def _stand_in(self, value: Any, named: set[str]) -> Any:
        if value is mx:
            return self.mx if named & self.mx_names else mx
        original = plain(value)
        if id(original) in self.ours:
            return self.ours[id(original)]
        if isinstance(original, types.FunctionType) and _is_of_models(original):
            rebound = self.function(original)
            return value if rebound is original else rebound
        return value


def _is_of_models(function: types.FunctionType) -> bool:
    return str(function.__globals__.get("__name__")).startswith(_MODELS)


def _names_in(code: types.CodeType) -> set[str]:
    """The names of a function's code and of the functions defined in it."""
    inner = (value for value in code.co_consts if isinstance(value, types.CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def _with_names(function: types.FunctionType, names: dict[str, Any]) -> types.FunctionType:
    """The same code, which finds other things under some names."""
    made = types.FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__,
        function.__closure__,
    )  # fmt: skip
    made.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(made, function)
    del made.__wrapped__  # type: ignore[attr-defined]  # it does no more than its source says
    return made


class _Appending:
    """A cache of mlx-lm's as a call sees it that appends to it."""

    __slots__ = ("_mittens_cache",)

    def __init__(self, cache: Any):
        object.__setattr__(self, "_mittens_cache", cache)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mittens_cache, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._mittens_cache, name, value)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        return update_and_fetch(self._mittens_cache, keys, values)


def _base_of(twin: type) -> type:
    """The class of mlx.nn that one of ours is of."""
    return next(c for c in twin.__mro__ if c.__module__.startswith("mlx.nn."))


@functools.cache
def _appends() -> dict[type, Callable[..., Any]]:
    """Our appends by mlx-lm's class of cache, for the classes known here."""
    return {owner: target.attempt for target, owner, leaf in _ready(is_of_class=True) if leaf == "update_and_fetch"}


def is_appended_to(cache: Any) -> bool:
    """Whether our kernels append to a cache, with the rotary embedding of keys in them."""
    return type(cache) in _appends()


def update_and_fetch(cache: Any, keys: mx.array, values: mx.array) -> Any:
    """The keys and values of a cache with new ones, appended by our kernels where these can."""
    attempt = None if _ext.exporting() else _appends().get(type(cache))
    seen = None if attempt is None else attempt(cache, keys, values)
    return cache.update_and_fetch(keys, values) if seen is None else seen


def _seen(cache: Any) -> Any:
    """A cache, a layer's caches or a model's caches, as an appending call sees them."""
    if type(cache) in (list, tuple):
        return type(cache)(map(_seen, cache))
    if type(cache).__module__ == "mlx_lm.models.cache" and type(cache).__name__ == "CacheList":
        return tuple(map(_seen, cache.caches))
    return _Appending(cache) if is_appended_to(cache) else cache


def _appending(call: types.FunctionType, target: Target | None = None) -> Callable[..., Any]:
    """A call whose cache appends by our kernels; a target's attempt is asked first."""
    ours = call if target is None else _before(call, target)
    place = list(inspect.signature(call).parameters).index("cache") - 1

    def appending(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) > place:
            args = (*args[:place], _seen(args[place]), *args[place + 1 :])
        elif "cache" in kwargs:
            kwargs["cache"] = _seen(kwargs["cache"])
        return ours(self, *args, **kwargs)

    functools.update_wrapper(appending, call)
    appending.rebound = call  # type: ignore[attr-defined]  # readers of a module's call read this one
    appending.computes_the_same = True  # type: ignore[attr-defined]
    return appending


def _appends_in(call: Any) -> bool:
    """Whether a call appends to the cache that it is given, and asks for nothing that tells caches apart."""
    names = _names_in(call.__code__)
    return "cache" in inspect.signature(call).parameters and "update_and_fetch" in names and "isinstance" not in names


def _rebound_class(base: type, rebinding: _Rebinding) -> type | None:
    methods: dict[str, Any] = {}
    for name, function in inspect.getmembers(base, inspect.isfunction):
        if _is_of_models(function) and (name == "__call__" or not name.startswith("__")):
            rebound = rebinding.function(function)
            if rebound is not function:
                methods[name] = rebound
    call = methods.get("__call__", plain(base.__call__))
    if base in rebinding.calls:
        methods["__call__"] = rebinding.calls[base]
    elif base in rebinding.layers:
        methods["__call__"] = _before(call, rebinding.layers[base])
    elif base in rebinding.attentions or (
        isinstance(call, types.FunctionType) and _is_of_models(call) and _appends_in(call)
    ):
        methods["__call__"] = _appending(call, rebinding.attentions.get(base))
    # Attributes that such a class takes from its base are ours too.
    twins = [twin for twin in (Linear, QuantizedLinear) if issubclass(base, _base_of(twin))]
    if not methods and not twins:
        return None
    return type(base.__name__, (base, *twins), {**methods, "__module__": base.__module__, "_rebound_of": base})


_classes: dict[type, type | None] = {}  # replacements of classes


def class_before(module: Any) -> type:
    """The class that a module had before it was rebound, or has."""
    return next((c.__dict__["_rebound_of"] for c in type(module).__mro__ if "_rebound_of" in c.__dict__), type(module))


def rebind(modules: list[nn.Module]) -> None:
    """Gives modules of mlx-lm's classes, and their rotary embeddings, calls that find our functions."""
    if "mlx_lm" not in sys.modules:
        return
    rebinding = _Rebinding()
    for module in modules:
        base = type(module)
        is_ours = base.__module__.startswith("mlx_mittens.") or class_before(module) is not base
        if not is_ours and (base.__module__.startswith(_MODELS) or base in rebinding.calls):
            if base not in _classes:
                _classes[base] = _rebound_class(base, rebinding)
            module.__class__ = _classes[base] or base
