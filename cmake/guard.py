"""Prints MLX's version, its folder and nanobind's, as a CMake list; exits with a message where they do not fit."""

import importlib.metadata
import importlib.util
import pathlib
import re
import sys

# The first with mx::allocator::Data, which csrc/mlx_internals holds.
OLDEST_MLX = "0.32.4"


def numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def folder(package: str, holding: str) -> pathlib.Path:
    """The package's folder with such a file: mlx is a namespace, of which a stray folder may be a part."""
    spec = importlib.util.find_spec(package)
    for location in spec.submodule_search_locations if spec else []:
        if any(pathlib.Path(location).glob(holding)):
            return pathlib.Path(location)
    sys.exit(f"{package} is not installed for {sys.executable}: pip install {package}")


def nanobind_tag_of_mlx(mlx: pathlib.Path) -> int:
    library = next(mlx.glob("core.*.so"))
    # The tag ends the ABI name that nanobind keeps in the binary: ..._v22
    tags = re.findall(rb"nanobind_[A-Za-z0-9_+]*_v(\d+)\x00", library.read_bytes())
    if not tags:
        sys.exit(f"nanobind's tag was not found in {library}: this mlx is not one that mlx_mittens knows")
    return int(tags[0])


def nanobind_tag(nanobind: pathlib.Path) -> int:
    header = (nanobind / "src" / "nb_internals.h").read_text()
    return int(re.search(r"#\s*define NB_INTERNALS_VERSION (\d+)", header)[1])


def main() -> None:
    mlx, nanobind = folder("mlx", "core.*.so"), folder("nanobind", "src/nb_internals.h")
    version = importlib.metadata.version("mlx")
    if numbers(version) < numbers(OLDEST_MLX):
        sys.exit(
            f"mlx {version} is installed for {sys.executable}: mlx_mittens can be built for mlx {OLDEST_MLX} or later "
            f'(pip install "mlx=={OLDEST_MLX}", on Linux "mlx[cpu]=={OLDEST_MLX}")'
        )
    of_mlx, of_nanobind = nanobind_tag_of_mlx(mlx), nanobind_tag(nanobind)
    if of_mlx != of_nanobind:
        sys.exit(
            f"nanobind {importlib.metadata.version('nanobind')} has the internals tag v{of_nanobind}, "
            f"mlx {version} was built with v{of_mlx}: install the nanobind that carries v{of_mlx} "
            "(for mlx 0.32.4: pip install nanobind==3.1.0)"
        )
    if not any((mlx / "lib" / name).exists() for name in ("libmlx.so", "libmlx.dylib")):
        sys.exit(f'libmlx is not installed beside mlx {version}: pip install "mlx[cpu]=={version}"')
    print(version, mlx, nanobind, sep=";")


if __name__ == "__main__":
    main()
