"""Where kernels run on this machine, and whether ops may fall back to mx."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import mlx.core as mx

from . import _ext, frontend


def executors() -> dict[str, str]:
    """The ways kernels can run here: name to ``"ready"``, or to the reason why not.

    Example:
        >>> sorted(mm.executors())
        ['cuda', 'metal', 'native', 'simulator']
    """
    if not _ext.metal_built:
        metal = "not on this platform: macOS 14 or later on Apple silicon"
    else:
        metal = "ready" if mx.metal.is_available() else "no Metal device"
    compiler = frontend.compiler_problem()
    cuda = _ext.cuda_missing() or ("" if frontend.has_prebuilt_ptx() else compiler)
    return {
        "metal": metal,
        "cuda": cuda or "ready",
        "simulator": compiler or "ready",
        "native": f"ready: {_ext.cpu_instructions}, {_ext.cpu_threads()} threads",
    }


@contextlib.contextmanager
def strict(enabled: bool = True) -> Iterator[None]:
    """Makes an op that would go on to mx raise instead, so that no measurement times mx against itself.

    The environment variable ``MLX_MITTENS_STRICT=1`` does the same for a whole process.

    Example:
        >>> with mm.strict():
        ...     y = mm.softmax(mx.ones((2, 8)), axis=-1)
    """
    before = _ext.strict()
    _ext.set_strict(enabled)
    try:
        yield
    finally:
        _ext.set_strict(before)
