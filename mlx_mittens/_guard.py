"""What must hold before the extension is loaded: it was built, and for the MLX that is installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pathlib
import re
import sys

# Packages that bring mlx/lib/libmlx.so, and the extra of mlx that requires each.
_BACKENDS = {"mlx-cpu": "cpu", "mlx-cuda-12": "cuda12", "mlx-cuda-13": "cuda13"}


def _refusal(text: str) -> ImportError:
    """With the package's name, `python -m mlx_mittens` says the sentence without a traceback."""
    return ImportError(text, name="mlx_mittens")


def check_built() -> None:
    """Raises ImportError where the extension is missing, as in a source tree that was not built."""
    if importlib.util.find_spec("mlx_mittens._ext") is None:
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


def check_mlx(built_for: str) -> None:
    """Raises ImportError unless the MLX that is installed is the one that the extension was built for."""
    try:
        installed = importlib.metadata.version("mlx")
    except importlib.metadata.PackageNotFoundError:
        raise _refusal(
            f'mlx_mittens needs MLX: pip install "mlx=={built_for}" (on Linux "mlx[cpu]=={built_for}")'
        ) from None
    if installed != built_for:
        # The build refuses an older one than it was written for.
        rebuild = f", or rebuild mlx_mittens from source against mlx {installed}"
        raise _refusal(
            f"mlx_mittens was built for mlx {built_for}, installed is mlx {installed}. MLX keeps no binary "
            f'compatibility between releases: pip install "mlx=={built_for}" (on Linux "mlx[cpu]=={built_for}" or '
            f'"mlx[cuda13]=={built_for}"){rebuild if _numbers(installed) > _numbers(built_for) else ""}.'
        )


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check_libmlx() -> None:
    """Raises ImportError where Linux has MLX's Python part without its library, or with that of another release."""
    version = importlib.metadata.version("mlx")
    spec = importlib.util.find_spec("mlx")
    if spec is None:
        raise _refusal(f"MLX {version} is installed without its files: pip install --force-reinstall mlx=={version}")
    if sys.platform != "linux":
        return
    installed = {package: its for package in _BACKENDS if (its := _installed(package))}
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


def check_tag(extension, mlx_core) -> None:
    """Raises ImportError unless nanobind objects of the extension and of mlx.core are of one kind."""
    if type(extension.simulator_enabled) is not type(mlx_core.add):
        raise _refusal(
            "mlx_mittens was built with a nanobind whose internals differ from those of the installed mlx.core, so it "
            "could take none of its arrays. Install both again: pip install --force-reinstall "
            f'"mlx=={importlib.metadata.version("mlx")}", then mlx_mittens as before.'
        )
