"""MLX's gradients of gated delta on matrix units, in the simulator, against float64.

Buffers and grids follow MLX 0.32.4's host library: the gradient runs the forward kernel again, which saves the state
every few chunks of 16 tokens, three matrices a chunk, and each token's addend to the state.
"""

import ml_dtypes
import numpy as np
import pytest
from helpers.simulate import run
from helpers.tensor_ops import ints, mlx_kernel, near
from helpers.tolerances import FLOAT16_TWICE

from mlx_mittens.frontend import CompileError
from mlx_mittens.simulator import Fault

CHUNK = 16
KEY_HEADS, HEADS, OF_KEYS, OF_VALUES = 1, 2, 32, 64
SIZES = f"{OF_KEYS}, {OF_VALUES}, {KEY_HEADS}, {HEADS}, {CHUNK}"
# Those that MLX's metallib has.
TYPES = {"bfloat16_t": ml_dtypes.bfloat16, "float": np.float32}
HEADERS = ["utils.h", "gated_delta_update_nax_vjp.h"]
UNWATCHED = {"watch": False, "watched": True}  # lanes read each other's sums of gates: a race, as in the forward


def inputs(*arrays):
    return [("input", a) for a in arrays]


def outputs(*arrays):
    return [("output", a) for a in arrays]


def gradients(q, k, v, state, g, beta, of_y, of_state):
    """Of one head, in float64, token by token."""
    before, added, after = [], [], []
    for t in range(len(q)):
        before.append(state)
        decayed = state * g[t]
        added.append(beta[t] * (v[t] - decayed @ k[t]))
        state = decayed + np.outer(added[t], k[t])
        after.append(state)
    found = [np.zeros_like(a) for a in (q, k, v, g, beta)]
    dq, dk, dv, dg, dbeta = found
    ds = of_state.copy()
    for t in reversed(range(len(q))):
        decayed = before[t] * g[t]
        ds += np.outer(of_y[t], q[t])
        dq[t] = after[t].T @ of_y[t]
        of_added = ds @ k[t]
        dbeta[t] = of_added @ (v[t] - decayed @ k[t])
        dv[t] = beta[t] * of_added
        dk[t] = ds.T @ added[t] - beta[t] * decayed.T @ of_added
        ds = ds - beta[t] * np.outer(of_added, k[t])
        dg[t] = (ds * before[t]).sum()
        ds = ds * g[t]
    return *found, ds


@pytest.fixture
def drawn(rng):
    """Inputs of one sequence, and the gradients of its outputs."""

    def draw(length, dtype):
        some = lambda *shape: rng.standard_normal(shape).astype(dtype)
        q, k = (rng.standard_normal((1, length, KEY_HEADS, OF_KEYS)) for _ in range(2))
        q, k = ((a / np.linalg.norm(a, axis=-1, keepdims=True)).astype(dtype) for a in (q, k))
        v, of_y = (some(1, length, HEADS, OF_VALUES) for _ in range(2))
        g, beta = (rng.uniform(low, 1, (1, length, HEADS)).astype(dtype) for low in (0.8, 0.2))
        state, of_state = (rng.standard_normal((1, HEADS, OF_VALUES, OF_KEYS)).astype(np.float32) for _ in range(2))
        return q, k, v, state, g, beta, of_y, of_state

    return draw


def forward(name, q, k, v, state, g, beta, every):
    """Arrays that MLX saves: states every few chunks, matrices and additions of a chunk."""
    length = q.shape[1]
    chunks = -(-length // CHUNK)
    file = mlx_kernel(
        f"nax_saving_{name}_{every}.metal",
        ["utils.h", "gated_delta_update_nax.h"],
        f"gated_delta_fused_nax, {name}, {SIZES}, {every}",
    )
    states = np.zeros((1, HEADS, -(-chunks // every), OF_VALUES, OF_KEYS), np.float32)
    matrices = np.zeros((1, HEADS, chunks, 3, CHUNK, CHUNK), np.float32)
    added = np.zeros((1, HEADS, chunks, CHUNK, OF_VALUES), np.float32)
    data = [*inputs(q, k, v, state, g, beta), *outputs(np.zeros_like(v), np.zeros_like(state)), ints(length)]
    where = (1, OF_VALUES // 64, HEADS), (32, 4, 1)
    run(file, "test", [*data, *outputs(states, matrices, added)], *where, constants={200: True}, **UNWATCHED)
    return states, matrices, added


CASES = [
    ("bfloat16_t", 16, 40),
    pytest.param("bfloat16_t", 4, 72, marks=pytest.mark.nightly),
    pytest.param("float", 4, 20, marks=pytest.mark.nightly),
]


@pytest.mark.parametrize("name, every, length", CASES)
def test_gated_delta_gradients(drawn, name, every, length):
    q, k, v, state, g, beta, of_y, of_state = arrays = drawn(length, TYPES[name])
    saved = forward(name, q, k, v, state, g, beta, every)
    kernel = f"gated_delta_vjp_fused_nax, {name}, {SIZES}, {every}"
    file = mlx_kernel(f"nax_vjp_{name}_{every}.metal", HEADERS, kernel)
    found = [np.zeros(a.shape, np.float32) for a in (q, k, v, g, beta, state)]
    segment = np.zeros((1, HEADS, every, OF_VALUES, OF_KEYS), np.float32)
    added = [("inout", a) for a in found[:2]]  # heads that have the same keys add up theirs
    data = [*inputs(q, k, v, g, beta, of_y, of_state, saved[0]), ints(length), *added, *outputs(*found[2:])]
    data += inputs(*saved[1:])
    where = file, "test", [*data, *outputs(segment)], (1, 1, HEADS), (32, OF_VALUES // 16, 1)
    with pytest.raises(Fault, match=r"nax_ops\.h:\d+: the left operand .*never asked"):
        run(*where, **UNWATCHED, shuffled_tensors=True)
    for array in (*found, segment):
        array[:] = 0
    run(*where, **UNWATCHED)
    dq, dk, dv, dg, dbeta, dstate = found

    file = mlx_kernel(f"nax_dgamma_{name}.metal", HEADERS, f"gated_delta_dgamma_to_dg, {name}, {CHUNK}")
    data = [*inputs(g), ("inout", dg), ints(length), ints(HEADS), ints(HEADS)]
    run(file, "test", data, (1, -(-length // CHUNK), 1), (HEADS, 1, 1))

    wide = [a[0].astype(np.float64) for a in arrays]
    exact_q, exact_k = np.zeros((2, length, OF_KEYS))
    for head in range(HEADS):
        of_head = [wide[0][:, 0], wide[1][:, 0], wide[2][:, head], wide[3][head]]
        of_head += [wide[4][:, head], wide[5][:, head], wide[6][:, head], wide[7][head]]
        of_q, of_k, of_v, of_g, of_beta, of_before = gradients(*of_head)
        exact_q, exact_k = exact_q + of_q, exact_k + of_k
        near(dv[0, :, head], of_v, FLOAT16_TWICE)
        near(dg[0, :, head], of_g, FLOAT16_TWICE)
        near(dbeta[0, :, head], of_beta, FLOAT16_TWICE)
        near(dstate[0, head], of_before, FLOAT16_TWICE)
    near(dq[0, :, 0], exact_q, FLOAT16_TWICE)  # both heads have these keys
    near(dk[0, :, 0], exact_k, FLOAT16_TWICE)


def test_mlx_has_no_gradients_in_half():
    """Its metallib has none, though its host asks for one: the larger of a half and a float is ambiguous."""
    file = mlx_kernel("nax_vjp_half.metal", HEADERS, f"gated_delta_vjp_fused_nax, half, {SIZES}, 4")
    with pytest.raises(CompileError, match=r"update_nax_vjp\.h:\d+:\d+: error: no matching function for call to 'max'"):
        run(file, "test", [np.zeros(1, np.float16)], 1)
