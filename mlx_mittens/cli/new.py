"""New: the files of a new op in a clone of the repository, which build and pass their tests as written."""

from __future__ import annotations

import argparse
import keyword
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import mlx_mittens

from .options import UsageError

FAMILIES = ("norm", "matmul", "attention", "cache")

SKELETONS = Path(__file__).with_name("skeletons")

# What the skeletons have in the place of the op's name, and of its class's.
_NAME, _CLASS = "op_name", "OpName"

# Words of an op's name: what mm.stats() makes of the class's name is the op's again.
_IDENTIFIER = re.compile(r"[a-z][a-z0-9]*(_[a-z][a-z0-9]*)*")

# Of C++, and of its dialect Metal, where they are no keywords of Python too.
_RESERVED = {
    *(
        "alignas",
        "alignof",
        "asm",
        "auto",
        "bool",
        "case",
        "catch",
        "char",
        "concept",
        "const",
        "constant",
        "constexpr",
    ),
    *("decltype", "default", "delete", "device", "do", "double", "enum", "explicit", "export", "extern", "float"),
    *("friend", "goto", "half", "inline", "int", "kernel", "long", "mutable", "namespace", "new", "noexcept"),
    *("operator", "private", "protected", "public", "register", "requires", "short", "signed", "sizeof", "static"),
    *("struct", "switch", "template", "this", "thread", "threadgroup", "throw", "typedef", "typeid", "typename"),
    *("uint", "union", "unsigned", "using", "virtual", "void", "volatile"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="of the op and of its kernel: lower-case words joined by _")
    parser.add_argument("--family", required=True, metavar="F", help=f"one of {', '.join(FAMILIES)}")


def _clone() -> Path:
    """The clone that the current folder is in."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if all((folder / part).is_dir() for part in ("metal", "csrc/ops", "mlx_mittens/specs", "tests/unit")):
            return folder
    raise UsageError(f"{here} is not in a clone of the mlx-mittens repository: change to the folder of one")


def files(name: str, family: str) -> dict[str, str]:
    """The files that an op has of its own, by their paths, and the skeleton of each."""
    return {
        f"metal/{family}/{name}.metal": f"{_NAME}.metal.in",
        f"csrc/ops/{family}/{name}.cpp": f"{_NAME}.cpp.in",
        f"tests/unit/{family}/test_{name}.py": f"test_{_NAME}.py.in",
    }


def _check(name: str, family: str, root: Path) -> None:
    """Refuses what would not become an op.

    Raises:
        UsageError: The family is not known, or the name is none, or there is something of that name.
    """
    if family not in FAMILIES:
        raise UsageError(f"--family: there is no family {family!r}; the families are {', '.join(FAMILIES)}")
    if not _IDENTIFIER.fullmatch(name):
        raise UsageError(
            f"{name!r} is no name for an op: expected words of lower-case letters and digits, joined by _, each of "
            "which begins with a letter, as l2_norm"
        )
    if keyword.iskeyword(name) or name in _RESERVED:
        raise UsageError(f"{name!r} is a word of Python, C++ or Metal: choose another name")
    for other in FAMILIES:
        for path in files(name, other):
            if (root / path).exists():
                raise UsageError(f"{name!r} exists: {path} is there")
        declarations = root / "mlx_mittens" / "ops" / f"{other}.py"
        if re.search(rf"^def {name}\(", declarations.read_text(), re.M):
            raise UsageError(f"{name!r} exists: {declarations.relative_to(root)} declares it")
    if hasattr(mlx_mittens, name):
        raise UsageError(f"{name!r} exists: mlx_mittens has something else of that name")


def _skeleton(family: str, file: str, name: str) -> str:
    """What a skeleton is for an op."""
    words = "".join(word.capitalize() for word in name.split("_"))
    text = (SKELETONS / family / file).read_text(encoding="utf-8")
    return text.replace(_NAME, name).replace(_CLASS, words)


def _with_export(text: str, name: str) -> str:
    """A module of ops whose ``__all__`` has one name more."""
    found = re.search(r"^__all__ = \[(.*?)\]", text, re.M | re.S)
    assert found, "a module of ops has __all__"
    names = sorted([*re.findall(r'"(\w+)"', found[1]), name])
    return text[: found.start(1)] + ", ".join(f'"{one}"' for one in names) + text[found.end(1) :]


def _with_import(text: str, module: str, names: set[str], after: str) -> str:
    """A module that imports these names of another of its package, where it does not yet."""
    line = re.search(rf"^from {re.escape(module)} import (.*)\n", text, re.M)
    if line:
        names = names | set(line[1].split(", "))
    wanted = f"from {module} import {', '.join(sorted(names))}\n"
    if line:
        return text.replace(line[0], wanted)
    return re.sub(
        rf"^(from {re.escape(after)} import .*\n)", lambda found: found[1] + wanted, text, count=1, flags=re.M
    )


def write(name: str, family: str, root: Path) -> list[str]:
    """Writes an op into a clone; the paths of what was written or changed."""
    ops, specs = f"mlx_mittens/ops/{family}.py", f"mlx_mittens/specs/{family}.py"
    texts = {path: _skeleton(family, file, name) for path, file in files(name, family).items()}
    declarations, rows = ((root / path).read_text(encoding="utf-8") for path in (ops, specs))
    declarations = _with_import(declarations, "._declaration", {"StreamOrDevice", "defined_in_extension"}, "..")
    texts[ops] = _with_export(declarations, name) + _skeleton(family, "declaration.py.in", name)
    row = _skeleton(family, "row.py.in", name)
    if "ShapedOp(" in row:
        rows = _with_import(rows, ".shaped", {"ShapedOp"}, ".op")
    texts[specs] = rows + row
    for path, text in texts.items():
        (root / path).write_text(text, encoding="utf-8")
    _format(root, list(texts))
    return list(texts)


def _format(root: Path, paths: list[str]) -> None:
    """Breaks lines as the names' lengths need it, with the formatters of the extra ``test`` that are here."""
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    for command, ending in ((["ruff", "format", "--quiet", "--no-cache"], ".py"), (["clang-format", "-i"], ".cpp")):
        program = shutil.which(command[0], path=programs)
        if program:
            mine = [path for path in paths if path.endswith(ending)]
            subprocess.run([program, *command[1:], *mine], cwd=root, check=True)


def run(arguments: argparse.Namespace) -> int:
    """Writes the op and says what comes next."""
    root = _clone()
    name, family = arguments.name, arguments.family
    _check(name, family, root)
    written = write(name, family, root)
    print("\n".join(written))
    print(
        f"\nBuild it, and run its test, which passes as it is:\n"
        f"  pip install -e .\n"
        f"  pytest tests/unit/{family}/test_{name}.py\n"
        "docs/adding-a-kernel.md says what to change, and how to check it."
    )
    return 0
