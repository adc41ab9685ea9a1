"""What the steps of the ladder share: the tile library's text, and where kernels run on this machine."""

import contextlib
from pathlib import Path

import mlx.core as mx

import mlx_mittens as mm

# Goes before a kernel's body: the library's headers as one text, which Metal's run-time compiler takes.
WHOLE_TILES = Path(__file__).with_name("tiles.h").read_text()
TILES = mm.frontend.flatten("mittens/tile.h") + WHOLE_TILES + "\nusing namespace mittens;\n"


def anywhere():
    """The GPU on a Mac; elsewhere the simulator, which checks every access."""
    return contextlib.nullcontext() if mx.metal.is_available() else mm.simulator.enabled(seed=1)


def show(name: str, y: mx.array, exact: mx.array) -> None:
    error = mx.abs(y.astype(mx.float32) - exact.astype(mx.float32)).max().item()
    print(f"{name}: {tuple(y.shape)}, largest error {error:.1e}")
