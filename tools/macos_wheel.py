"""A wheel for macOS on Apple silicon, made and examined on any machine.

python tools/macos_wheel.py FOLDER      cross-compiles it (macos_extension.py) for the newest release of mlx
python tools/macos_wheel.py FOLDER --releases all    or for the ones that are named, or all that are known
python tools/macos_wheel.py FILE.whl    examines a wheel, also one that a Mac has built

The wheel is for the Python that runs this. It has no metallib: MLX compiles kernels at their first use. The package
must be installed, and ziglang and lief: `pip install -e ".[cpu,test]"`.
"""

from __future__ import annotations

import argparse
import base64
import csv
import ctypes
import hashlib
import importlib.util
import io
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import lief
import macos_extension
from macos_extension import CORE, MACOS, ROOT, RPATHS, guard

# Libraries of a Mac, or of packages installed beside this one.
_LIBMLX, _CORE = "@rpath/libmlx.dylib", f"@rpath/{CORE}"
_LIBRARIES = (
    _LIBMLX,
    _CORE,
    "/usr/lib/libSystem.B.dylib",
    "/usr/lib/libc++.1.dylib",
    "/usr/lib/libobjc.A.dylib",
)
_FRAMEWORKS = "/System/Library/Frameworks/"

_EXTENSION = re.compile(r"mlx_mittens/_mlx_(\w+)/_ext\..*\.so")

# Beside the package: modules that the entry points name.
_MODULES = ("mlx_mittens_cli.py", "mlx_mittens_pytest.py")

_METADATA = (
    "import sys; from scikit_build_core.build import prepare_metadata_for_build_wheel as f; print(f(sys.argv[1]))"
)


def tag() -> str:
    """The wheel's tag, of the Python that runs this, since the extension is compiled with its headers."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return f"{python}-{python}-macosx_{MACOS[0]}_{MACOS[1]}_arm64"


def extension_name(release: str) -> str:
    """The file name of the extension for a release of mlx on a Mac."""
    folder = f"_mlx_{release.replace('.', '_')}"
    return f"mlx_mittens/{folder}/_ext.cpython-{sys.version_info.major}{sys.version_info.minor}-darwin.so"


def contents(core: Path, extensions: Mapping[str, Path]) -> dict[str, bytes]:
    """The files of the wheel but RECORD, by their names in it. The stub is the installed package's."""
    spec = importlib.util.find_spec("mlx_mittens")
    assert spec is not None, "mlx_mittens is installed here, which has the stub"
    built = next(Path(place) for place in spec.submodule_search_locations or () if (Path(place) / "_ext.pyi").exists())
    package = ROOT / "mlx_mittens"
    files = {f"mlx_mittens/{path.relative_to(package).as_posix()}": path for path in _sources(package)}
    files |= {
        f"mlx_mittens/metal/{path.relative_to(ROOT / 'metal').as_posix()}": path for path in _sources(ROOT / "metal")
    }
    files["mlx_mittens/frontend/include/simulator/abi.h"] = ROOT / "csrc" / "simulator" / "abi.h"
    files |= {name: ROOT / name for name in _MODULES}
    files["mlx_mittens/_ext.pyi"] = built / "_ext.pyi"
    files[f"mlx_mittens/{CORE}"] = core
    files |= {extension_name(release): path for release, path in extensions.items()}
    listed = (ROOT / "cmake" / "_build.py.in").read_text().replace("@MLX_RELEASES@", '", "'.join(extensions))
    listed = listed.replace("@OLDEST_MLX@", next(iter(guard.releases())))
    return (
        {name: path.read_bytes() for name, path in files.items()}
        | {"mlx_mittens/_build.py": listed.encode()}
        | _metadata()
    )


def _sources(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in (".so", ".dylib", ".metallib"):
            yield path


def _metadata() -> dict[str, bytes]:
    """The dist-info folder that the build backend makes, under this wheel's tag."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _METADATA, folder]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"scikit-build-core makes no metadata:\n{done.stderr}")
        info = Path(folder) / done.stdout.split()[-1]
        found = {path.relative_to(folder).as_posix(): path.read_bytes() for path in info.rglob("*") if path.is_file()}
    lines = found[f"{info.name}/WHEEL"].decode().splitlines()
    kept = [line for line in lines if line and not line.startswith("Tag: ")]
    found[f"{info.name}/WHEEL"] = "\n".join([*kept, f"Tag: {tag()}", ""]).encode()
    return found


def pack(core: Path, extensions: Mapping[str, Path], folder: Path) -> Path:
    """Writes the wheel of a core and the extensions by their releases of mlx; its path."""
    files = contents(core, extensions)
    info = next(name.partition("/")[0] for name in files if name.endswith(".dist-info/WHEEL"))
    files[f"{info}/RECORD"] = record(files, info)
    path = folder / f"{info.removesuffix('.dist-info')}-{tag()}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in sorted(files.items()):
            entry = zipfile.ZipInfo(name)  # of 1980: the same files make the same wheel
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            wheel.writestr(entry, data)
    return path


def record(files: Mapping[str, bytes], info: str) -> bytes:
    """RECORD: the hash and the size of each file."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    for name, data in sorted(files.items()):
        rows.writerow([name, f"sha256={_hash(data)}", len(data)])
    rows.writerow([f"{info}/RECORD", "", ""])
    return text.getvalue().encode()


def _hash(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def releases(path: Path) -> list[str]:
    """The releases of mlx that a wheel has an extension for."""
    with zipfile.ZipFile(path) as wheel:
        found = {match[1] for name in wheel.namelist() if (match := _EXTENSION.fullmatch(name))}
    return sorted((name.replace("_", ".") for name in found), key=guard.numbers)


def problems(path: Path, libraries: Mapping[str, Path]) -> list[str]:
    """The faults of a wheel; none, if a Mac can use it with each libmlx.dylib, which are by their releases."""
    with zipfile.ZipFile(path) as wheel:
        files = {name: wheel.read(name) for name in wheel.namelist() if not name.endswith("/")}
    found = [*_record_problems(files), *_tag_problems(path, files), *_content_problems(files)]
    extensions = {match[1].replace("_", "."): name for name in files if (match := _EXTENSION.fullmatch(name))}
    if set(extensions) != set(libraries) or not extensions:
        return [*found, f"expected extensions for mlx {sorted(libraries)}, got {sorted(extensions)}"]
    if (core := files.get(f"mlx_mittens/{CORE}")) is None:
        return [*found, f"mlx_mittens/{CORE} is missing"]
    found += [f"the core {problem}" for problem in _core_problems(core, next(iter(libraries.values())))]
    for release, name in extensions.items():
        told = _extension_problems(files[name], core, libraries[release])
        found += [f"the extension for mlx {release} {problem}" for problem in told]
    return found


def _record_problems(files: Mapping[str, bytes]) -> Iterator[str]:
    name = next((name for name in files if name.endswith(".dist-info/RECORD")), None)
    if name is None:
        yield "there is no RECORD"
        return
    listed = {row[0]: row[1] for row in csv.reader(files[name].decode().splitlines())}
    for file in sorted(set(listed) ^ set(files)):
        yield f"RECORD and the wheel differ in {file}"
    for file, hashed in listed.items():
        if file in files and file != name and hashed != f"sha256={_hash(files[file])}":
            yield f"RECORD has another hash of {file}"


def _tag_problems(path: Path, files: Mapping[str, bytes]) -> Iterator[str]:
    named = "-".join(path.stem.split("-")[2:])
    said = [
        line.removeprefix("Tag: ")
        for name, data in files.items()
        if name.endswith(".dist-info/WHEEL")
        for line in data.decode().splitlines()
        if line.startswith("Tag: ")
    ]
    if said != [named]:
        yield f"the file's name has the tag {named}, WHEEL has {said}"
    if not named.endswith(f"macosx_{MACOS[0]}_{MACOS[1]}_arm64"):
        yield f"the tag is {named}: expected macOS {MACOS[0]}.{MACOS[1]} on arm64"


def _content_problems(files: Mapping[str, bytes]) -> Iterator[str]:
    wanted = ["mlx_mittens/py.typed", "mlx_mittens/_ext.pyi", "mlx_mittens/_build.py"]
    wanted += [f"mlx_mittens/metal/{path.relative_to(ROOT / 'metal').as_posix()}" for path in _sources(ROOT / "metal")]
    wanted += [f"{module}.py" for module in _entry_modules(files)]
    for name in wanted:
        if name not in files:
            yield f"{name} is missing"
    for name in files:
        if "linux" in name or name.endswith((".ptx", ".pyc")):
            yield f"{name} is of no use on a Mac"


def _entry_modules(files: Mapping[str, bytes]) -> list[str]:
    """The modules that the command and the plugins are in."""
    text = next((data.decode() for name, data in files.items() if name.endswith(".dist-info/entry_points.txt")), "")
    return re.findall(r"^[^=\n]+= ?([\w.]+)", text, re.M)


def _parsed(data: bytes) -> lief.MachO.Binary | None:
    fat = lief.MachO.parse(list(data))
    arm64 = lief.MachO.Header.CPU_TYPE.ARM64
    alone = fat is not None and [binary.header.cpu_type for binary in fat] == [arm64]
    return fat.take(arm64) if alone else None  # taken: an object that is only listed ends with the file that lists it


def _loaded(binary: lief.MachO.Binary) -> list[str]:
    own = lief.MachO.LoadCommand.TYPE.ID_DYLIB  # its own name: Zig links a library, CMake a module
    return [library.name for library in binary.libraries if library.command != own]


def _library_problems(binary: lief.MachO.Binary, rpaths: tuple[str, ...]) -> Iterator[str]:
    found = [rpath.path for rpath in binary.rpaths]
    if found != list(rpaths):
        yield f"has the rpaths {found}: expected {list(rpaths)}"
    oldest = tuple(binary.build_version.minos[:2]) if binary.build_version else ()
    if oldest != MACOS:
        yield f"is for macOS {oldest} and later: expected {MACOS}"
    for name in _loaded(binary):
        if name not in _LIBRARIES and not name.startswith(_FRAMEWORKS):
            yield f"loads {name}, which no Mac has"


def _core_problems(data: bytes, libmlx: Path) -> Iterator[str]:
    binary = _parsed(data)
    if binary is None:
        yield "is no Mach-O file of arm64 alone"
        return
    yield from _library_problems(binary, ())
    if wrong := {_LIBMLX, _CORE}.intersection(_loaded(binary)):
        yield f"loads {', '.join(wrong)}, which the extensions load"
    yield from symbol_problems(binary, libmlx)


def _extension_problems(data: bytes, core: bytes, libmlx: Path) -> Iterator[str]:
    binary = _parsed(data)
    if binary is None:
        yield "is no Mach-O file of arm64 alone"
        return
    yield from _library_problems(binary, RPATHS)
    for name in (_LIBMLX, _CORE):
        if name not in _loaded(binary):
            yield f"does not load {name}"
    if "_PyInit__ext" not in {symbol.name for symbol in binary.exported_symbols}:
        yield "exports no _PyInit__ext, which Python looks for"
    yield from symbol_problems(binary, libmlx, core)


def symbol_problems(binary: lief.MachO.Binary, libmlx: Path, core: bytes | None = None) -> Iterator[str]:
    """Symbols that nothing on a Mac has.

    A symbol names the library that it is taken from, and the linker looked there; only of libmlx and of the core
    another one may be installed. One that names none is Python's, or is weak and may come from any library that is
    loaded.
    """
    released = lief.parse(str(libmlx))
    exported = {_LIBMLX: {symbol.name for symbol in released.exported_symbols}}
    if core is not None and (parsed := _parsed(core)) is not None:
        exported[_CORE] = {symbol.name for symbol in parsed.exported_symbols}
    in_any = set().union(*exported.values(), macos_extension.listed(), *macos_extension.imports(libmlx).values())
    for symbol in binary.imported_symbols:
        bound = symbol.has_binding_info and symbol.binding_info.has_library
        library = symbol.binding_info.library.name if bound else ""
        if library in exported and symbol.name not in exported[library]:
            yield f"needs {symbol.name}, which {Path(library).name} does not export"
        if not library and symbol.name not in in_any and not hasattr(ctypes.pythonapi, symbol.name.removeprefix("_")):
            yield (
                f"needs {symbol.name}, which Python and libmlx have not, and of which no "
                f"library of macOS {MACOS[0]} is known to have it: if libc++ does, list it in tools/macos_libcxx.txt"
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, metavar="FOLDER|FILE.whl")
    parser.add_argument("--releases", default="", help="of mlx, with commas between them, or all (the newest)")
    arguments = parser.parse_args()
    path, known = arguments.path, list(guard.releases())
    wanted = {"": known[-1:], "all": known}.get(arguments.releases, arguments.releases.split(","))
    if path.suffix == ".whl":
        wanted = releases(path)
    with tempfile.TemporaryDirectory() as scratch:
        sites = {release: macos_extension.download(Path(scratch), release) for release in wanted}
        if path.suffix != ".whl":
            path.mkdir(parents=True, exist_ok=True)
            core = macos_extension.build_core(sites[wanted[-1]], Path(scratch))
            levels = {name: "-O2" if name == wanted[-1] else "-Os" for name in wanted}  # as csrc/extension does
            made = {
                name: macos_extension.build(site, core, site / "objects", levels[name]) for name, site in sites.items()
            }
            path = pack(core, made, path)
            print(path)
        found = problems(path, {release: site / "mlx" / "lib" / "libmlx.dylib" for release, site in sites.items()})
    print("\n".join(found) or "a Mac can use it")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
