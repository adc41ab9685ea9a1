"""MLX_MITTENS_DISABLE: ops that mx is to compute, and functions that the patch is to leave alone."""

from __future__ import annotations

import os
from collections.abc import Iterable

from . import _ext
from .nearest import suggestion

VARIABLE = "MLX_MITTENS_DISABLE"

# Ops that mx has nothing for.
WITHOUT_TWIN = ("block_quantize", "block_dequantize")

_off: tuple[str, ...] = ()


def disabled() -> tuple[str, ...]:
    """Ops and switches of `patch()` that are off in this process."""
    return _off


def disable(off: Iterable[str]) -> None:
    """Switches off the named ops, and no others. A function that is patched stays so until `patch()` is called."""
    global _off
    _off = tuple(dict.fromkeys(off))
    _ext.switch_off(list(_off))


def check(known: Iterable[str]) -> None:
    """Raises ValueError where something is switched off that there is not."""
    known = list(dict.fromkeys(name for name in known if name not in WITHOUT_TWIN))
    for name in _off:
        if name not in known:
            raise ValueError(
                f"[mlx_mittens] {VARIABLE} names {name!r}{suggestion(name, known)}: expected, with commas between "
                f"them, {', '.join(known)}"
            )


disable(word.strip() for word in os.environ.get(VARIABLE, "").split(",") if word.strip())
