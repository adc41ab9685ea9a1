"""Helpers that the tests of MLX's own kernels share: their launches, and how near results are."""

from __future__ import annotations

import numpy as np

from helpers.tolerances import PEER
from helpers.variants import record
from mlx_mittens import specs


def recorded(call, gpu="m5", dry=False, **options):
    """The result, and each launch's kernel, threadgroups and threads."""
    result, runs = record(call, gpu, dry, **options)
    return result, [(run["kernel"], run["threadgroups"], run["threads"]) for run in runs]


def assert_near(found, exact, times=1):
    a = specs.widen(found)
    assert a.shape == exact.shape
    assert np.abs(a - exact).max() <= times * PEER[found.dtype] * np.abs(exact).max()
