"""Calls of MLX's kernels that predictions simulate: whole, or some tiles of a large product."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from ..apple.model import LINE_BYTES, Work

# Multiplications of a product that is simulated whole: some ten seconds.
MOST_SIMULATED = 2**27
# Where the work of such a launch comes from.
SOURCE = "from one of its tiles"


@dataclass(frozen=True)
class Tiles:
    """How the work of a product follows from the simulated tiles.

    Attributes:
        times: All tiles of the product, divided by the simulated ones.
        nbytes: Bytes that each launch of the product reads and writes.
    """

    times: float
    nbytes: tuple[float, ...]

    def whole(self, works: Sequence[Work]) -> list[Work]:
        """The work of the product's launches from that of the simulated ones.

        Raises:
            ValueError: There are more launches or fewer.
        """
        return [
            replace(
                work,
                threadgroups=work.threadgroups * self.times,
                lines=nbytes / LINE_BYTES,
                summed_lines=work.summed_lines * self.times,
                instructions=work.instructions * self.times,
            )
            for work, nbytes in zip(works, self.nbytes, strict=True)
        ]


@dataclass(frozen=True)
class Call:
    """A call of MLX's kernels on drawn inputs.

    Attributes:
        make: Makes the inputs and gives the outputs, still to be computed.
        tiles: How the work of the product follows, if the call computes some of its tiles; else None.
    """

    make: Callable[[], mx.array]
    tiles: Tiles | None = None
