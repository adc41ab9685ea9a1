"""Compiles every kernel to PTX, for a package whose users need no compiler: `python -m frontend.prebuild FOLDER`.

`python -m frontend.prebuild --check` only says whether there is a clang to do it with: if not it exits with NO_CLANG.
"""

from __future__ import annotations

import sys
from pathlib import Path

from . import build, build_ptx, compiler, library
from .read import sources

ARCH = "sm_80"
NO_CLANG = 3  # which cmake/Kernels.cmake knows; Python itself exits with 1 and 2


def prebuild(folder: Path) -> int:
    """Writes the PTX of all variants of all files where `ptx` looks for it; returns how many."""
    target = folder / ARCH
    target.mkdir(parents=True, exist_ok=True)
    for stale in target.glob("*.ptx"):
        stale.unlink()

    files = [file for file in sources.files() if not sources.is_for_apple(file)]
    kernels = [(file, variant.name) for file in files for variant in build.variants(file)]
    texts = build_ptx.all_ptx(kernels, ARCH)
    for (file, kernel), text in texts.items():
        path = target / f"{build_ptx.entry_name(kernel)}.ptx"
        path.write_text(f"// {library.prebuilt_key(sources.flatten(file))}\n{text}")
    return len(texts)


if __name__ == "__main__":
    if sys.argv[1] == "--check":
        if problem := compiler.compiler_problem():
            print(problem, file=sys.stderr)
            sys.exit(NO_CLANG)
        sys.exit()
    print(f"{prebuild(Path(sys.argv[1]))} kernels compiled to PTX for {ARCH} and later")
