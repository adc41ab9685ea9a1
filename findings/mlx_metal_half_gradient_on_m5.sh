#!/usr/bin/env bash
# Behaviour: mlx-metal 0.32.4 for macOS 26 has kernels of gated_delta_update for the M5's matrix units in float16, bfloat16
# and float32, and kernels of its gradient in bfloat16 and float32 alone. The host's library makes the gradient's name from
# the type of its inputs.
# Expected: a type that the forward kernel has is one that the gradient has.
source "$(dirname "${BASH_SOURCE[0]}")/in_new_environment.sh"
in_new_environment <<'PYTHON'
import collections
import pathlib
import re
import subprocess
import sys
import zipfile

pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
given = ["--only-binary=:all:", "--platform", "macosx_26_0_arm64", "-d", "wheels", "mlx-metal==0.32.4"]
subprocess.run([*pip, *given], check=True)
print("versions: mlx-metal 0.32.4")
with zipfile.ZipFile(next(pathlib.Path("wheels").glob("*.whl"))) as wheel:
    text = wheel.read("mlx/lib/mlx.metallib")
    host = wheel.read("mlx/lib/libmlx.dylib")
names = set(re.findall(rb"gated_delta(?:_vjp)?_fused_nax_(?:bfloat16|float16|float|half)[A-Za-z0-9_]*", text))
kinds = collections.Counter(re.match(rb"(.*_nax)_([a-z0-9]+)", name).groups() for name in names)
for (kernel, dtype), count in sorted(kinds.items()):
    print(f"seen: {count} of {kernel.decode()}, {dtype.decode()}")
forward, gradient = ({dtype for kernel, dtype in kinds if (b"vjp" in kernel) is is_vjp} for is_vjp in (False, True))
assert forward - gradient == {b"float16"} and gradient == {b"bfloat16", b"float"}
assert b"gated_delta_vjp_fused_nax_\0" in host
PYTHON
