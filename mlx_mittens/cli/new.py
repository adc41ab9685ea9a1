"""New: the files of a new op in a clone of the repository, which build and pass their tests as written."""

from __future__ import annotations

import argparse
import ast
import builtins
import keyword
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import mlx_mittens

from ..frontend import library
from .completion import offer
from .options import UsageError, listed

FAMILIES = ("norm", "matmul", "attention", "cache")

SKELETONS = Path("tools", "skeletons")  # below a clone

# Uses every public name, for a type checker.
_TYPED = "tests/typing/every_name.py"

# Placeholders of the skeletons for the op's name and its class's.
_NAME, _CLASS = "op_name", "OpName"

# Words of an op's name: what mm.stats() makes of the class's name is the op's again.
_IDENTIFIER = re.compile(r"[a-z][a-z0-9]*(_[a-z][a-z0-9]*)*")

# Keywords and types of C++ and of its dialect Metal, and functions of Metal that the front end makes by macros.
_RESERVED = set(
    """
    alignas alignof and and_eq asm atomic auto bfloat bitand bitor bool break case catch char class co_await
    co_return co_yield compl concept const const_cast consteval constant constexpr constinit continue decltype
    default delete device do double dynamic_cast else enum explicit export extern false final float for friend goto
    half if import inline int intersector kernel long main module mutable namespace new noexcept not not_eq nullptr
    object_data operator or or_eq override patch private protected ptrdiff_t public ray_data register
    reinterpret_cast requires restrict return sampler short signed size_t sizeof static static_assert static_cast
    std struct switch template this thread thread_local threadgroup threadgroup_imageblock throw true try typedef
    typeid typename typeof uchar uint ulong union unsigned ushort using vertex fragment virtual void volatile
    wchar_t while xor xor_eq

    acos acosh asin asinh atan atan2 atanh ceil copysign cos cosh cospi divide exp exp10 exp2 fabs fdim floor fma fmax
    fmin fmod fract frexp ilogb isfinite isinf isnan isnormal isordered isunordered ldexp log log10 log2 max max3
    median3 min min3 modf nextafter pow powr rint round rsqrt sign signbit sin sincos sinh sinpi sqrt tan tanh tanpi
    trunc
    """.split()
)

# Families of such names.
_RESERVED_PATTERN = re.compile(
    r"(packed_)?(bool|u?char|u?short|u?int|u?long|half|b?float)[234](x[234])?|u?int(8|16|32|64|ptr)?_t|"
    r"(simd|quad|simdgroup|quadgroup|threadgroup|atomic)_\w+|"
    r"(texture|depth)(1d|2d|3d|cube|_buffer).*|(char|nullptr|wint|true|false)(8|16|32)?_t(ype)?"
)

# Names of imports in tests and modules.
_IMPORTS = {"mlx", "mlx_mittens", "mm", "mx", "nb", "np", "numpy", "pytest", "specs"}

# Functions, macros and types that C++ or Metal code declares or calls, and types of C++ that a class could hide.
_DECLARED = re.compile(r"\b([a-z]\w*)\s*\(|\b(?:class|define|enum|namespace|struct|using)\s+([a-z]\w*)")
_TYPE = re.compile(r"\b(?:class|struct|typename|using)\s+([A-Z]\w*)\b(?!::)")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="of the op and of its kernel: lower-case words joined by _")
    family = parser.add_argument("--family", required=True, metavar="F", help=f"one of {', '.join(FAMILIES)}")
    offer(family, lambda _: FAMILIES)


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


def _code(path: Path) -> str:
    """Text of a file of C++ or Metal without its comments."""
    return _COMMENT.sub("", path.read_text(encoding="utf-8"))


def _declared(path: Path) -> set[str]:
    """The functions, macros and types of a file of Metal."""
    return {function or other for function, other in _DECLARED.findall(_code(path))}


def _is_word(name: str, family: str, root: Path) -> bool:
    """Whether a name means something in Python, C++ or Metal, so that it cannot name a function or a kernel."""
    if keyword.iskeyword(name) or keyword.issoftkeyword(name) or hasattr(builtins, name):
        return True
    if name in _RESERVED or _RESERVED_PATTERN.fullmatch(name):
        return True
    headers = (library.INCLUDE / "metal").glob("*.h")
    return any(name in _declared(path) for path in (*headers, root / SKELETONS / family / f"{_NAME}.metal.in"))


def _bound(module: Path) -> set[str]:
    """The names that a module defines or imports."""
    names = set()
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        else:
            names |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
    return names


def _existing(name: str, family: str, root: Path) -> str | None:
    """The uses of a name in a clone, in any family, if there are any."""
    for other in FAMILIES:
        for path in files(name, other):
            if (root / path).exists():
                return f"{path} is there"
        declarations = root / "mlx_mittens" / "ops" / f"{other}.py"
        if re.search(rf"^def {name}\(", declarations.read_text(encoding="utf-8"), re.M):
            return f"{declarations.relative_to(root)} declares it"
    for folder in ("mlx_mittens", "mlx_mittens/ops", "mlx_mittens/specs"):
        for path in (f"{folder}/{name}.py", f"{folder}/{name}"):
            if (root / path).exists():
                return f"{path} is there"
    for module, new in (("ops", {name}), ("specs", {f"_{name}", f"_mx_{name}", f"_{name}_vjp"})):
        used = sorted(new & _bound(root / "mlx_mittens" / module / f"{family}.py"))
        if used:
            return f"mlx_mittens/{module}/{family}.py has {used[0]}"
    for header in sorted((root / "metal").rglob("*.h")):
        if name in _declared(header):
            return f"{header.relative_to(root)} uses it"
    for header in sorted((root / "csrc").rglob("*.h")):
        if _class_name(name) in _TYPE.findall(_code(header)):
            return f"{header.relative_to(root)} has a type {_class_name(name)}"
    if hasattr(mlx_mittens, name):
        return "mlx_mittens has something else of that name"
    return None


def _check(name: str, family: str, root: Path) -> None:
    """Refuses arguments that would not become an op.

    Raises:
        UsageError: The family is not known, or the name is invalid, or there is something of that name.
    """
    if family not in FAMILIES:
        raise UsageError(f"--family: there is no family {family!r}; {listed(family, FAMILIES)}")
    if not _IDENTIFIER.fullmatch(name):
        raise UsageError(
            f"{name!r} is no name for an op: expected words of lower-case letters and digits, joined by _, each of "
            "which begins with a letter, as l2_norm"
        )
    if name in ("op", _NAME):
        raise UsageError(f"{name!r} stands for a name in the skeletons: choose another name")
    if _is_word(name, family, root):
        raise UsageError(f"{name!r} is a word of Python, C++ or Metal: choose another name")
    if name in _IMPORTS:
        raise UsageError(f"{name!r} is a name of an import in modules and tests: choose another name")
    existing = _existing(name, family, root)
    if existing:
        raise UsageError(f"{name!r} exists: {existing}")
    if name in FAMILIES or name == "custom":
        raise UsageError(f"{name!r} is a family of ops: choose another name")


def _class_name(name: str) -> str:
    """That of the op's primitive in C++."""
    return "".join(word.capitalize() for word in name.split("_"))


def _skeleton(root: Path, family: str, file: str, name: str) -> str:
    """A skeleton with the names of an op."""
    text = (root / SKELETONS / family / file).read_text(encoding="utf-8")
    return text.replace(_NAME, name).replace(_CLASS, _class_name(name))


def _with_export(text: str, name: str) -> str:
    """A module of ops whose ``__all__`` has one name more."""
    found = re.search(r"^__all__ = \[(.*?)\]", text, re.M | re.S)
    assert found, "a module of ops has __all__"
    names = sorted([*re.findall(r'"(\w+)"', found[1]), name])
    return text[: found.start(1)] + ", ".join(f'"{one}"' for one in names) + text[found.end(1) :]


def _with_import(text: str, module: str, names: set[str], after: str) -> str:
    """A module that imports these names of another of its package, where it does not yet."""
    names_there = r"(\([^)]*\)|.*)\n"  # on several lines, or on one
    found = re.search(rf"^from {re.escape(module)} import {names_there}", text, re.M)
    if found:
        names = names | set(re.findall(r"\w+", found[1]))
    rank = lambda name: (not name.isupper(), not name[0].isupper(), name)  # constants, classes, functions
    wanted = f"from {module} import {', '.join(sorted(names, key=rank))}\n"
    if found:
        return text.replace(found[0], wanted)
    before = re.search(rf"^from {re.escape(after)} import {names_there}", text, re.M)
    assert before, f"the module imports from {after}"
    return text[: before.end()] + wanted + text[before.end() :]


def write(name: str, family: str, root: Path) -> list[str]:
    """Writes an op into a clone; returns the paths of new and changed files."""
    ops, specs = f"mlx_mittens/ops/{family}.py", f"mlx_mittens/specs/{family}.py"
    texts = {path: _skeleton(root, family, file, name) for path, file in files(name, family).items()}
    declarations, rows = ((root / path).read_text(encoding="utf-8") for path in (ops, specs))
    declarations = _with_import(declarations, "._declaration", {"StreamOrDevice", "defined_in_extension"}, "..")
    texts[ops] = _with_export(declarations, name) + _skeleton(root, family, "declaration.py.in", name)
    row = _skeleton(root, family, "row.py.in", name)
    if "ShapedOp(" in row:
        rows = _with_import(rows, ".shaped", {"ShapedOp"}, ".op")
    if f"ours={name}," in row:
        rows = _with_import(rows, f"..ops.{family}", {name}, "..ops")
    rows = _with_import(rows, ".op", {"Case", "Exact", "cases_for_tests"} & set(re.findall(r"\w+", row)), ".op")
    texts[specs] = rows + row
    typed = root / _TYPED
    if typed.is_file():
        texts[_TYPED] = typed.read_text(encoding="utf-8") + _skeleton(root, family, "typed.py.in", name)
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
    """Writes the op and prints the next steps."""
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
