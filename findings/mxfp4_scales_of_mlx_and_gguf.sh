#!/usr/bin/env bash
# Behaviour: MLX and the gguf package choose another scale for the same block of MXFP4. MLX takes the smallest power of
# two that saturates nothing, gguf the one of the specification, which clips: 7.9 becomes 8 in MLX and 6 in gguf.
# Expected: a format with one specification has one quantized value.
source "$(dirname "${BASH_SOURCE[0]}")/in_new_environment.sh"
in_new_environment "mlx[cpu]==0.32.4" "gguf==0.19.0" <<'PYTHON'
import gguf
import mlx.core as mx
import numpy as np

mx.set_default_device(mx.cpu)
block = np.array([[7.9] + [0.0] * 31], np.float32)
w, scales = mx.quantize(mx.array(block), mode="mxfp4")
packed = gguf.quants.quantize(block, gguf.GGMLQuantizationType.MXFP4)
ours = scales.item(), mx.dequantize(w, scales, mode="mxfp4")[0, 0].item()
peer = int(packed[0, 0]), float(gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.MXFP4)[0, 0])
print("seen: scale's byte and value of 7.9 - MLX:", ours, "- gguf:", peer)
assert ours == (128, 8.0) and peer == (127, 6.0)
PYTHON
