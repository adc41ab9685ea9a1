"""Every kernel of the installed mlx-lm that it writes for mx.fast.metal_kernel: right, or a known bug of its own."""

import re
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import numpy as np
import pytest
from helpers.tolerances import SUMS

import mlx_mittens as mm


def normal(*shape, scale=1.0):
    return mx.random.normal(shape) * scale


def close(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.array(ours), np.array(theirs), rtol=SUMS, atol=SUMS)


def delta_inputs(dk, dv=8, vector=False):
    gates = (1, 3, 2, dk) if vector else (1, 3, 2)
    q, k = (normal(1, 3, 1, dk, scale=dk**-0.5) for _ in range(2))
    return (
        q,
        k,
        normal(1, 3, 2, dv),
        mx.random.uniform(0.5, 1, gates),
        mx.random.uniform(0, 1, (1, 3, 2)),
        normal(1, 2, dv, dk),
    )


def gated_delta(dk, vector=False, masked=False, function="gated_delta_kernel"):
    from mlx_lm.models import gated_delta as module

    inputs = delta_inputs(dk, vector=vector)
    mask = mx.array([[True, False, True]]) if masked else None
    counts = mask[..., None, None] if masked else 1  # a masked token's output is none

    def run():
        results = getattr(module, function)(*inputs, mask), module.gated_delta_ops(*inputs, mask)
        return [[y * counts, state] for y, state in results]

    return run


def wkv7():
    from mlx_lm.models import rwkv7

    inputs = [normal(1, 2, 2, 64, scale=0.2) for _ in range(6)]
    state = normal(1, 2, 64, 64)

    def run():
        expected, now = [], state
        for t in range(2):
            y, now = rwkv7._wkv7_step_ops(*(x[:, t] for x in inputs), now)
            expected.append(y[..., 0])
        return rwkv7.wkv7_kernel(*inputs, state), (mx.stack(expected, axis=1), now)

    return run


def ssm():
    from mlx_lm.models import ssm as module

    x, a, b, c, d = normal(1, 1, 4, 8), normal(4), normal(1, 1, 2, 32), normal(1, 1, 2, 32), normal(4)
    dt, bias, state = normal(1, 1, 4), normal(4), normal(1, 4, 8, 32)

    def run():
        found = module.ssm_update_kernel(x, a, b, c, d, dt, bias, state, (0.001, 100.0))
        step = module.compute_dt(dt, bias, (0.001, 100.0)).reshape(1, 4, 1, 1)
        b_, c_ = (mx.repeat(part.reshape(1, 2, 1, 32), 2, axis=1) for part in (b, c))
        now = mx.exp(-mx.exp(a).reshape(1, 4, 1, 1) * step) * state + step * x.reshape(1, 4, 8, 1) * b_
        y = (now * c_).sum(axis=-1) + d.reshape(1, 4, 1) * x.reshape(1, 4, 8)
        return found, (y.reshape(1, 1, 4, 8), now)

    return run


def residual_mix():
    from mlx_lm.models import kimi_k3

    raw, partial, w = normal(2, 1, 3, 40), normal(1, 3, 40), normal(40)
    blocks = kimi_k3.ResidualBlocks(1e-5)
    for block in raw:
        blocks.append(block)

    def run():
        return [[kimi_k3._attn_res_mix(blocks, partial, w, 1e-5, use_kernel)] for use_kernel in (True, False)]

    return run


def sinkhorn():
    from mlx_lm.models import deepseek_v41

    comb, eps = mx.random.uniform(0.1, 1, (2, 3, 4, 4)), mx.array([1e-6])

    def run():
        expected = comb / (mx.sum(comb, axis=-2, keepdims=True) + eps)
        for axis in (-1, -2):
            expected = expected / (mx.sum(expected, axis=axis, keepdims=True) + eps)
        return [deepseek_v41._sinkhorn(comb, iters=2, eps=eps)], [expected]

    return run


def bitlinear():
    from mlx_lm.models import bitlinear_layers

    layer = bitlinear_layers.BitLinear(128, 16, bias=False)
    layer.weight = mx.random.randint(0, 3, (4, 128)).astype(mx.uint8) * 21
    layer.weight_scale = mx.array([0.5])
    x = normal(3, 128)

    def run():
        bits = [(layer.weight >> shift) & 3 for shift in (0, 2, 4, 6)]
        weights = mx.concatenate(bits).astype(mx.float32) - 1
        return [layer(x)], [x @ weights.T * 0.5]

    return run


def rms(x, eps=1e-5):
    return x * mx.rsqrt((x * x).mean(axis=-1, keepdims=True) + eps)


def qk_norm(rope=False):
    from mlx_lm import kernels

    heads = {"n_heads": 2, "n_kv_heads": 1, "head_dim": 64, "eps": 1e-5, "query_scale": 0.3}
    x = normal(1, 4, 6 * 64)

    def run():
        parts = [rms(part.reshape(1, 4, -1, 64)) for part in (x[..., :128], x[..., 128:192])]
        parts[0] = parts[0] * 0.3
        if not rope:
            return kernels.qk_norm(x, **heads), parts
        turned = [
            mx.fast.rope(
                part.swapaxes(1, 2), 64, traditional=True, base=1e4, scale=1, offset=3, stream=mx.cpu
            ).swapaxes(1, 2)
            for part in parts
        ]
        return kernels.qk_norm_rope(x, rope_base=1e4, offset=3, **heads), turned

    return run


def routing():
    from mlx_lm import kernels

    logits, bias = normal(8, 40), normal(40, scale=0.1)

    def run():
        inds, weights = kernels.expert_routing(logits, bias, top_k=4, multiplier=1.5, score_eps=1e-6, route_scale=2.0)
        scores = mx.sigmoid(1.5 * logits)
        order = mx.argsort(-(scores + bias), axis=-1)[:, :4]
        chosen = mx.take_along_axis(scores, order, axis=-1)
        return (inds, weights), (order, 2 * chosen / (chosen.sum(axis=-1, keepdims=True) + 1e-6))

    return run


def norm_add(pre_norm):
    from mlx_lm import kernels

    branch, stream, alpha, beta, post = normal(3, 200), normal(3, 200), normal(200), normal(200), normal(200)
    norm = nn.RMSNorm(200)

    def run():
        arguments = {"alpha": alpha, "beta": beta, "post_weight": post, "post_eps": 1e-5}
        found = kernels.norm_add_norm(branch, stream, next_norm=norm if pre_norm else None, **arguments)
        new = alpha * stream + beta * rms(post * branch)
        return (found, (new, rms(new))) if pre_norm else (found[:1], (new,))

    return run


def pre_norm():
    from mlx_lm import kernels

    stream = normal(3, 200)
    return lambda: ([kernels.pre_norm(stream, nn.RMSNorm(200), dtype=mx.float32)], [rms(stream)])


def combine():
    from mlx_lm import kernels

    experts, weights, norm = normal(2, 3, 300), mx.random.uniform(0, 1, (2, 3)), normal(300)

    def run():
        found = kernels.post_expert_norm_combine(experts, weights, norm_weight=norm, eps=1e-5)
        return [found], [(rms(experts * norm) * weights[..., None]).sum(axis=1)]

    return run


def sigmoid_gate():
    from mlx_lm import kernels

    x, gate = normal(1, 2, 4, 40), normal(1, 4, 80)

    def run():
        expected = rms(x.swapaxes(1, 2)).reshape(1, 4, 80) * mx.sigmoid(gate)
        return [kernels.rms_norm_sigmoid_gate(x, gate, eps=1e-5)], [expected]

    return run


# By the name that mlx-lm gives the kernel.
CASES = {
    "gated_delta_step": lambda: gated_delta(32),
    "gated_delta_step_mask": lambda: gated_delta(32, masked=True),
    "gated_delta_step_vec": lambda: gated_delta(32, vector=True),
    "gated_delta_step_vec_mask": lambda: gated_delta(32, vector=True, masked=True),
    "gated_delta_step_xtree": lambda: gated_delta(128, function="gated_delta_kernel_xtree"),
    "gated_delta_step_packed_btree": lambda: gated_delta(128),
    "wkv7_kernel": wkv7,
    "ssm_kernel": ssm,
    "attnres_mix": residual_mix,
    "deepseek_v41_sinkhorn": sinkhorn,
    "bitlinear_matmul": bitlinear,
    "qk_norm": qk_norm,
    "qk_norm_rope": lambda: qk_norm(rope=True),
    "expert_routing": routing,
    "norm_add_norm": lambda: norm_add(True),
    "norm_add": lambda: norm_add(False),
    "norm_add_norm_pre_norm": pre_norm,
    "post_expert_norm_combine": combine,
    "rms_norm_sigmoid_gate": sigmoid_gate,
}


# The kernels of mlx-lm's losses read the maxima of all simdgroups and then write sums in their place, without a barrier
# between: one simdgroup may overwrite numbers that another has not read.
RACES = {"kl_forward": 2, "kl_backward": 3, "js_forward": 2, "js_backward": 4}


QUICK = ("gated_delta_step", "ssm_kernel", "norm_add_norm", "qk_norm_rope", "kl_backward")


def each(names):
    """Some run always, and the others at night: each is compiled and checked."""
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.nightly) for name in names]


@pytest.mark.parametrize("name", each(CASES))
def test_a_kernel_of_mlx_lm(name):
    mx.random.seed(3)
    with mm.simulator.enabled(seed=2, pretend_metal=True):
        before = mm.simulator.launched()
        found, expected = CASES[name]()()
        mx.eval(found, expected)
        assert mm.simulator.launched() > before
        close(found, expected)


@pytest.mark.parametrize("name", each(RACES))
def test_a_race_of_mlx_lm_is_found(name):
    from mlx_lm.tuner import losses

    inputs = [normal(1, 100), normal(1, 100), mx.ones((1,)), mx.ones((1,))][: RACES[name]]
    shapes = {"kl_forward": [(1,)], "js_forward": [(1,), (1,)]}.get(name, [(1, 100)])
    with mm.simulator.enabled(pretend_metal=True), pytest.raises(mm.simulator.Fault, match='array "shared".* a race'):
        kernel = getattr(losses, f"_{name}_kernel")
        arguments = {"output_shapes": shapes, "output_dtypes": [mx.float32] * len(shapes)}
        sizes = {"grid": (1024, 1, 1), "threadgroup": (1024, 1, 1)}
        mx.eval(kernel(inputs=inputs, template=[("T", mx.float32), ("V", 100)], **arguments, **sizes))


def test_no_kernel_of_mlx_lm_is_missing():
    texts = [path.read_text() for path in Path(mlx_lm.__file__).parent.rglob("*.py")]
    names = {name for text in texts for name in re.findall(r'metal_kernel\(\s*name=f?"([^"]+)"', text)}
    assert len(names) == sum(text.count("metal_kernel(") for text in texts)
    by_mask = {f"gated_delta_step{suffix}" for suffix in ("", "_mask", "_vec", "_vec_mask")}
    assert names - {"gated_delta_step{suffix}"} | by_mask == {*CASES, *RACES}
