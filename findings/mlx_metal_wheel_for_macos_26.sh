#!/usr/bin/env bash
# Behaviour: mlx-metal's wheel for macOS 26.0 holds a library whose load command names macOS 26.2 as the oldest system. The
# wheels for macOS 14 and 15 hold libraries for what their tags say. pip installs by the tag, on 26.0 and 26.1 too.
# Expected: a tag names the oldest system that the library is built for, as packagers' tools check it.
source "$(dirname "${BASH_SOURCE[0]}")/in_new_environment.sh"
in_new_environment "lief==0.17.1" "packaging==26.0" <<'PYTHON'
import pathlib
import subprocess
import sys
import zipfile

import lief
from packaging.utils import parse_wheel_filename

print("versions: mlx-metal 0.32.4")
oldest = {}
for system in ("14", "15", "26"):
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    given = ["--only-binary=:all:", "--platform", f"macosx_{system}_0_arm64", "-d", system, "mlx-metal==0.32.4"]
    subprocess.run([*pip, *given], check=True)
    (path,) = pathlib.Path(system).glob("*.whl")
    (tag,) = parse_wheel_filename(path.name)[3]
    with zipfile.ZipFile(path) as wheel:
        library = lief.MachO.parse(list(wheel.read("mlx/lib/libmlx.dylib"))).at(0)
    oldest[tag.platform] = library.build_version.minos[:2]
    print(f"seen: {tag.platform} is built for macOS", ".".join(map(str, oldest[tag.platform])))
assert oldest == {
    "macosx_14_0_arm64": [14, 0],
    "macosx_15_0_arm64": [15, 0],
    "macosx_26_0_arm64": [26, 2],
}
PYTHON
