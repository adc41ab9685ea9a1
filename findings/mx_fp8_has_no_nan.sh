#!/usr/bin/env bash
# Behaviour: mx.to_fp8 turns NaN and infinity into 448, the largest finite number. ml_dtypes' float8_e4m3fn, the same
# format, keeps NaN, and makes NaN of what is out of range.
# Expected: NaN stays NaN in both.
source "$(dirname "${BASH_SOURCE[0]}")/in_new_environment.sh"
in_new_environment "mlx[cpu]==0.32.4" "ml_dtypes==0.5.4" "numpy==2.4.4" <<'PYTHON'
import ml_dtypes
import mlx.core as mx
import numpy as np

mx.set_default_device(mx.cpu)
values = [448.0, 1000.0, float("inf"), float("nan")]
ours = [mx.from_fp8(mx.to_fp8(mx.array([v])), dtype=mx.float32).item() for v in values]
peer = np.array(values, np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float32).tolist()
print("seen:", values, "- MLX:", ours, "- ml_dtypes:", peer)
assert ours == [448.0] * 4 and peer[0] == 448.0 and all(np.isnan(peer[1:]))
PYTHON
