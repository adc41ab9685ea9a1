#!/usr/bin/env bash
# Behaviour: a query that sees no key gets the mean of all values from mx.fast.scaled_dot_product_attention on a CPU where
# the mask is bool or causal, and NaN where the same mask is additive. In float16 scores beyond 65,504 give NaN: they are
# kept in the input's type.
# Expected: one result for one mask, and scores in float32 as in the kernels for GPUs.
source "$(dirname "${BASH_SOURCE[0]}")/in_new_environment.sh"
in_new_environment "mlx[cpu]==0.32.4" <<'PYTHON'
import mlx.core as mx

mx.set_default_device(mx.cpu)
attention = mx.fast.scaled_dot_product_attention
q, k, v = mx.ones((1, 1, 3, 4)), mx.ones((1, 1, 2, 4)), mx.arange(8.0).reshape(1, 1, 2, 4)
by_bool = attention(q, k, v, scale=1.0, mask=mx.zeros((3, 2), mx.bool_))[0, 0, 0].tolist()
causal = attention(q, k, v, scale=1.0, mask="causal")[0, 0, 0].tolist()
additive = attention(q, k, v, scale=1.0, mask=mx.full((3, 2), float("-inf")))[0, 0, 0].tolist()
large = mx.full((1, 1, 2, 64), 100.0, mx.float16)
half = attention(large, large, mx.ones_like(large), scale=1.0)[0, 0, 0, 0].item()
print("seen: mask of bool:", by_bool, "- causal:", causal, "- additive:", additive, "- float16, scores of 640,000:", half)
assert by_bool == causal == [2.0, 3.0, 4.0, 5.0]
assert all(value != value for value in [*additive, half])
PYTHON
