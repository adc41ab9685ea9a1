"""Where .metal text comes from: the package's own files, and sources registered by name."""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import CompileError

_PACKAGE = Path(__file__).resolve().parents[2]
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"[^\n]*$', re.M)
_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.S)  # strings too, in which none begins
_LINE = re.compile(r'^#line (\d+) "([^"\n]*)"$', re.M)
_OTHER = re.compile(r"[^\x00-\x7f]")
_DIRECTIVES = re.compile(r"^[ \t]*#[ \t]*(?:line\b.*|pragma[ \t]+once[ \t]*)$", re.M)
_PRAGMA_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[ \t]*$", re.M)

_registered: dict[str, str] = {}
_folders: dict[str, Path] = {}  # of registered sources that are files: where their headers may stand
# Of a name: each text that was launched under it, with its folder, and the name of its own.
_launched: dict[str, dict[tuple[str, Path | None], str]] = {}


def metal_folder() -> Path:
    """The folder of our kernels: beside the installed package, or in the source tree that it was built from."""
    for folder in (_PACKAGE / "metal", _PACKAGE.parent / "metal"):
        if any(folder.rglob("*.metal")):
            return folder
    raise FileNotFoundError("mlx_mittens finds no folder of .metal files: reinstall the package")


def files() -> list[str]:
    """Our .metal files, by their paths below the folder of kernels."""
    folder = metal_folder()
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.metal"))


def is_for_apple(file: str) -> bool:
    """Whether plans for Apple GPUs alone launch the kernels of one of `files`: it is compiled to no PTX."""
    return "/apple/" in file


def is_for_matrix_units(file: str) -> bool:
    """Whether one of `files` is of Metal 4, for the matrix units of the M5: here the simulator alone runs it."""
    return "/m5/" in file


def register_source(name: str, text: str, folder: Path | None = None) -> None:
    """Makes a text known as a .metal file of this name, for as long as the process lives.

    Under the name of an earlier text it takes that one's place, once launches of that one have been evaluated.

    It may include our own headers ("mittens/..."), MLX's headers ("mlx/backend/metal/kernels/...") and the folder's
    headers.
    """
    _registered[name] = text
    if folder is not None:
        _folders[name] = folder
    else:
        _folders.pop(name, None)


def name_of_text(name: str) -> str:
    """The name that the text registered under a name is launched by: kernels once compiled are known by it.

    It is the name itself until another text is registered under it.
    """
    if name not in _registered:
        return name
    text, folder, names = _registered[name], _folders.get(name), _launched.setdefault(name, {})
    if (text, folder) not in names:
        names[text, folder] = f"{name} ({len(names) + 1})" if names else name
        register_source(names[text, folder], text, folder)
    return names[text, folder]


def is_registered(file: str) -> bool:
    """Whether the text of this name is a registered one."""
    return file in _registered


def without_comments(text: str) -> str:
    """The text with blanks in place of comments: every other character stays at its place."""
    return _COMMENT.sub(lambda m: re.sub(r"[^\n]", " ", m[0]) if m[0][0] == "/" else m[0], text)


def tokens(text: str) -> str:
    """The code of a text alone: neither comments, white space nor directives that say where its lines are from."""
    return "".join(_DIRECTIVES.sub("", without_comments(text)).split())


def source(file: str) -> str:
    """The text of a .metal file or registered source."""
    if file in _registered:
        return _registered[file]
    path = metal_folder() / file
    if not path.is_file():
        raise FileNotFoundError(f"there is no kernel file {file!r}: neither in {path.parent} nor registered")
    return path.read_text(encoding="utf-8")


def flatten(file: str, include: tuple[str, ...] = ()) -> str:
    """One text with our own headers inlined, each once, for Metal's run-time compiler, which resolves none.

    ``#line`` directives say where every line came from. Headers that are not ours stay included.

    Raises:
        CompileError: If a header is missing, or the text of one of our own files is not ASCII outside of comments.

    Example:
        >>> header = mm.frontend.flatten("mittens/tile.h")  # as the header of a kernel of mx.fast.metal_kernel
        >>> '#include "' in header
        False
    """
    where = metal_folder(), _folders.get(file), include, file
    known = _flattened.get(where)
    if known is None or any(_stamp(name, path) != stamp for name, path, stamp in known[1]):
        known = _flattened[where] = _flatten(file, [Path(folder) for folder in include])
    return known[0]


# Flattened texts, by folder and file, and whether any text in them has changed since.
_flattened: dict[tuple[object, ...], tuple[str, list[tuple[str, Path | None, object]]]] = {}


def _stamp(name: str, path: Path | None) -> object:
    if path is None:
        return _registered.get(name)
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_mtime_ns, status.st_size, name in _registered)


def _place(name: str, text: str, at: int) -> str:
    """File and line of a character of a text, as the text's own #line directives have it."""
    line, start = 1, 0
    for marker in _LINE.finditer(text, 0, at):
        name, line, start = marker[2], int(marker[1]), marker.end() + 1
    return f"{name}:{line + text.count(chr(10), start, at)}"


def _flatten(file: str, include: list[Path]) -> tuple[str, list[tuple[str, Path | None, object]]]:
    folder = metal_folder()
    first = None if file in _registered else folder / file
    stamps = [(file, first, _stamp(file, first))]
    included: set[Path] = set()

    def inline(name: str, text: str, at: Path) -> str:
        if not text.isascii():
            text = _COMMENT.sub(lambda m: _OTHER.sub("?", m[0]) if m[0][0] == "/" else m[0], text)
            other = None if file in _registered else _OTHER.search(text)
            if other:
                what = f"{other[0]!r} is not ASCII: it may stand in a comment only"
                raise CompileError(file, None, f"{_place(name, text, other.start())}: error: {what}")
        text = _PRAGMA_ONCE.sub("", text)
        parts, done = [f'#line 1 "{name}"\n'], 0
        for match in _INCLUDE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            header = next((p for p in (f / match[1] for f in (at, folder, *include)) if p.is_file()), None)
            parts.append(text[done : match.start()])
            done = match.end()
            if header is None:
                if not match[1].startswith(("mlx/", "metal_")):
                    what = f'there is no header "{match[1]}": put it beside the file, or say where it is by -I FOLDER'
                    raise CompileError(file, None, f"{name}:{line}: error: {what}")
                parts.append(match[0].strip())
            elif header.resolve() not in included:
                included.add(header.resolve())
                stamps.append((match[1], header, _stamp(match[1], header)))
                parts.append(inline(match[1], header.read_text(encoding="utf-8"), header.parent).rstrip("\n"))
                parts.append(f'\n#line {line + 1} "{name}"')
        parts.append(text[done:])
        return "".join(parts)

    return inline(file, source(file), _folders.get(file, folder)), stamps
