"""The commands and snippets of the documentation: where they stand, how they are run, and how they are checked.

A command that is not run is checked: its options against the program's own parser, its files against the clone, its
extras and settings against pyproject.toml.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from packaging.requirements import Requirement

from mlx_mittens import specs
from mlx_mittens.bench import machine
from mlx_mittens.cli import bench, check, doctor, main, simulate

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))

# What a command of a page has in the place of the reader's own words, and a word to check the command with.
PLACEHOLDERS = {
    "FILE.metal": "metal/norm/softmax.metal",
    "FILE.json": "bench/results/h200.json",
    "FOLDER": "folder",
    "COMMAND": "bench",
    "CASE": "512x4096",
    "MODEL": "qwen3-0.6b",
    "OP": "softmax",
    "N": "1",
    "l2_norm": "rms_norm",  # the op that docs/adding-a-kernel.md adds
}


class Broken(AssertionError):
    """A command or a snippet of the documentation is wrong."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: The file.
        line: The number of its first line in the page, after the fence.
        language: As the fence says.
        text: Its lines.
    """

    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        page = self.page.relative_to(ROOT) if self.page.is_relative_to(ROOT) else self.page.name
        return f"{page}:{self.line}"

    @property
    def is_test_file(self) -> bool:
        """Whether the reader saves it and runs pytest on it."""
        return self.language == "python" and self.test_file != ""

    @property
    def test_file(self) -> str:
        """The name of the file of tests that it is, or an empty string."""
        found = re.search(r"^def (test_\w+)\(", self.text, re.M)
        return f"{found[1]}.py" if found else ""


@dataclass(frozen=True)
class Command:
    """A command of a page.

    Attributes:
        place: Page and line.
        text: As it is written.
    """

    place: str
    text: str

    @property
    def program(self) -> str:
        """The command without the variables that it sets."""
        return re.sub(r"^(?:[A-Z_]+=\S+ )+", "", self.text)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that it sets."""
        return dict(word.split("=", 1) for word in self.text.removesuffix(self.program).split())

    @property
    def has_placeholders(self) -> bool:
        return self.filled().text != self.text

    def filled(self) -> Command:
        """The command with words in the place of its placeholders."""
        text = self.text
        for name, word in PLACEHOLDERS.items():
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", word, text)
        return Command(self.place, text)


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page.

    Raises:
        Broken: A block does not end.
    """
    found, lines = [], page.read_text().splitlines()
    start = None
    for number, line in enumerate(lines):
        if not line.lstrip().startswith("```"):
            continue
        if start is None:
            start, language = number, line.strip().lstrip("`").strip()
        else:
            text = textwrap.dedent("\n".join(lines[start + 1 : number]))
            found.append(Block(page, start + 2, language, text + "\n"))
            start = None
    if start is not None:
        raise Broken(f"{page}:{start + 1}: the block does not end")
    return found


def commands(block: Block) -> Iterator[Command]:
    """The commands of a block of bash: one a line, or several joined by &&."""
    for line in re.sub(r"\\\n\s*", " ", block.text).splitlines():
        line = re.sub(r"(^|\s+)#.*", "", line)
        for text in re.split(r"\s*&&\s*", line):
            if text.strip():
                yield Command(block.place, text.strip())


_PROGRAMS = ("mlx-mittens", "pip", "python", "python3", "pytest", "pre-commit", "mkdocs", "bench/gpu.sh")
_SPAN = re.compile(rf"`((?:[A-Z_]+=\S+ )*(?:{'|'.join(map(re.escape, _PROGRAMS))})(?: [^`]*)?)`")


def inline_commands(page: Path) -> Iterator[Command]:
    """The commands in the sentences and tables of a page."""
    fenced = False
    for number, line in enumerate(page.read_text().splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            for found in _SPAN.finditer(line):
                place = f"{page.relative_to(ROOT)}:{number}"
                yield Command(place, found[1].replace("\\|", "|").removesuffix(" ..."))


def python_names() -> list[str]:
    """The names of this package in the sentences and tables of all pages, and those that API pages document."""
    spans = [span for page in PAGES for span in re.findall(r"`([^`\n]+)`", page.read_text())]
    found = {f"mlx_mittens{name}" for span in spans for name in re.findall(r"^(?:mm|mlx_mittens)((?:\.\w+)+)", span)}
    found -= {"mlx_mittens.NAME", "mlx_mittens.metallib"}  # any of them; a file
    return sorted(found.union(*(re.findall(r"^::: ([\w.]+)$", page.read_text(), re.M) for page in PAGES)))


# Runs the snippets of a page one after the other, each as a program of its own; errors name the line of the page.
_RUN = """
import json, sys
for page, line, text in json.load(sys.stdin):
    exec(compile("\\n" * (line - 1) + text, page, "exec"), {"__name__": "__main__"})
"""


def run_python(found: Sequence[Block], folder: Path) -> str:
    """Runs the Python blocks of a page in one process; returns what they print."""
    given = json.dumps([(str(block.page), block.line, block.text) for block in found])
    done = subprocess.run([sys.executable, "-c", _RUN], input=given, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise Broken(f"{found[0].place} ends with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def run_tests(block: Block, folder: Path, environment: dict[str, str]) -> None:
    """Saves a block as the file of tests that it is, and runs pytest on it."""
    (folder / block.test_file).write_text(block.text)
    run_command(Command(block.place, f"pytest {block.test_file}"), folder, environment)


def run_command(command: Command, folder: Path, environment: dict[str, str]) -> str:
    """Runs a command by bash; returns what it prints."""
    line = ["bash", "-euo", "pipefail", "-c", command.text]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=240)
    if done.returncode:
        raise Broken(f"{command.place}: {command.text}\nends with {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def make_programs(folder: Path) -> dict[str, str]:
    """Writes the programs that commands name, for this Python; returns an environment that finds them first."""
    folder.mkdir()
    for name in ("python", "python3"):
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    scripts = {"pytest": ("pytest", "console_main"), "mlx-mittens": ("mlx_mittens_cli", "main")}
    for name, (module, function) in scripts.items():
        code = f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n"
        (folder / name).write_text(f"#!{sys.executable}\n{code}")
    for path in folder.iterdir():
        path.chmod(0o755)
    return {**os.environ, "PATH": os.pathsep.join([str(folder), os.environ["PATH"]])}


def make_clone(folder: Path) -> None:
    """Makes a folder with what a clone has, into which commands may write."""
    folder.mkdir()
    for path in ROOT.iterdir():
        if path.name not in (".git", "build", ".pytest_cache", "__pycache__"):
            (folder / path.name).symlink_to(path)


def project() -> dict:
    """What pyproject.toml says."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


class _Parser(argparse.ArgumentParser):
    """Says what is wrong by an exception."""

    def error(self, message: str):
        raise Broken(message)


def check_pip(words: Sequence[str]) -> None:
    """Extras, packages, versions and settings are those of pyproject.toml."""
    parser = _Parser(prog="pip", add_help=False)
    parser.add_argument("verb", choices=("install", "wheel"))
    parser.add_argument("requirements", nargs="*")
    parser.add_argument("-e", "--editable", nargs="?")
    parser.add_argument("-C", "--config-settings", action="append", default=[])
    parser.add_argument("--force-reinstall", action="store_true")
    asked = parser.parse_args(words[1:])
    settings = project()
    known = [*settings["build-system"]["requires"], *settings["project"]["dependencies"]]
    extras = settings["project"]["optional-dependencies"]
    known = [Requirement(text) for text in (*known, *(text for some in extras.values() for text in some))]
    for text in (*asked.requirements, *filter(None, [asked.editable])):
        local = re.fullmatch(r"\.(?:\[([\w,]+)\])?", text)
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
    for text in asked.config_settings:
        name = text.partition("=")[0]
        if name not in settings["tool"]["scikit-build"]["config-setting"]:
            raise Broken(f"-C {text}: pyproject.toml has no config setting {name}")


def check_pytest(words: Sequence[str]) -> None:
    """Files are there, or are those that a page has the reader save; markers are pyproject.toml's."""
    parser = _Parser(prog="pytest", add_help=False)
    parser.add_argument("paths", nargs="*")
    parser.add_argument("-m", dest="marker")
    parser.add_argument("-k", dest="keyword")
    parser.add_argument("-n", dest="workers", choices=("auto", "1", "2"))
    asked = parser.parse_args(words[1:])
    saved = {block.test_file for page in PAGES for block in blocks(page) if block.is_test_file}
    for path in asked.paths:
        if path not in saved:
            check_file(path)
    markers = [text.partition(":")[0] for text in project()["tool"]["pytest"]["ini_options"]["markers"]]
    if asked.marker and asked.marker not in markers:
        raise Broken(f"-m {asked.marker}: pyproject.toml has the markers {', '.join(markers)}")


def check_metal(block: Block, folder: Path, environment: dict[str, str]) -> None:
    """A Mac's compiler would take the kernels of a block."""
    (folder / "block.metal").write_text(block.text)
    run_command(Command(block.place, "mlx-mittens check block.metal"), folder, environment)


def check_file(path: str) -> None:
    """A path is that of a file or folder of the repository."""
    if not (ROOT / path).exists():
        raise Broken(f"{path} is not in the repository")


class _Accepted(Exception):
    """A command has accepted its arguments."""


def _accept(*_: object) -> None:
    raise _Accepted


def check_mlx_mittens(words: Sequence[str]) -> None:
    """The command accepts its arguments; those of `bench` and `doctor` up to the point at which work begins."""
    if words[1:] == []:
        return
    with (
        mock.patch.object(machine, "describe", _accept),
        mock.patch.object(machine, "versions", _accept),
        mock.patch.object(bench, "select_device", lambda name: None),
        mock.patch.object(doctor, "select_device", lambda name: None),
        mock.patch.object(bench, "_check_peer", lambda *_: None),  # needs a GPU
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
    simulate.find_case(specs.get(arguments.op), arguments.case)
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
    }
    try:
        checks.get(words[0], lambda words: _unknown(command))(words)
    except Broken as broken:
        raise Broken(f"{command.place}: {command.text}\n{broken}") from None


def _unknown(command: Command) -> None:
    raise Broken(f"nothing here knows how to check {command.text!r}")
