"""How often a launch executes each basic block of its machine code, by the simulator's counts.

A block is executed as often as the blocks before it lead to it. Executions along the branches of the machine code are
found so that this holds, and that loads, stores, barriers, SIMD-group operations and products of matrices are executed
as often as the simulator counted them. Products and barriers are the same instructions on both sides, and their counts
are held. Of the others the machine code may have more: it splits vectors that the simulator takes as one access.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..apple.machine_code import Block, MachineCode
from ..apple.model import LANES
from ..simulator.profile import Launch

# Opcodes by the simulator's count that they are part of.
_COUNTED = {
    "device_loads": ("device_load",),
    "device_stores": ("device_store",),
    "threadgroup_loads": ("local_load",),
    "threadgroup_stores": ("local_store",),
    "matrix_operations": ("matrix",),
    "threadgroup_barriers": ("threadgroup_barrier",),
}
_HELD = ("matrix_operations", "threadgroup_barriers")
# One operation on a vector is an instruction for each element, so this count says less than the others.
_SIMD, _SIMD_WEIGHT = "simd_operations", 0.03
_COUNTS = (*_COUNTED, _SIMD)
# Weights of constraints, beside the weights that choose between the executions that meet them.
_FLOW, _HELD_COUNT, _COUNT, _ENTRY = 3e5, 1e5, 1e3, 10.0
_ROUNDS = 6
_PATIENCE = 5
# A solution of n numbers takes time with their cube. Code of many loops, where a launch takes one, such as tiles of
# experts, would take minutes: the solution found by then is near enough, or has a mark.
_STEPS, _FEWEST_STEPS = 1e10, 40


@dataclass(frozen=True)
class Executions:
    """How often simdgroups execute each block, summed over the launch.

    Attributes:
        blocks: By the block's label.
        opcodes: How often the instructions of each opcode are executed, in all blocks.
        rounds: How often blocks with loads from device memory are executed: loads of one block are on their way
            together, and the next block's loads wait for this block's results.
        mismatch: By how much the counts of the simulator are missed, as a share of the count that is missed most.
        uncounted: Loops that compute and have none of the counted instructions. How often they run is not known: once
            each time that they are come to.
    """

    blocks: Mapping[str, float]
    opcodes: Mapping[str, float]
    rounds: float
    mismatch: float
    uncounted: int


def simdgroups(launch: Launch) -> int:
    """Simdgroups of a launch."""
    return math.prod(launch.threadgroups) * math.ceil(math.prod(launch.threads) / LANES)


def counts_of(launch: Launch) -> tuple[float, ...]:
    """The inputs of `executions` from a launch: with the same code and counts it finds the same."""
    return simdgroups(launch), *(_total(launch, name) for name in _COUNTS)


def executions(code: MachineCode, launch: Launch) -> Executions:
    """Finds how often each block is executed."""
    number = simdgroups(launch)
    totals = {name: _total(launch, name) for name in _COUNTS}
    found = {name: np.array([_instructions(block, name) for block in code.blocks], float) for name in _COUNTS}
    told = [name for name in _COUNTS if found[name].any()]
    weights = np.array([_weight(name, totals[name]) for name in told])
    paths = _paths(code, np.array([found[name] for name in _COUNTS]))
    blocks = np.array([path.blocks for path in paths]).T
    start = np.array([[float(path.source == _START) for path in paths]])
    entries = np.array([path.loops for path in paths]).T
    # Where each loop is entered: in the rounds of the loop around it, or in the launch itself.
    headers = {block.label: times for block, times in zip(code.blocks, blocks)}
    around = np.array(
        [headers[code.loops[loop.parent].header] if loop.parent is not None else start[0] for loop in code.loops]
    ).reshape(entries.shape)
    # Shares of the counts, of executions in units of simdgroups.
    shares = [found[name] @ blocks * (number / totals[name] if totals[name] else 1.0) for name in told]
    counts = np.array(shares).reshape(len(told), len(paths))
    counted = np.array([float(totals[name] > 0) for name in told])
    joints = sorted({path.target for path in paths} & {path.source for path in paths})
    enters = np.array([[float(path.target == at) for path in paths] for at in joints]).reshape(-1, len(paths))
    leaves = np.array([[float(path.source == at) for path in paths] for at in joints]).reshape(-1, len(paths))
    # Finds the least executions with these counts, with loops entered each time. Sizes are relative to the solution
    # found so far, or else a loop of many rounds would weigh more than the counts that ask for it.
    size = np.full(len(paths), 1 + max((totals[name] / number for name in told), default=1.0))
    best = np.ones(len(paths))
    for _ in range(_ROUNDS):
        flow = (enters - leaves) / np.maximum(1, enters @ size)[:, None]  # flow into a joint equals flow out of it
        entered = _ENTRY * (entries - around) / np.maximum(1, around @ size)[:, None]
        rows = [_FLOW * flow, _FLOW * start, counts * weights[:, None], entered]
        rest = np.zeros(len(entered) + len(paths))
        wanted = np.concatenate([np.zeros(len(flow)), np.full(1, _FLOW), weights * counted, rest])
        matrix = np.vstack([*(row * size for row in rows), np.eye(len(paths))])
        best = size * _nonnegative_least_squares(matrix, wanted, best > 0)
        size = best + 1
    times = [float(time) for time in blocks @ best * number]
    opcodes: dict[str, float] = {}
    for block, time in zip(code.blocks, times):
        for opcode, count in block.opcodes.items():
            opcodes[opcode] = opcodes.get(opcode, 0.0) + time * count
    return Executions(
        {block.label: time for block, time in zip(code.blocks, times)},
        opcodes,
        sum(time for block, time in zip(code.blocks, times) if block.opcodes.get("device_load")),
        max((abs(s - c) for s, c, name in zip(counts @ best, counted, told) if name != _SIMD), default=0.0),
        _uncounted(code, found),
    )


_START, _END = -1, -2


@dataclass
class _Path:
    """A way through the code without a choice, or with one that no count can see.

    Attributes:
        source: The joint that it begins at: a block's number, doubled where the block begins and odd where it ends.
        target: The joint that it ends at.
        blocks: How often each block is executed along it.
        loops: How often each loop is entered along it.
    """

    source: int
    target: int
    blocks: np.ndarray
    loops: np.ndarray


def _paths(code: MachineCode, found: np.ndarray) -> list[_Path]:
    """The paths between joints: those in a row are one, and those side by side that count alike."""
    place = {block.label: i for i, block in enumerate(code.blocks)}
    size, no_blocks, no_loops = len(place), np.zeros(len(place)), np.zeros(len(code.loops))
    inside = [set(loop.blocks) for loop in code.loops]
    paths = [_Path(_START, 0, no_blocks, no_loops)]
    for i, block in enumerate(code.blocks):
        paths.append(_Path(2 * i, 2 * i + 1, np.eye(1, size, i)[0], no_loops))
        for label in block.successors:
            entered = np.array([label in loop and block.label not in loop for loop in inside], float)
            paths.append(_Path(2 * i + 1, 2 * place[label], no_blocks, entered.reshape(no_loops.shape)))
        if not block.successors:
            paths.append(_Path(2 * i + 1, _END, no_blocks, no_loops))
    while True:
        joined = _side_by_side(_in_a_row(paths), found)
        if len(joined) == len(paths):
            return joined
        paths = joined


def _in_a_row(paths: list[_Path]) -> list[_Path]:
    into: dict[int, list[_Path]] = {}
    out: dict[int, list[_Path]] = {}
    for path in paths:
        into.setdefault(path.target, []).append(path)
        out.setdefault(path.source, []).append(path)
    for joint in list(into):
        if len(into[joint]) == 1 and len(out.get(joint, ())) == 1 and into[joint][0] is not out[joint][0]:
            before, after = into.pop(joint)[0], out.pop(joint)[0]
            both = _Path(before.source, after.target, before.blocks + after.blocks, before.loops + after.loops)
            out[before.source] = [both if path is before else path for path in out[before.source]]
            into[after.target] = [both if path is after else path for path in into[after.target]]
    return [path for some in out.values() for path in some]


def _side_by_side(paths: list[_Path], found: np.ndarray) -> list[_Path]:
    alike: dict[tuple[int, int, bytes], list[_Path]] = {}
    for path in paths:
        key = path.source, path.target, np.round(found @ path.blocks, 6).tobytes()
        alike.setdefault(key, []).append(path)
    return [
        some[0]
        if len(some) == 1
        else _Path(
            some[0].source,
            some[0].target,
            np.mean([path.blocks for path in some], 0),
            np.mean([path.loops for path in some], 0),
        )
        for some in alike.values()
    ]


def _total(launch: Launch, name: str) -> float:
    """The simulator's counts, each time for a simdgroup."""
    total = float(getattr(launch, name) if hasattr(launch, name) else launch.counts[name])
    # All simdgroups of a threadgroup meet at a barrier, which counts once.
    return total * math.ceil(math.prod(launch.threads) / LANES) if name == "threadgroup_barriers" else total


def _weight(name: str, total: float) -> float:
    if name in _HELD:
        return _HELD_COUNT
    return _COUNT * (_SIMD_WEIGHT if name == _SIMD and total else 1.0)


def _instructions(block: Block, name: str) -> int:
    """Instructions of a block that the simulator counts under a name."""
    if name == _SIMD:
        return block.kinds["simd"]
    return sum(block.opcodes.get(opcode, 0) for opcode in _COUNTED[name])


def _uncounted(code: MachineCode, found: Mapping[str, np.ndarray]) -> int:
    """Loops that compute, and of whose own blocks none has a counted instruction."""
    number = 0
    for i in range(len(code.loops)):
        own = [j for j, block in enumerate(code.blocks) if block.loop == i]
        kinds = [code.blocks[j].kinds for j in own]
        computes = any(kind["float"] + kind["complex"] for kind in kinds) or sum(kind["integer"] for kind in kinds) > 3
        number += computes and not any(found[name][j] for name in found for j in own)
    return number


def _nonnegative_least_squares(matrix: np.ndarray, wanted: np.ndarray, free: np.ndarray) -> np.ndarray:
    """Least squares with no number below zero, by block principal pivoting; the matrix has full column rank.

    Args:
        matrix: Its columns are weighted.
        wanted: The sums of them that are asked for.
        free: Which weights are first taken to be above zero; near the solution it is found sooner.
    """
    gram, right = _product(matrix.T, matrix), matrix.T @ wanted
    free = free.copy()
    fewest, patience = len(right) + 1, _PATIENCE
    found = np.zeros(len(right))
    for _ in range(min(10 * len(right), max(_FEWEST_STEPS, int(_STEPS / max(len(right), 1) ** 3)))):
        found = np.zeros(len(right))
        found[free] = _solution(gram[np.ix_(free, free)], right[free, None])[:, 0]
        slope = gram @ found - right
        wrong = np.where(free, found < 0, slope < -1e-12 * np.abs(right).max(initial=1.0))
        number = int(wrong.sum())
        if not number:
            break
        if number < fewest:
            fewest, patience = number, _PATIENCE
        elif patience:
            patience -= 1
        else:  # one at a time, which ends
            wrong[: int(np.flatnonzero(wrong)[-1])] = False
        free ^= wrong
    return np.maximum(found, 0)


# numpy's BLAS takes several threads for larger matrices. Where other programs run, those wait for each other, and a
# solution of a few hundred numbers takes many times as long.
_SMALL = 64


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product of matrices, in one thread."""
    result = np.zeros((a.shape[0], b.shape[1]))
    starts = [range(0, size, _SMALL) for size in (a.shape[0], b.shape[1], a.shape[1])]
    for i, j, k in itertools.product(*starts):
        result[i : i + _SMALL, j : j + _SMALL] += a[i : i + _SMALL, k : k + _SMALL] @ b[k : k + _SMALL, j : j + _SMALL]
    return result


def _solution(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The solution x of ``a @ x = b``, in one thread; the matrix is positive definite."""
    if len(a) <= _SMALL:
        return np.linalg.solve(a, b)
    both = np.linalg.solve(a[:_SMALL, :_SMALL], np.hstack([a[:_SMALL, _SMALL:], b[:_SMALL]]))
    of_rest, alone = np.hsplit(both, [len(a) - _SMALL])
    below = a[_SMALL:, :_SMALL]
    rest = _solution(a[_SMALL:, _SMALL:] - _product(below, of_rest), b[_SMALL:] - _product(below, alone))
    return np.vstack([alone - _product(of_rest, rest), rest])
