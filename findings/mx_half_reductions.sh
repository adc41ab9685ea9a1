#!/usr/bin/env bash
# Behaviour: on a CPU MLX sums half types in float32, but mean, var and norm keep their intermediate results in the half
# type, and cumsum its running sum: a mean overflows where the sum of a wider type would not, a running sum stops growing.
# Expected: mean of equal values is that value, and the last running sum equals the sum.
source "$(dirname "${BASH_SOURCE[0]}")/in_new_environment.sh"
in_new_environment "mlx[cpu]==0.32.4" <<'PYTHON'
import mlx.core as mx

mx.set_default_device(mx.cpu)
mean = mx.mean(mx.full((4096,), 20.0, mx.float16)).item()
variance = mx.var(mx.array([300.0, 301.0] * 500, mx.float16)).item()
norm = mx.linalg.norm(mx.full((100,), 100.0, mx.float16)).item()
print("seen: float16 mean of 4,096 times 20:", mean, "- variance of 300 and 301:", variance, "- norm of 100 times 100:", norm)
assert (mean, variance, norm) == (float("inf"),) * 3
for dtype, stops in ((mx.float16, 2048), (mx.bfloat16, 256)):
    ones = mx.ones((10000,), dtype)
    last, total = mx.cumsum(ones)[-1].item(), mx.sum(ones).item()
    print(f"seen: {dtype}: sum of 10,000 ones {total}, last running sum {last}")
    assert last == stops and total > 9900
PYTHON
