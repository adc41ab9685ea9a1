#!/usr/bin/env bash
# Behaviour: no two neighbouring releases of MLX from 0.31.2 to 0.32.4 have the same C++ symbols, patch releases included:
# each removes functions that an extension of the release before may need. One of them renamed hundreds, since a type in
# most signatures got another member.
# Expected: a patch release runs what was built for the one before.
source "$(dirname "${BASH_SOURCE[0]}")/in_new_environment.sh"
in_new_environment "lief==0.17.1" <<'PYTHON'
import pathlib
import subprocess
import sys
import zipfile

import lief


def symbols(version):
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--only-binary=:all:", "-d", version, f"mlx-cpu=={version}"], check=True)
    with zipfile.ZipFile(next(pathlib.Path(version).glob("*.whl"))) as wheel:
        library = lief.parse(list(wheel.read("mlx/lib/libmlx.so")))
    return {s.name for s in library.exported_symbols if s.name.startswith("_ZN3mlx") or s.name.startswith("_ZNK3mlx")}


versions = ["0.31.2", "0.32.0", "0.32.1", "0.32.2", "0.32.3", "0.32.4"]
exported = [symbols(version) for version in versions]
for i in range(5):
    removed = len(exported[i] - exported[i + 1])
    print(f"seen: {versions[i + 1]} has {removed} symbols of {versions[i]} no longer")
    assert removed > 0
PYTHON
