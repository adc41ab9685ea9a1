"""The work of MLX's kernels for matrix units, as the simulator counts it: no compiler here makes machine code of them.

Products, loads, stores and barriers are counted. What is not is arithmetic, such as that which unpacks weights, and
addresses.
"""

from __future__ import annotations

import math

from ..apple.model import Instructions, Work
from .profile import Launch

# What texts say of a launch whose work is this.
COUNTED = "no machine code: products, loads and stores as the simulator counts them"
# Each product of these kernels has 16 rows, 32 columns and 16 terms; the model's multiplies have 8 of each.
_PRODUCT = (16, 32, 16)
_MULTIPLIES = math.prod(_PRODUCT) // 8**3


def is_counted(launch: Launch) -> bool:
    """Whether a launch is of a kernel of MLX's whose products are all of one known size."""
    return launch.file.startswith("mlx/") and "_nax" in launch.kernel and bool(launch.counts["tensor_operations"])


def work_of(launch: Launch) -> Work:
    """Work that a launch does at least.

    Args:
        launch: One that `is_counted`.
    """
    simdgroups = math.prod(launch.threadgroups) * math.ceil(math.prod(launch.threads) / 32)
    waits = [line.executions for line in launch.lines if (line.operation, line.memory) == ("load", "device")]
    counts = launch.counts
    return Work(
        threadgroups=math.prod(launch.threadgroups),
        threads=math.prod(launch.threads),
        lines=launch.distinct_lines,
        summed_lines=launch.threadgroup_lines,
        instructions=Instructions(
            matrix=counts["tensor_operations"] * _MULTIPLIES,
            loads=launch.device_loads + launch.threadgroup_loads,
            stores=launch.device_stores + launch.threadgroup_stores,
            reductions=counts["simd_operations"],
            control=counts["threadgroup_barriers"] * math.prod(launch.threads) / 32,
        ),
        rounds=max(waits, default=0) / simdgroups,
        matrix_dtype="float16",
        tensor_units=True,
    )
