"""Chooses the extension for the MLX that is installed, and says what to do where there is none."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import pathlib
import re
import sys
from collections.abc import Iterable, Mapping

_PREFIX = "_mlx_"  # of a folder that holds the extension for a release

# Packages that bring mlx/lib/libmlx.so, and the extra of mlx that requires each.
_BACKENDS = {"mlx-cpu": "cpu", "mlx-cuda-12": "cuda12", "mlx-cuda-13": "cuda13"}

_METADATA = re.compile(r"(mlx(?:_cpu|_cuda_1[23])?)-.+\.dist-info")


def _refusal(text: str) -> ImportError:
    """With the package's name, `python -m mlx_mittens` says the sentence without a traceback."""
    return ImportError(text, name="mlx_mittens")


def built(folders: Iterable[str]) -> dict[str, pathlib.Path]:
    """The extensions for this Python in the package's folders, by the release of MLX, oldest first.

    Raises:
        ImportError: There is none, as in a source tree that was not built.
    """
    found = {}
    for folder in map(pathlib.Path, folders):
        for inside in folder.glob(f"{_PREFIX}*"):
            files = (inside / f"_ext{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES)
            if file := next(filter(pathlib.Path.exists, files), None):
                found[inside.name.removeprefix(_PREFIX).replace("_", ".")] = file
    if found:
        return {release: found[release] for release in sorted(found, key=_numbers)}
    folder = pathlib.Path(__file__).parent
    if (folder.parent / "CMakeLists.txt").exists():
        raise _refusal(
            f"mlx_mittens is being imported from its source folder {folder.parent}, which holds no built extension."
            ' Build it in place with `pip install -e ".[cpu]"` (on a Mac without `[cpu]`), or, if it is installed '
            "already, start Python from another folder (the `mlx-mittens` command works from any)."
        )
    raise _refusal(
        f"mlx_mittens in {folder} has no extension for this Python, {sys.executable}: install it again with the "
        "Python that you use."
    )


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def chosen(extensions: Mapping[str, pathlib.Path]) -> pathlib.Path:
    """The extension for the MLX that is installed.

    Raises:
        ImportError: MLX is not installed, or there is none for its version.
    """
    newest = list(extensions)[-1]
    installed = _mlx_version(newest)
    if installed not in extensions:
        # The build refuses an older one than the code was written for.
        oldest = importlib.import_module(f"{__package__}._build").OLDEST_MLX
        rebuild = f", or build mlx_mittens from its source, beside mlx {installed}: pip install --no-deps ."
        raise _refusal(
            f"mlx_mittens was built for mlx {_listed(extensions)}, installed is mlx {installed}. MLX keeps no binary "
            f'compatibility between releases: pip install "mlx=={newest}" (on Linux "mlx[cpu]=={newest}" or '
            f'"mlx[cuda13]=={newest}"){rebuild if _numbers(installed) >= _numbers(oldest) else "."}'
        )
    return extensions[installed]


def _metadata() -> dict[str, list[pathlib.Path]]:
    """The metadata folders of MLX's packages, from the first part of the search path that has one of the package.

    Their names hold the versions. Importing importlib.metadata would take longer than all else that is done here.
    """
    found: dict[str, list[pathlib.Path]] = {}
    for place in sys.path:
        try:
            names = os.listdir(place or ".")
        except OSError:
            continue
        here: dict[str, list[pathlib.Path]] = {}
        for name in sorted(names):
            if match := _METADATA.fullmatch(name):
                here.setdefault(match[1].replace("_", "-"), []).append(pathlib.Path(place, name))
        found = {**here, **found}
    return found


def _versions() -> dict[str, str]:
    """The versions of MLX's packages that are installed."""
    named = {package: folders[0].name for package, folders in _metadata().items()}
    found = {package: name.partition("-")[2].removesuffix(".dist-info") for package, name in named.items()}
    return found if "mlx" in found else _versions_of_other_kinds()


def _versions_of_other_kinds() -> dict[str, str]:
    """The same where MLX is no folder of the search path, as in an editable or a zipped installation."""
    from importlib import metadata

    found = {}
    for package in ("mlx", *_BACKENDS):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _mlx_version(newest: str) -> str:
    """The version of the MLX that is installed.

    Raises:
        ImportError: None is, or its files are left over from several versions or from one that was removed.
    """
    folders = _metadata().get("mlx", [])
    if len(folders) > 1 or any(not (folder / "METADATA").exists() for folder in folders):
        raise _refusal(
            f"{folders[0].parent} has {_listed(folder.name for folder in folders)}, left by an installation that did "
            f"not end: remove {'them' if len(folders) > 1 else 'it'}, then pip install --force-reinstall "
            f'"mlx=={newest}" (on Linux "mlx[cpu]=={newest}")'
        )
    version = _versions().get("mlx")
    if version is None:
        raise _refusal(f'mlx_mittens needs MLX: pip install "mlx=={newest}" (on Linux "mlx[cpu]=={newest}")')
    return version


def _listed(releases: Iterable[str]) -> str:
    *others, last = releases
    return f"{', '.join(others)} and {last}" if others else last


def check_libmlx() -> None:
    """Raises ImportError where Linux has MLX's Python part without its library, or with another release's."""
    versions = _versions()
    version = versions["mlx"]
    spec = importlib.util.find_spec("mlx")
    if spec is None:
        raise _refusal(f"MLX {version} is installed without its files: pip install --force-reinstall mlx=={version}")
    if sys.platform != "linux":
        return
    installed = {package: versions[package] for package in _BACKENDS if package in versions}
    for package, its in installed.items():
        if its != version:
            _refuse_backend(version, package, its, [other for other in installed if installed[other] == version])
    folders = spec.submodule_search_locations or ()
    if not any((pathlib.Path(folder) / "lib" / "libmlx.so").exists() for folder in folders):
        raise _refusal(
            f'MLX {version} is installed without a backend: pip install "mlx[cpu]=={version}", '
            f'or "mlx[cuda13]=={version}" for an NVIDIA GPU.'
        )


def _refuse_backend(version: str, package: str, its: str, fitting: list[str]) -> None:
    """Both write one libmlx.so, and uninstalling one removes it."""
    if fitting:
        advice = f"pip uninstall --yes {package}, then pip install --force-reinstall --no-deps {fitting[-1]}=={version}"
    else:
        advice = f'pip install "mlx[{_BACKENDS[package]}]=={version}"'
    raise _refusal(
        f"mlx {version} is installed beside {package} {its}, whose library is of another release and does not fit it: "
        f"{advice}."
    )


def load(file: pathlib.Path) -> None:
    """Loads an extension as ``mlx_mittens._ext``, whichever release it is for."""
    name = f"{__package__}._ext"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    sys.modules[name] = extension
    try:
        spec.loader.exec_module(extension)
    except BaseException:
        del sys.modules[name]
        raise


def check_tag(extension, mlx_core) -> None:
    """Raises ImportError unless nanobind objects of the extension and of mlx.core are of one kind."""
    if type(extension.simulator_enabled) is not type(mlx_core.add):
        raise _refusal(
            "mlx_mittens was built with a nanobind whose internals differ from those of the installed mlx.core, so it "
            "could take none of its arrays. Install both again: pip install --force-reinstall "
            f'"mlx=={_versions()["mlx"]}", then mlx_mittens as before.'
        )
