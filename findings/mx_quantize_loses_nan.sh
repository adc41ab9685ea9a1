#!/usr/bin/env bash
# Behaviour: mx.quantize hides a NaN among the weights. In affine mode it becomes an ordinary number, in mxfp4 its whole
# group becomes zero. A group of float16 whose range is wider than the type gets infinite weights, though each is finite.
# Expected: NaN stays NaN, as in every product with the unquantized weights, and finite weights stay finite.
source "$(dirname "${BASH_SOURCE[0]}")/in_new_environment.sh"
in_new_environment "mlx[cpu]==0.32.4" <<'PYTHON'
import mlx.core as mx

mx.set_default_device(mx.cpu)
spoilt = mx.array([[float("nan")] + [1.0] * 31])
affine = mx.dequantize(*mx.quantize(spoilt, group_size=32, bits=4), group_size=32, bits=4)[0, :3].tolist()
small = mx.dequantize(*mx.quantize(spoilt, mode="mxfp4"), mode="mxfp4")[0, :3].tolist()
wide = mx.array([[-60000.0, 60000.0] * 16], mx.float16)
ranged = mx.dequantize(*mx.quantize(wide, group_size=32, bits=8), group_size=32, bits=8)[0, :2].tolist()
print("seen: [NaN, 1, 1, ...] affine:", affine, "- mxfp4:", small, "- float16 [-60000, 60000, ...]:", ranged)
assert affine == [1.0] * 3 and small == [0.0] * 3 and ranged == [float("-inf"), 60000.0]
PYTHON
