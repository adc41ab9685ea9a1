"""The work of launches that use matrix units, as the simulator counts it: no compiler here makes machine code of them.

Products, loads, stores and barriers are counted. Other arithmetic is not, such as the unpacking of weights and the
computation of addresses.
"""

from __future__ import annotations

import math

from ..apple.model import MATRIX_FLOP, Instructions, Work
from ..simulator.profile import Launch

# Note in texts on a launch with such work.
COUNTED = "no machine code: products, loads and stores as the simulator counts them"


def are_used(launch: Launch) -> bool:
    """Whether a launch has products of cooperative tensors."""
    return launch.counts["tensor_multiplies"] > 0


def work_of(launch: Launch) -> Work:
    """Work that a launch does at least.

    Args:
        launch: One with products of cooperative tensors.
    """
    simdgroups = math.ceil(math.prod(launch.threads) / 32)
    # A product loads its operands at once, though the simulator does it by elements.
    products = {(line.file, line.line): line.operations for line in launch.lines if line.operation == "matrix"}
    waits = [
        min(line.executions, products.get((line.file, line.line), line.executions))
        for line in launch.lines
        if (line.operation, line.memory) == ("load", "device")
    ]
    counts = launch.counts
    of_bytes = 2 * counts["byte_tensor_multiplies"] > counts["tensor_multiplies"]
    return Work(
        threadgroups=math.prod(launch.threadgroups),
        threads=math.prod(launch.threads),
        lines=launch.distinct_lines,
        summed_lines=launch.threadgroup_lines,
        instructions=Instructions(
            matrix=2 * counts["tensor_multiplies"] / MATRIX_FLOP,
            loads=launch.device_loads + launch.threadgroup_loads,
            stores=launch.device_stores + launch.threadgroup_stores,
            reductions=counts["simd_operations"],
            control=counts["threadgroup_barriers"] * simdgroups,
        ),
        rounds=max(waits, default=0) / (math.prod(launch.threadgroups) * simdgroups),
        matrix_dtype="int8" if of_bytes else "float16",
        tensor_units=True,
    )
