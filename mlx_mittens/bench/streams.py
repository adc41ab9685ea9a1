"""Streams that keep runs of one model apart.

`mx.compile` keeps its traces for each stream and shape. Of two runs on one stream the second would use the graphs
of the first, with the kernels that these hold, wherever a model's functions are compiled.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import mlx.core as mx


def new_stream() -> mx.Stream:
    """A new stream on the default device."""
    return mx.new_stream(mx.default_device())


@contextlib.contextmanager
def on_stream(stream: mx.Stream) -> Iterator[dict[str, Any]]:
    """Runs the block on a stream.

    Yields:
        dict: Options by which mlx-lm's loop runs there, too; none before mlx-lm 0.32, which has a global.
    """
    loop: Any = importlib.import_module("mlx_lm.generate")  # the package has a function of this name
    with mx.stream(stream):
        if "stream" in inspect.signature(loop.generate_step).parameters:
            yield {"stream": stream}
            return
        before, loop.generation_stream = loop.generation_stream, stream
        try:
            yield {}
        finally:
            loop.generation_stream = before
