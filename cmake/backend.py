"""The build backend: scikit-build-core's, which gets mlx and nanobind for each release that is built.

The config setting `mittens.releases` names them, or the environment variable MLX_MITTENS_MLX: a list with commas, or
`all` that cmake/mlx_releases.txt has. Without either it is the release that is installed where the package is going to
be, or, where there is none, the newest one. A release that is not installed where the build runs is downloaded by pip,
below the folder `build`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import pathlib
import platform
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from typing import Any

import guard
from scikit_build_core import build as skbuild
from scikit_build_core.build import build_sdist, get_requires_for_build_sdist

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = dict[str, Any]

ROOT = pathlib.Path(__file__).resolve().parents[1]
_SETTING, _VARIABLE = "mittens.releases", "MLX_MITTENS_MLX"

# mlx needs glibc 2.35, which only its tag says.
_GLIBC = ("2_35", "2_28", "2_17")


def _without_own(settings: Settings | None) -> Settings:
    """The settings that are scikit-build-core's."""
    return {name: value for name, value in (settings or {}).items() if name != _SETTING}


def _target() -> str:
    """The version of mlx where the package is going to be; empty if there is none.

    An isolated build does not see that environment: pip runs it by the Python of the environment, and other tools
    leave its name in VIRTUAL_ENV.
    """
    if found := guard.installed("mlx"):
        return found
    own = [sysconfig.get_path(kind) for kind in ("purelib", "platlib")]
    named = os.environ.get("VIRTUAL_ENV", sys.prefix)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    places = [*own, f"{named}/lib/{version}/site-packages"]
    return next((found.version for found in importlib.metadata.distributions(name="mlx", path=places)), "")


def chosen(settings: Settings | None) -> list[str]:
    """The releases to build for, oldest first."""
    known = guard.releases()
    asked = str((settings or {}).get(_SETTING) or os.environ.get(_VARIABLE, "")).replace(";", ",")
    if asked == "all":
        return list(known)
    found = [word.strip() for word in asked.split(",") if word.strip()] or [_target() or list(known)[-1]]
    if asked and (unknown := [release for release in found if release not in known]):
        raise SystemExit(
            f"{_VARIABLE} or {_SETTING} names mlx {', '.join(unknown)}: known are {', '.join(known)} "
            "(`python tools/next_mlx.py VERSION --write` adds one)"
        )
    for release in found:
        guard.check_oldest(release)
    return sorted(set(found), key=guard.numbers)


def _requirements(settings: Settings | None) -> list[str]:
    """What an isolated build gets from pip: one release, and pip for the others."""
    releases = chosen(settings)
    target = _target()
    first = target if target in releases else releases[-1]
    known = guard.releases()
    extra = "[cpu]" if sys.platform == "linux" else ""
    wanted = [f"mlx{extra}=={first}", f"nanobind=={known.get(first) or list(known.values())[-1]}"]
    return wanted + ["pip"] * (len(releases) > 1)


def _download(requirements: list[str], folder: pathlib.Path) -> None:
    """Unpacks wheels into a folder that is there only if all are in it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check"]
    machine = sysconfig.get_platform().rpartition("-")[2]
    if sys.platform == "linux" and machine != platform.machine():  # cross-compiled
        command += ["--implementation=cp", f"--python-version={sys.version_info.major}.{sys.version_info.minor}"]
        command += [f"--platform=manylinux_{version}_{machine}" for version in _GLIBC]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        wheels, site = pathlib.Path(scratch) / "wheels", pathlib.Path(scratch) / "site"
        done = subprocess.run([*command, "--dest", str(wheels), *requirements], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"pip cannot download {' and '.join(requirements)}:\n{done.stderr.strip()}")
        for wheel in wheels.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
        with contextlib.suppress(OSError):  # another build was first
            site.rename(folder)


def _missing(releases: list[str], folder: pathlib.Path) -> Iterator[tuple[list[str], pathlib.Path]]:
    """What to download for releases, and where to. The tag of a release is read once the caller has downloaded it."""
    library = {"linux": "mlx-cpu", "darwin": "mlx-metal"}.get(sys.platform, "mlx-cpu")
    here = guard.folder("nanobind", "src/nb_internals.h")
    for release in releases:
        mlx = guard.folder("mlx", "core.*.so")
        if release != guard.installed("mlx"):
            mlx = folder / f"mlx-{release}" / "mlx"
            yield [f"mlx=={release}", f"{library}=={release}"], folder / f"mlx-{release}"
        if nanobind := guard.releases().get(release):
            if here is None or mlx is None or guard.nanobind_tag(here) != guard.nanobind_tag_of_mlx(mlx):
                yield [f"nanobind=={nanobind}"], folder / f"nanobind-{nanobind}"


def _prepared(settings: Settings | None) -> Settings:
    """scikit-build-core's settings, once all that is built against is there."""
    releases, folder = chosen(settings), ROOT / "build" / "releases" / sysconfig.get_platform()
    for requirements, place in _missing(releases, folder):
        if not place.exists():
            _download(requirements, place)
    defined = {"MITTENS_RELEASES": ",".join(releases), "MITTENS_RELEASES_FOLDER": str(folder)}
    return {**_without_own(settings), **{f"cmake.define.{name}": value for name, value in defined.items()}}


def get_requires_for_build_wheel(config_settings: Settings | None = None) -> list[str]:
    return [*skbuild.get_requires_for_build_wheel(_without_own(config_settings)), *_requirements(config_settings)]


def get_requires_for_build_editable(config_settings: Settings | None = None) -> list[str]:
    return [*skbuild.get_requires_for_build_editable(_without_own(config_settings)), *_requirements(config_settings)]


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings | None = None) -> str:
    return skbuild.prepare_metadata_for_build_wheel(metadata_directory, _without_own(config_settings))


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: Settings | None = None) -> str:
    return skbuild.prepare_metadata_for_build_editable(metadata_directory, _without_own(config_settings))


def build_wheel(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    return skbuild.build_wheel(wheel_directory, _prepared(config_settings), metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    return skbuild.build_editable(wheel_directory, _prepared(config_settings), metadata_directory)
