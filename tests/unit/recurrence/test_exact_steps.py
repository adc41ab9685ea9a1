"""With exact=True steps of a recurrence have, on an Apple GPU, the bits that they have one by one."""

import mlx.core as mx
import numpy as np
import pytest

import mlx_mittens as mm


def array(rng, *shape, least=None):
    values = rng.normal(size=shape) if least is None else rng.uniform(least, 1, shape)
    return mx.array(values.astype(np.float32))


def gated_delta(rng, steps):
    steps = min(steps, 3)  # heads for which MLX has a kernel are slow to simulate
    heads = [array(rng, 1, steps, 16, 128) / 128**0.5 for _ in range(3)]
    return mm.gated_delta_update, [*heads, *(array(rng, 1, steps, 16, least=0.5) for _ in range(2))]


def state_space(rng, steps):
    x, b, c, dt = array(rng, 1, steps, 2, 8), *(array(rng, 1, steps, 1, 32) for _ in range(2)), array(rng, 1, steps, 2)
    a, d, bias = (array(rng, 2) for _ in range(3))
    step = lambda x, b, c, dt, state: mm.ssm_update(x, a, b, c, d, dt, bias, state)
    return step, [x, b, c, dt]


@pytest.mark.parametrize("make", [gated_delta, state_space])
def test_steps_at_once_are_those_one_by_one(rng, native, make):
    """Up to 16 rows, whose products are exact; for more mx's products of chunks are faster."""
    step, arrays = make(rng, 16)
    with mm.patched(exact=True), mm.simulator.enabled(gpu="m2-max"):
        mm.stats(reset=True)
        y, last = step(*arrays, None)
        mx.eval(y, last)
        assert all(not count["mx"] for count in mm.stats().values())
        state = None
        for t in range(y.shape[1]):
            one, state = step(*(a[:, t : t + 1] for a in arrays), state)
            assert mx.array_equal(one, y[:, t : t + 1]), t
        assert mx.array_equal(state, last)
