"""Our ops in the place of mx's own: one line, and a model that knows nothing of this package runs on them."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast

from .. import _ext, exporting
from ..switches import disabled
from .target import Target, executed, importing
from .targets import TARGETS

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["patch", "patched", "unpatch"]


class Switches(TypedDict, total=False):
    """The switches of ``patch()``, for type checkers and editors."""

    rms_norm: bool
    scaled_dot_product_attention: bool
    layer_norm: bool
    softmax: bool
    quantized_matmul: bool
    quantized_scaled_dot_product_attention: bool
    recurrence: bool
    softcap: bool
    sample: bool
    experts: bool
    router: bool
    cache: bool
    swiglu: bool
    attention_layer: bool
    linear: bool


@dataclass(frozen=True)
class _Settings:
    switches: frozenset[str]
    strict: bool
    exact: bool
    int8: bool


class _Patch:
    """One target that is replaced. Once removed it only calls the original: someone may still hold the wrapper."""

    def __init__(self, target: Target):
        self._target = target
        self._owner, self._name = target.owner()
        self._original = getattr(self._owner, self._name)
        self._wrapper = _ext.FunctionWrapper(target.op, self._original)
        functools.update_wrapper(self._wrapper, self._original)

    def install(self, strict: bool) -> None:
        self.configure(strict)
        self._wrapper.attempt = self._target.attempt
        self._replace(self._original, self._wrapper)

    def remove(self) -> None:
        self.configure(strict=False)
        self._wrapper.attempt = None
        if getattr(self._owner, self._name) is self._wrapper:  # else another's patch lies on ours: it stays
            self._replace(self._wrapper, self._original)

    def _replace(self, before: Any, after: Any) -> None:
        for holder in [self._owner, *self._target.importers(before)]:
            setattr(holder, self._name, after)

    def configure(self, strict: bool) -> None:
        self._wrapper.strict = strict and not self._target.partial


class _OnImport:
    """Patches the targets of a package when it is imported: importing mlx-lm for them alone would take seconds."""

    def find_spec(self, name: str, path: Any, before: Any = None) -> Any:
        if all(target.module != name for target in TARGETS):
            return None
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(name, path, before)):
                loader: Any = _Loader(spec.loader)
                spec.loader = loader
                return spec
        return None


class _Loader:
    def __init__(self, loader: Any):
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__loader__ = module.__spec__.loader = self._loader
        importing.add(module.__name__)  # it may import others that have targets
        try:
            self._loader.exec_module(module)
            executed.add(module.__name__)
        finally:
            importing.discard(module.__name__)
        with _lock:
            _apply()


_lock = threading.RLock()
_base: _Settings | None = None  # of patch()
_blocks: list[tuple[object, _Settings]] = []  # of the patched() blocks that are open, each with a token of its own
_installed: dict[str, _Patch] = {}  # by the target's name
_on_import = _OnImport()


def _settings(strict: bool, exact: bool, activations: str | None, switches: dict[str, bool]) -> _Settings:
    known = list(dict.fromkeys(target.switch for target in TARGETS))
    for name in switches:
        if name not in known:
            others = "strict, exact or activations"
            raise TypeError(f"[patch] no switch named {name!r}: expected {', '.join(known)}, {others}")
    if activations not in (None, "int8"):
        raise ValueError(f"[patch] activations is {activations!r}: expected 'int8' or None")
    if activations:
        _ext.check_int8_activations("patch")
    off = disabled()
    wanted = frozenset(name for name in known if switches.get(name, True) and name not in off)
    return _Settings(wanted, bool(strict), bool(exact), activations is not None)


def _apply() -> None:
    """Installs the targets that the settings ask for and removes others; where a target has moved, nothing changes."""
    settings = _blocks[-1][1] if _blocks else _base
    strict = settings is not None and settings.strict
    wanted = [target for target in TARGETS if settings and target.is_wanted(settings.switches)]
    loaded = [target for target in wanted if target.is_loaded()]
    ready = {target.name: target for target in loaded if target.is_known()}
    new = [_Patch(target) for name, target in ready.items() if name not in _installed]
    for name in [name for name in _installed if name not in ready]:
        _installed.pop(name).remove()
    for patch in _installed.values():
        patch.configure(strict)
    for patch, name in zip(new, [name for name in ready if name not in _installed], strict=True):
        patch.install(strict)
        _installed[name] = patch
    if settings:
        exporting.mark("patch")
    else:
        exporting.unmark("patch")
    _ext.set_strict_patch(strict)
    _ext.set_numerics(settings is not None and settings.exact, settings is not None and settings.int8)
    waiting = len(loaded) < len(wanted)
    if waiting and _on_import not in sys.meta_path:
        sys.meta_path.insert(0, _on_import)
    elif not waiting and _on_import in sys.meta_path:
        sys.meta_path.remove(_on_import)


def patch(
    *,
    strict: bool = False,
    exact: bool = False,
    activations: Literal["int8"] | None = None,
    **switches: Unpack[Switches],
) -> None:
    """Puts the ops in the place of mx's own, for the whole process and until ``unpatch()``.

    A call that no kernel covers goes on to the original function, with its own arguments; ``stats()`` counts both.
    Results are lazy, as before, and gradients, ``mx.compile`` and ``mx.vmap`` work through them. A second call only
    changes the settings. Functions that someone imported by name before (``from mlx.core import softmax``) are out of
    reach, and so are graphs that ``mx.compile`` has traced before. A function that ``mx.export_function`` or
    ``mx.exporter`` traces, which are replaced for that as well, runs on mx's own: MLX cannot save other primitives.

    Args:
        strict (bool): Whether a call that no kernel covers is an error instead.
        exact (bool): Whether a token among several gets, bit for bit, its result alone, also by ``mm.nn`` and by
            direct calls: all attention (see ``mlx_mittens.scaled_dot_product_attention``), layers that keep a state,
            and products with transposed weights, GGUF blocks and chosen experts, of up to 32 rows on a CPU and 16 on
            a GPU. For speculative decoding, where the verification of several tokens is compared with decoding one by
            one.
        activations (str, optional): ``"int8"`` lets products with quantized weights round their input, also by
            ``mm.nn`` and by direct calls (see ``mlx_mittens.quantized_matmul``): on a CPU, where prompts take about
            half the time, and on the matrix units of an M5, with weights of 4 bits.
        switches (bool): Which to replace; all by default. ``rms_norm``, ``layer_norm`` and
            ``scaled_dot_product_attention`` of ``mx.fast``, ``softmax`` and ``quantized_matmul`` of ``mx``,
            the latter for ``mlx.nn.QuantizedLinear`` and ``mlx.nn.QuantizedEmbedding`` too, ``linear`` for
            ``mlx.nn.Linear`` and ``mlx.nn.Embedding.as_linear``, and of mlx-lm, as soon as it is imported,
            ``quantized_scaled_dot_product_attention``, ``recurrence`` for the steps of linear recurrences (and for
            ``mx.fast.gated_delta_update``), ``softcap`` for the logits of Gemma 2, ``sample`` for its samplers and
            penalties, ``experts`` (with ``gather_qmm`` and ``gather_mm`` of ``mx``) and ``router`` for its mixtures,
            ``cache`` for appending to ``KVCache`` and ``RotatingKVCache``, together with ``mx.fast.rope`` before it,
            ``swiglu`` for the activation and product of two quantized layers, which become one with them, and
            ``attention_layer`` for the attention of Llama, Qwen and their like, which with a plain cache does a token's
            rotary embedding, append and attention in one step, where ``cache`` and
            ``scaled_dot_product_attention`` are on.

    Raises:
        TypeError: There is no such switch.
        ValueError: ``activations`` is not a known one, or ``"int8"`` and the default device is a GPU without matrix
            units.
        mlx_mittens.PatchError: A function to replace is not where it was; nothing is replaced then.

    Example:
        >>> mm.patch(softmax=False)  # all but softmax
        >>> mm.unpatch()
    """
    global _base
    settings = _settings(strict, exact, activations, cast("dict[str, bool]", switches))
    with _lock:
        before, _base = _base, settings
        try:
            _apply()
        except BaseException:
            _base = before
            raise


def unpatch() -> None:
    """Undoes ``patch()``: restores mx's functions. Blocks of ``patched()`` that are open stay so.

    A graph that ``mx.compile`` traced under the patch holds our kernels, and stays on them until it is traced anew: for
    inputs of another shape or type, or once the function is compiled again.

    Example:
        >>> mm.patch()
        >>> mm.unpatch()
    """
    global _base
    with _lock:
        _base = None
        _apply()


@contextlib.contextmanager
def patched(
    *,
    strict: bool = False,
    exact: bool = False,
    activations: Literal["int8"] | None = None,
    **switches: Unpack[Switches],
) -> Iterator[None]:
    """``patch()`` for the length of a block.

    The functions are the process's, so other threads see them replaced too. Blocks may nest and overlap in several
    threads: the one entered last counts, and all is as before once the last is left.

    Args:
        strict (bool): As in ``patch()``.
        exact (bool): As in ``patch()``.
        activations (str, optional): As in ``patch()``.
        switches (bool): As in ``patch()``.

    Raises:
        TypeError: There is no such switch.
        ValueError: ``activations`` is not a known one, or ``"int8"`` and the default device is a GPU without matrix
            units.
        mlx_mittens.PatchError: A function to replace is not where it was; nothing is replaced then.

    Example:
        >>> with mm.patched(strict=True):
        ...     y = mx.fast.rms_norm(mx.ones((2, 8)), mx.ones((8,)), 1e-5)  # runs our kernel
    """
    block = (object(), _settings(strict, exact, activations, cast("dict[str, bool]", switches)))
    with _lock:
        _blocks.append(block)
        try:
            _apply()
        except BaseException:
            _blocks.remove(block)
            raise
    try:
        yield
    finally:
        with _lock:
            _blocks.remove(block)
            _apply()
