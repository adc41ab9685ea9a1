"""mx.vmap of every op over choices of its array arguments is a loop of single calls."""

import itertools

import mlx.core as mx
import pytest
from helpers.calls import CALLS
from helpers.tolerances import assert_near

import mlx_mittens as mm

SIZE = 2
MOST_NAMES = 12  # of more arguments one, all but one, and all are mapped
# Position of the new axis, by the number of axes.
PLACES = {"first": lambda axes: 0, "last": lambda axes: axes - 1, "negative": lambda axes: -(axes // 2) - 1}


@pytest.mark.parametrize("call", [call for call in CALLS if call.covered], ids=lambda call: call.name)
def test_every_subset(call, native, rng):
    names = list(call.arguments)
    several = call.arrays(rng, extra=lambda name: (SIZE,))
    sizes = range(1, len(names) + 1) if len(names) <= MOST_NAMES else (1, len(names) - 1, len(names))
    subsets = [s for n in sizes for s in itertools.combinations(names, n)]
    for chosen, (place, axis_of) in zip(subsets, itertools.cycle(PLACES.items())):
        one = [[several[name][i if name in chosen else 0] for name in names] for i in range(SIZE)]
        expected = [mx.stack(outputs) for outputs in zip(*(call.run(*arrays) for arrays in one))]
        axes = {name: axis_of(several[name].ndim) for name in chosen}
        arrays = [mx.moveaxis(several[n], 0, axes[n]) if n in chosen else several[n][0] for n in names]
        result = mx.vmap(lambda *a: call.run(*a), in_axes=tuple(axes.get(n) for n in names))(*arrays)
        for i, (a, b) in enumerate(zip(result, expected, strict=True)):
            assert_near(a, b, f"output {i} for {chosen}, new axis {place}")


@pytest.mark.parametrize("call", [call for call in CALLS if call.covered], ids=lambda call: call.name)
def test_over_nothing(call, native, rng):
    """The results have the types of a call, and no elements."""
    names = list(call.arguments)
    one = call.run(*call.arrays(rng, mx.float16).values())
    several = call.arrays(rng, mx.float16, extra=lambda name: (0,))
    results = mx.vmap(lambda *a: call.run(*a))(*(several[name] for name in names))
    for a, b in zip(results, one, strict=True):
        assert (a.shape, a.dtype) == ((0, *b.shape), b.dtype)


def test_over_nothing_types_are_not_those_of_the_first_argument(native):
    tokens = mx.vmap(lambda logits: mm.sample(logits, temperature=0.0))(mx.zeros((0, 5), mx.float16))
    assert (tokens.shape, tokens.dtype) == ((0,), mx.uint32)
    heads, steps = mx.zeros((0, 1, 3, 2, 16), mx.float16), mx.zeros((0, 1, 3, 2), mx.float16)
    y, state = mx.vmap(mm.gated_delta_update)(heads, heads, heads, steps, steps)
    assert (y.shape, y.dtype) == ((0, 1, 3, 2, 16), mx.float16)
    assert (state.shape, state.dtype) == ((0, 1, 2, 16, 16), mx.float32)
