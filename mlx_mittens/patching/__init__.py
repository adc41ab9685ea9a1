"""Our ops in the place of mx's and mlx-lm's functions. `mlx_mittens.patch` is the function."""

from .. import ops as _ops  # noqa: F401 - loads this machine's calibrations
from .patches import patch, patched, unpatch
from .target import PatchError

__all__ = ["PatchError", "patch", "patched", "unpatch"]
