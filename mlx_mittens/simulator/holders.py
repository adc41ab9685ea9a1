"""Replaces an object wherever anything in the process holds it."""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any


def replace(olds: list[Any], new_of: Callable[[Any], Any], keep: tuple[Any, ...] = ()) -> None:
    """Puts new objects in the place of old ones, in whatever the garbage collector knows to hold them.

    Namespaces of modules and classes, attributes, slots, closures, lists, dictionaries, tuples and
    ``functools.partial`` are reached. Local variables of functions that run are not, nor are sets.

    Args:
        olds: The old objects.
        new_of: Makes the new object of an old one, whose content it does not read.
        keep: Holders that are left as they are.
    """
    arguments = tuple(olds)  # Python 3.14 finds the tuple of a call's arguments among the holders
    left_alone = {id(olds), id(arguments), *map(id, keep)}
    holders = gc.get_referrers(*arguments)
    pairs = {id(old): (old, new_of(old)) for old in olds}
    for holder in holders:
        if id(holder) not in left_alone and not isinstance(holder, types.FrameType):
            _replace_in(holder, pairs)


def _replace_in(holder: Any, pairs: Mapping[int, tuple[Any, Any]]) -> None:
    def now(value: Any) -> Any:
        old, new = pairs.get(id(value), (None, None))
        return new if old is value and value is not None else value

    if isinstance(holder, dict):
        _replace_in_dict(holder, now)
    elif isinstance(holder, list):
        holder[:] = map(now, holder)
    elif isinstance(holder, types.CellType):
        holder.cell_contents = now(holder.cell_contents)
    elif isinstance(holder, functools.partial):
        keywords = {name: now(value) for name, value in holder.keywords.items()}
        attributes = holder.__dict__ or None
        positional = tuple(map(now, now(holder.args)))
        holder.__setstate__((now(holder.func), positional, keywords, attributes))  # type: ignore[attr-defined]
    elif type(holder) is tuple:
        _replace_tuple(holder, tuple(map(now, holder)))
    else:
        for name in _attributes(holder):
            value = getattr(holder, name, None)
            if now(value) is not value:
                object.__setattr__(holder, name, now(value))


def _replace_in_dict(holder: dict[Any, Any], now: Any) -> None:
    changed = {key: now(value) for key, value in list(holder.items()) if now(value) is not value}
    owners = [owner for owner in gc.get_referrers(holder) if isinstance(owner, type)] if changed else []
    for key, value in changed.items():
        for owner in owners:  # a class caches attributes found in its dictionary
            setattr(owner, key, value)
        holder[key] = value


def _replace_tuple(old: tuple[Any, ...], new: tuple[Any, ...]) -> None:
    for holder in gc.get_referrers(old):
        if isinstance(holder, types.FunctionType) and holder.__defaults__ is old:
            holder.__defaults__ = new
    replace([old], lambda _: new)


def _attributes(holder: Any) -> Iterator[str]:
    """Names of an object's own attributes, with or without a dictionary."""
    yield from list(getattr(holder, "__dict__", ()))
    for kind in type(holder).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        yield from (slots,) if isinstance(slots, str) else slots
