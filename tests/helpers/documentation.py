"""The commands and snippets of the documentation: where they stand, and how they are run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))

# Placeholders for the reader's own words in a page's commands, and a word to check each command with.
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
    """The names of this package in the sentences and tables of all pages, and the names that API pages document."""
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
    """Runs the Python blocks of a page in one process; returns their output."""
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
    """Runs a command by bash; returns its output."""
    line = ["bash", "-euo", "pipefail", "-c", command.text]
    done = subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
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


# The folders of a clone; a tree in which someone works may hold others, of any size.
FOLDERS = (".ci", "bench", "cmake", "csrc", "docs", "examples", "metal", "mlx_mittens", "tests")


def make_clone(folder: Path) -> None:
    """Makes a copy of a clone's files, so that commands do not write to the tree."""
    folder.mkdir()
    for path in ROOT.iterdir():
        if path.name in FOLDERS:
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.is_file() and path.name != ".git":
            shutil.copy(path, folder)


def check_metal(block: Block, folder: Path, environment: dict[str, str]) -> None:
    """A Mac's compiler would take the kernels of a block."""
    (folder / "block.metal").write_text(block.text)
    run_command(Command(block.place, "mlx-mittens check block.metal"), folder, environment)
