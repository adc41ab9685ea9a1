"""Checks of commands that are not run.

Options are checked by the program's own parser, files against the clone, extras and settings against pyproject.toml.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from packaging.requirements import Requirement

import mlx_mittens_pytest
from helpers.documentation import PAGES, ROOT, Broken, Command, blocks
from mlx_mittens import specs
from mlx_mittens.apple.chips import find_chip
from mlx_mittens.bench import machine
from mlx_mittens.cli import (
    agx_compiler,
    bench,
    bench_compare,
    bench_files,
    bench_predictions,
    calibrate,
    check,
    doctor,
    main,
    new,
    predicted_models,
    registers,
    simulate,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def project() -> dict:
    """The contents of pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


class _Parser(argparse.ArgumentParser):
    """Reports a mistake by an exception."""

    def error(self, message: str):
        raise Broken(message)


def check_pip(words: Sequence[str]) -> None:
    """Extras, packages, versions and settings are in pyproject.toml."""
    parser = _Parser(prog="pip", add_help=False)
    parser.add_argument("verb", choices=("install", "wheel"))
    parser.add_argument("requirements", nargs="*")
    parser.add_argument("-e", "--editable", nargs="?")
    parser.add_argument("-C", "--config-settings", action="append", default=[])
    for option in ("--force-reinstall", "--no-build-isolation", "--no-deps"):
        parser.add_argument(option, action="store_true")
    asked = parser.parse_args(words[1:])
    settings = project()
    known = [*settings["build-system"]["requires"], *settings["project"]["dependencies"]]
    extras = settings["project"]["optional-dependencies"]
    known = [Requirement(text) for text in (*known, *(text for some in extras.values() for text in some))]
    for text in (*asked.requirements, *filter(None, [asked.editable])):
        local = re.fullmatch(r"(?:\.|mlx-mittens)(?:\[([\w,]+)\])?", text)
        if local:
            missing = set(filter(None, (local[1] or "").split(","))) - set(extras)
            if missing:
                raise Broken(f"{text}: pyproject.toml has no extra {', '.join(sorted(missing))}; it has {list(extras)}")
            continue
        wanted = Requirement(text)
        if wanted.name == "pre-commit":
            check_file(".pre-commit-config.yaml")
        elif not any(r.name == wanted.name and str(wanted.specifier) in ("", str(r.specifier)) for r in known):
            raise Broken(f"{text}: pyproject.toml asks for no such package or version")
    backend = (ROOT / "cmake" / "backend.py").read_text()
    for text in asked.config_settings:
        name = text.partition("=")[0]
        if name not in settings["tool"]["scikit-build"]["config-setting"] and f'"{name}"' not in backend:
            raise Broken(f"-C {text}: there is no config setting {name} in pyproject.toml or cmake/backend.py")


def check_pytest(words: Sequence[str]) -> None:
    """Files are there, or a page has the reader save them; markers are pyproject.toml's."""
    parser = _Parser(prog="pytest", add_help=False)
    parser.add_argument("paths", nargs="*")
    parser.add_argument("-m", dest="marker")
    parser.add_argument("-k", dest="keyword")
    parser.add_argument("-n", dest="workers", choices=("auto", "1", "2"))
    mlx_mittens_pytest.pytest_addoption(
        SimpleNamespace(getgroup=lambda name: SimpleNamespace(addoption=parser.add_argument))
    )
    asked = parser.parse_args(words[1:])
    saved = {block.test_file for page in PAGES for block in blocks(page) if block.is_test_file}
    for path in asked.paths:
        if path not in saved:
            check_file(path)
    markers = [text.partition(":")[0] for text in project()["tool"]["pytest"]["ini_options"]["markers"]]
    if asked.marker and asked.marker not in markers:
        raise Broken(f"-m {asked.marker}: pyproject.toml has the markers {', '.join(markers)}")


def check_file(path: str) -> None:
    """A path names a file or folder of the repository."""
    if not (ROOT / path).exists():
        raise Broken(f"{path} is not in the repository")


class _Accepted(Exception):
    """A command has accepted its arguments."""


def _accept(*_: object, **__: object) -> None:
    raise _Accepted


def check_mlx_mittens(words: Sequence[str]) -> None:
    """The command accepts its arguments; `bench` and `doctor` run up to the point at which work begins."""
    if words[1:] == []:
        return
    if words[1:3] == ["run", "mlx_lm.server"]:
        return check_python(["python", "-c", "from mlx_lm.server import main; main()", *words[3:]], {})
    with (
        mock.patch.object(machine, "describe", _accept),
        mock.patch.object(machine, "versions", _accept),
        mock.patch.object(bench, "select_device", lambda name: None),
        mock.patch.object(doctor, "select_device", lambda name: None),
        mock.patch.object(bench, "_check_peer", lambda *_: None),  # needs a GPU
        mock.patch.object(bench_predictions, "run", _accept),
        mock.patch.object(predicted_models, "chosen_chips", _accept),
        mock.patch.object(bench_compare, "run", _accept),
        mock.patch.object(bench_files.Begun, "of", lambda path: None),
        mock.patch.object(agx_compiler, "run", _accept),
        mock.patch.object(calibrate, "_File", _accept),
        mock.patch.object(new, "run", _accept),
        mock.patch.object(registers, "run", _accept),
        mock.patch.object(simulate, "run", _check_case),
        mock.patch.object(check, "run", lambda arguments: [check_file(name) for name in arguments.files] and 0),
    ):
        try:
            status = main.main(list(words[1:]))
        except _Accepted:
            return
        except SystemExit as ended:
            status = ended.code
    if status:
        raise Broken(f"{shlex.join(words)}: ends with {status}")


def _check_case(arguments: argparse.Namespace) -> int:
    if arguments.case is not None:
        simulate.find_case(specs.get(arguments.op), arguments.case)
    for name in arguments.chip.split(",") if arguments.chip else ():
        find_chip(name)
    return 0


# Ends a program as soon as it has parsed its arguments.
_PARSE = """
import argparse, runpy, sys
parse_args = argparse.ArgumentParser.parse_args
def parse(self, *arguments, **options):
    parse_args(self, *arguments, **options)
    print("its arguments were parsed")
    sys.exit()
argparse.ArgumentParser.parse_args = parse
kind, program, *sys.argv[1:] = sys.argv[1:]
if kind == "-c":
    exec(program)
elif kind == "-m":
    sys.path.insert(0, "")
    runpy.run_module(program, run_name="__main__", alter_sys=True)
else:
    sys.path.insert(0, kind)
    runpy.run_path(program, run_name="__main__")
"""


def check_python(words: Sequence[str], variables: dict[str, str]) -> None:
    """The program's own parser accepts the arguments."""
    kind, *rest = words[1:]
    if [kind, *rest[:1]] == ["-m", "mlx_mittens"]:
        return check_mlx_mittens(words[2:])
    if kind not in ("-c", "-m"):
        check_file(kind)
        kind, rest = str(Path(kind).parent), [kind, *rest]
    command = [sys.executable, "-c", _PARSE, kind, *rest]
    environment = {**os.environ, **variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    if done.returncode or "its arguments were parsed" not in done.stdout:
        raise Broken(f"{shlex.join(words)}: its arguments are not accepted\n{done.stdout}{done.stderr}")


def _check_venv(words: Sequence[str]) -> None:
    if list(words[1:]) != ["-m", "venv", ".venv"]:
        raise Broken(f"{shlex.join(words)}: expected .venv, which .gitignore names")


def _check_pre_commit(words: Sequence[str]) -> None:
    if words[1:] not in (["install"], ["run", "--all-files"]):
        raise Broken(f"{shlex.join(words)}: expected install or run --all-files")
    check_file(".pre-commit-config.yaml")


def _check_mkdocs(words: Sequence[str]) -> None:
    if words[1:] != ["build", "--strict"]:
        raise Broken(f"{shlex.join(words)}: expected build --strict")
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in PAGES if page.is_relative_to(ROOT / "docs")}
    if listed != pages:
        raise Broken(f"mkdocs.yml and docs/ differ in {sorted(listed ^ pages)}")


def _check_completion(words: Sequence[str]) -> None:
    if words[1:] != ["$(register-python-argcomplete mlx-mittens)"]:
        raise Broken(f"{shlex.join(words)}: expected the line that argcomplete documents")
    if "PYTHON_ARGCOMPLETE_OK" not in (ROOT / "mlx_mittens_cli.py").read_text():
        raise Broken("mlx_mittens_cli.py has no PYTHON_ARGCOMPLETE_OK, which argcomplete looks for")


def _check_script(words: Sequence[str]) -> None:
    check_file(words[0])
    subprocess.run(["bash", "-n", ROOT / words[0]], check=True)


def check_command(command: Command) -> None:
    """Checks a command without running it.

    Raises:
        Broken: It would fail, or nothing here knows how to check it.
    """
    filled = command.filled()
    words = shlex.split(filled.program)
    checks: dict[str, Callable[[list[str]], None]] = {
        "mlx-mittens": check_mlx_mittens,
        "pip": check_pip,
        "pytest": check_pytest,
        "pre-commit": _check_pre_commit,
        "mkdocs": _check_mkdocs,
        "bench/gpu.sh": _check_script,
        "source": lambda words: None if words[1:] == [".venv/bin/activate"] else _unknown(command),
        "python": lambda words: check_python(words, filled.variables),
        "python3": _check_venv,
        "eval": _check_completion,
    }
    try:
        checks.get(words[0], lambda words: _unknown(command))(words)
    except Broken as broken:
        raise Broken(f"{command.place}: {command.text}\n{broken}") from None


def _unknown(command: Command) -> None:
    raise Broken(f"nothing here knows how to check {command.text!r}")
