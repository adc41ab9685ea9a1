#!/usr/bin/env bash
# Behaviour: on Linux "pip install mlx==N" upgrades the Python package alone and leaves mlx-cpu of the release before, whose
# library it then loads. pip check finds nothing wrong; the import says an undefined, mangled symbol.
# Expected: the package requires its own library, or the import names the two versions.
source "$(dirname "${BASH_SOURCE[0]}")/in_new_environment.sh"
in_new_environment "mlx[cpu]==0.32.2" <<'PYTHON'
import subprocess
import sys

pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
subprocess.run([*pip, "install", "--quiet", "mlx==0.32.4"], check=True)
check = subprocess.run([*pip, "check"], capture_output=True, text=True)
listed = subprocess.run([*pip, "list", "--format=freeze"], capture_output=True, text=True).stdout.split()
imported = subprocess.run([sys.executable, "-c", "import mlx.core"], capture_output=True, text=True)
print("seen:", [line for line in listed if line.startswith("mlx")], "-", check.stdout.strip())
print("seen:", imported.stderr.strip().splitlines()[-1])
assert check.returncode == 0 and imported.returncode == 1 and "undefined symbol" in imported.stderr
PYTHON
