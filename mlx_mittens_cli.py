# PYTHON_ARGCOMPLETE_OK
"""The entry point of the command: outside of mlx_mittens, to say in a sentence why that package cannot be imported."""

from __future__ import annotations

import sys
import warnings


def main() -> int:
    """Runs the command, or says why it cannot; the exit status is then 1."""
    try:
        with warnings.catch_warnings():
            if sys.argv[1:2] == ["calibrate"]:  # which makes the file, or says itself what is wrong with it
                warnings.filterwarnings("ignore", "The calibration ", RuntimeWarning)
            from mlx_mittens.cli.main import import_commands
            from mlx_mittens.cli.main import main as run

            import_commands()
    except ImportError as error:
        if sys.argv[1:2] == ["doctor"]:
            _say_what_is_installed()
        print(f"mlx-mittens: {error}", file=sys.stderr)
        return 1
    return run()


def _say_what_is_installed() -> None:
    import importlib.metadata
    import platform

    for package in ("mlx-mittens", "mlx", "numpy"):
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        print(f"{package:12} {version}")
    print(f"{'python':12} {platform.python_version()}, {sys.executable}")
    print(f"{'system':12} {platform.platform()}", flush=True)
