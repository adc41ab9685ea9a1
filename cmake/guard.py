"""Finds mlx and nanobind for each release that is built; exits with a message where they do not fit.

It prints a line for each: the version of mlx, its folder and nanobind's, with semicolons between them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import pathlib
import re
import sys

RELEASES = pathlib.Path(__file__).with_name("mlx_releases.txt")


def releases() -> dict[str, str]:
    """The releases of mlx that are known, oldest first, each with its nanobind."""
    lines = (line.partition("#")[0].split() for line in RELEASES.read_text().splitlines())
    return {line[0]: line[1] for line in lines if line}


def numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def installed(package: str) -> str:
    """The version that is installed; empty if none is."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def folder(package: str, holding: str) -> pathlib.Path | None:
    """The package's folder with such a file: mlx is a namespace, of which a stray folder may be a part."""
    spec = importlib.util.find_spec(package)
    for location in (spec.submodule_search_locations if spec else None) or []:
        if any(pathlib.Path(location).glob(holding)):
            return pathlib.Path(location)
    return None


def nanobind_tag_of_mlx(mlx: pathlib.Path) -> int:
    library = next(mlx.glob("core.*.so"))
    # The tag begins the ABI name that nanobind keeps in the binary, v21_system_..., or, since v22, ends it: ..._v22
    found = re.search(rb"\x00v(\d+)_[A-Za-z0-9_+]+\x00|nanobind_[A-Za-z0-9_+]*_v(\d+)\x00", library.read_bytes())
    if not found:
        sys.exit(f"nanobind's tag was not found in {library}: this mlx is not one that mlx_mittens knows")
    return int(found[1] or found[2])


def nanobind_tag(nanobind: pathlib.Path) -> int:
    headers = (nanobind / "src" / name for name in ("nb_internals.h", "nb_abi.h"))
    found = (re.search(r"#\s*define NB_INTERNALS_VERSION (\d+)", path.read_text()) for path in headers if path.exists())
    return next(int(match[1]) for match in found if match)


def mlx_of(release: str, unpacked: pathlib.Path) -> pathlib.Path:
    """The folder of a release: the one that is installed, or an unpacked one."""
    mlx = folder("mlx", "core.*.so") if release == installed("mlx") else unpacked / f"mlx-{release}" / "mlx"
    if mlx is None or not any(mlx.glob("core.*.so")):
        sys.exit(
            f"mlx {release} is neither installed for {sys.executable} nor unpacked in {unpacked}: "
            "build by pip, which calls cmake/backend.py, or name another one by MLX_MITTENS_MLX"
        )
    if not any((mlx / "lib" / name).exists() for name in ("libmlx.so", "libmlx.dylib")):
        sys.exit(f'libmlx is not installed beside mlx {release}: pip install "mlx[cpu]=={release}"')
    return mlx


def nanobind_of(release: str, mlx: pathlib.Path, unpacked: pathlib.Path) -> pathlib.Path:
    """The nanobind with the tag of this mlx: the one that is installed, or an unpacked one."""
    wanted, listed = nanobind_tag_of_mlx(mlx), releases().get(release, "")
    here = folder("nanobind", "src/nb_internals.h")
    found = [path for path in (here, unpacked / f"nanobind-{listed}" / "nanobind") if path and path.exists()]
    for path in found:
        if nanobind_tag(path) == wanted:
            return path
    known = listed or next(reversed(releases().values()))
    if not found:
        sys.exit(f"nanobind is not installed for {sys.executable}: pip install nanobind=={known}")
    sys.exit(
        f"nanobind {installed('nanobind') or listed} has the internals tag v{nanobind_tag(found[0])}, mlx {release} "
        f"was built with v{wanted}: install the nanobind that carries v{wanted}"
        + (f" (pip install nanobind=={listed})" if listed else "")
    )


def check_oldest(release: str) -> None:
    """Exits where a release is older than all that are known."""
    oldest = next(iter(releases()))
    if numbers(release) < numbers(oldest):
        sys.exit(
            f"mlx {release} is installed for {sys.executable}: mlx_mittens can be built for mlx {oldest} or later "
            f'(pip install "mlx=={oldest}", on Linux "mlx[cpu]=={oldest}")'
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--releases", default="", help="with commas between them (the one that is installed)")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("unpacked"), help="where they are unpacked")
    arguments = parser.parse_args()
    wanted = [release for release in arguments.releases.split(",") if release] or [installed("mlx")]
    if wanted == [""]:
        sys.exit(f"mlx is not installed for {sys.executable}: pip install mlx")
    for release in sorted(wanted, key=numbers):
        check_oldest(release)
        mlx = mlx_of(release, arguments.folder)
        print(release, mlx, nanobind_of(release, mlx, arguments.folder), sep=";")


if __name__ == "__main__":
    main()
