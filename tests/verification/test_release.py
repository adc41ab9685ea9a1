"""Differences between releases of mlx: the quick tests run beside several, not only the installed one."""

import dataclasses
import importlib.metadata

import mlx.core as mx
import numpy as np
import pytest
from helpers.tolerances import SUMS

import mlx_mittens as mm
from mlx_mittens import _ext, specs

pytestmark = pytest.mark.quick

RELEASE = [int(part) for part in importlib.metadata.version("mlx").split(".")[:3]]


def test_the_extension_is_for_this_release():
    assert _ext.mlx_version == importlib.metadata.version("mlx")
    assert _ext.mlx_internals_problem() == "", "what rests on private parts is known for each release"


def test_a_gated_delta_without_a_kernel_is_computed(rng, lenient):
    """By mx's function, or by its operations where this release has none."""
    assert hasattr(mx.fast, "gated_delta_update") == (RELEASE >= [0, 32, 3])
    op = next(op for op in specs.OPS if op.name == "gated_delta_update")
    case = dataclasses.replace(op.tests[0], shape=(1, 1, 1, 2, 3, 2056))  # more columns than a kernel takes
    arrays = op.draw(rng, case, mx.float32)
    with mm.simulator.enabled():
        mm.stats(reset=True)
        ours = op.ours(*arrays, **op.arguments(case))
        assert mm.stats()["gated_delta_update"]["mx"], "no kernel covers the call"
    for a, exact in zip(ours, op.exact(case, arrays), strict=True):
        assert np.allclose(np.array(a), exact.value, rtol=SUMS, atol=SUMS * np.abs(exact.value).max())


def test_a_fused_attention_without_a_kernel_is_fused_or_refused(rng, lenient, native):
    q = mx.array(rng.standard_normal((1, 2, 4, 33)), mx.float32)  # rows that no kernel takes
    call = lambda: mm.scaled_dot_product_attention(q, q, q, scale=0.125, force_fused=True)
    with mm.simulator.enabled():
        if RELEASE < [0, 32, 2]:
            with pytest.raises(ValueError, match="force_fused is True, and no kernel covers the call"):
                call()
        else:
            with pytest.raises(ValueError, match="(?i)fused"):  # mx has none for such rows either
                mx.eval(call())


def test_a_kernel_of_metal_kernel_is_simulated_or_refused():
    """MLX writes its signature."""
    make = lambda: mx.fast.metal_kernel("doubled", ["x"], ["y"], "y[thread_position_in_grid.x] = 2;")
    with mm.simulator.enabled():
        if RELEASE < [0, 32, 0] and not mx.metal.is_available():
            with pytest.raises(RuntimeError, match=r"mlx 0\.32\.0 is the first"):
                make()
        else:
            sizes = {
                "grid": (8, 1, 1),
                "threadgroup": (8, 1, 1),
                "output_shapes": [(8,)],
                "output_dtypes": [mx.float32],
            }
            assert make()(inputs=[mx.zeros(8)], **sizes)[0].tolist() == [2.0] * 8


def test_the_patch_replaces_what_this_release_has():
    with mm.patched():
        assert isinstance(mx.fast.rms_norm, _ext.FunctionWrapper)
        found = getattr(mx.fast, "gated_delta_update", None)
        assert found is None or isinstance(found, _ext.FunctionWrapper)
