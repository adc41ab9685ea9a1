"""Prepares the next version of mlx or mlx-lm: downloads it, and says what changed that this package rests on.

python tools/next_mlx.py 0.33.0 [--mlx-lm 0.33.0] [--compile] [--write]

It compares the headers of mlx that the C++ code includes, directly or not; MLX's Metal kernels, which run beside
ours; nanobind's tag; and the code of mlx-lm that the patch knows. The exit status is 1 if something changed.
"""

from __future__ import annotations

import argparse
import difflib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "cmake"))
import guard  # noqa: E402  # which reads nanobind's tag at configure time

_INCLUDE = re.compile(r'#include [<"](mlx/[^>"]+)[>"]')

# Where the pinned version stands. csrc/mlx_internals/releases.h says for which releases that folder was written: it is
# changed by hand, once that code was read beside the new headers. Results keep the version they were measured with.
_PINNED = ("pyproject.toml", "README.md", "docs/configuration.md", "docs/versioning.md")

# The layers of mlx-lm whose code the patch does not know, or cannot find.
_ASK_MLX_LM = """
from mlx_mittens.patching import PatchError, targets
print("unknown", *targets.unknown())
for target in targets.TARGETS:
    if not target.optional:
        try:
            target.owner()
        except PatchError as error:
            print("missing", error)
"""


@dataclass
class Report:
    """The findings.

    Attributes:
        lines: For people.
        changed: Whether something has to be looked at.
    """

    lines: list[str] = field(default_factory=list)
    changed: bool = False

    def add(self, what: str, problems: list[str]) -> None:
        """Says of one part that nothing changed, or what did."""
        self.lines.append(f"{what}: {'as before' if not problems else len(problems)}")
        self.lines += [f"  {problem}" for problem in problems]
        self.changed |= bool(problems)


def download(folder: Path, *requirements: str) -> None:
    """Unpacks wheels into a folder.

    Raises:
        SystemExit: There is no such version.
    """
    with tempfile.TemporaryDirectory() as wheels:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run([*command, "--dest", wheels, *requirements], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"pip cannot download {' '.join(requirements)}:\n{done.stderr.strip()}")
        for wheel in Path(wheels).glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(folder)


def pinned_version() -> str:
    """The mlx that pyproject.toml names.

    Raises:
        SystemExit: Another one is installed, whose headers would be compared.
    """
    found = re.search(r'"mlx==([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert found is not None, "pyproject.toml pins mlx"
    here = importlib.metadata.version("mlx")
    if here != found[1]:
        sys.exit(f"mlx {here} is installed, pyproject.toml pins mlx {found[1]}: pip install mlx=={found[1]}")
    return found[1]


def installed() -> Path:
    """The folder of the mlx that is installed here, which is the pinned one."""
    spec = importlib.util.find_spec("mlx")
    locations = spec.submodule_search_locations if spec else None
    return next(Path(place) for place in locations or () if (Path(place) / "include").is_dir())


def included(include: Path) -> list[str]:
    """The headers of mlx that csrc/ includes, directly or not."""
    texts = [path.read_text() for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cpp")]
    found: dict[str, None] = {}
    left = [name for text in texts for name in _INCLUDE.findall(text)]
    while left:
        name = left.pop()
        if name in found or not (include / name).is_file():
            continue
        found[name] = None
        left += _INCLUDE.findall((include / name).read_text())
    return sorted(found)


def differences(old: Path, new: Path, names: list[str]) -> Iterator[str]:
    """A line for each file that is gone or differs, with the number of its lines that do."""
    for name in names:
        if not (new / name).is_file():
            yield f"{name} is gone"
            continue
        before, now = ((folder / name).read_text().splitlines() for folder in (old, new))
        lines = [line for line in difflib.unified_diff(before, now, n=0, lineterm="") if line[:1] in "+-"]
        if lines := [line for line in lines if not line.startswith(("---", "+++"))]:
            gone = sum(line[0] == "-" for line in lines)
            yield f"{name}: {gone} lines go, {len(lines) - gone} come"


def metal_kernels(include: Path) -> list[str]:
    """The Metal headers that mlx ships."""
    folder = include / "mlx" / "backend" / "metal" / "kernels"
    return sorted(path.relative_to(include).as_posix() for path in folder.rglob("*.h"))


def tag(old: Path, new: Path) -> list[str]:
    """nanobind's tag, where it changed: then another nanobind is needed."""
    before, now = guard.nanobind_tag_of_mlx(old), guard.nanobind_tag_of_mlx(new)
    said = f"v{before} is now v{now}: write a nanobind that carries v{now} into cmake/mlx_releases.txt"
    return [] if before == now else [said]


def mlx_lm(folder: Path) -> list[str]:
    """The parts of mlx-lm that the patch no longer knows, or no longer finds."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", _ASK_MLX_LM]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    if "No module named 'mlx_mittens'" in done.stderr:
        return ['not compared, since mlx_mittens is not installed here: pip install -e ".[cpu]"']
    if done.returncode:
        return [f"the patch cannot be imported with it: {done.stderr.strip().splitlines()[-1]}"]
    problems = []
    for line in done.stdout.splitlines():
        kind, _, rest = line.partition(" ")
        problems += [f"{name} has other code: its digest" for name in rest.split()] if kind == "unknown" else [rest]
    return problems


def compile_errors(site: Path) -> Iterator[str]:
    """The first error of each C++ file that does not compile against the new headers; nothing is linked."""
    compiler = os.environ.get("CXX") or shutil.which("c++")
    nanobind = guard.folder("nanobind", "src/nb_internals.h")
    if nanobind is None:
        sys.exit(f"nanobind is not installed for {sys.executable}: pip install nanobind")
    python = Path(__import__("sysconfig").get_paths()["include"])
    includes = [site / "mlx/include", nanobind / "include", nanobind / "ext/robin_map/include", python]
    includes += [ROOT / "csrc", ROOT / "metal"]
    command = [str(compiler), "-std=c++20", "-fsyntax-only", "-w", "-DNB_DOMAIN=mlx"]
    command += [f"-I{include}" for include in includes]

    def first_error(path: Path) -> str | None:
        done = subprocess.run([*command, str(path)], capture_output=True, text=True)
        found = re.search(r"error: .*", done.stderr)
        return f"{path.relative_to(ROOT)}: {found[0] if found else done.stderr[:200]}" if done.returncode else None

    sources = sorted(path for path in (ROOT / "csrc").rglob("*.cpp") if _INCLUDE.search(_with_headers(path)))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from filter(None, pool.map(first_error, sources))


def _with_headers(path: Path) -> str:
    """A source and the headers of ours that it includes by name."""
    text = path.read_text()
    own = [ROOT / "csrc" / name for name in re.findall(r'#include "([^"]+)"', text)]
    return text + "".join(header.read_text() for header in own if header.is_file())


def write(old: str, new: str) -> list[str]:
    """Adds the new version to the releases, and puts it in the place of the pinned one; the files that changed.

    A version "or later" is the oldest that the code can be built for, and stays. The range of the requirement is made
    wide enough for the new one.
    """
    changed = []
    major, minor = guard.numbers(new)[:2]
    fits = lambda bound: bound if guard.numbers(new) < guard.numbers(bound) else f"{major}.{minor + 1}"
    listed = ROOT / "cmake" / "mlx_releases.txt"
    if not re.search(rf"^{re.escape(new)} ", listed.read_text(), re.M):
        nanobind = re.findall(rf"^{re.escape(old)} +(\S+)", listed.read_text(), re.M)[0]
        listed.write_text(f"{listed.read_text()}{new} {nanobind}\n")
        changed.append("cmake/mlx_releases.txt")
    for name in _PINNED:
        text = (ROOT / name).read_text()
        renewed = re.sub(r'("mlx(?:\[\w+\])?>=[\d.]+,<)([\d.]+)"', lambda at: f'{at[1]}{fits(at[2])}"', text)
        renewed = re.sub(
            rf"(\bmlx(?:\[\w+\])?==|\bmlx ){re.escape(old)}(?![\d.]*\d| or later)", rf"\g<1>{new}", renewed
        )
        if renewed != text:
            (ROOT / name).write_text(renewed)
            changed.append(name)
    return changed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", metavar="VERSION", help="of mlx")
    parser.add_argument("--mlx-lm", metavar="VERSION", help="of mlx-lm (the newest)")
    parser.add_argument("--compile", action="store_true", help="compile the C++ code against the headers, in minutes")
    parser.add_argument("--write", action="store_true", help="write the version where the pinned one stands")
    arguments = parser.parse_args()
    pinned = pinned_version()
    report = Report()
    with tempfile.TemporaryDirectory() as scratch:
        site, lm = Path(scratch) / "mlx", Path(scratch) / "mlx_lm"
        download(site, f"mlx=={arguments.version}", f"mlx-cpu=={arguments.version}")
        download(lm, f"mlx-lm=={arguments.mlx_lm}" if arguments.mlx_lm else "mlx-lm")
        old, new = installed(), site / "mlx"
        names = included(old / "include")
        report.add(f"headers of mlx, {len(names)}", [*differences(old / "include", new / "include", names)])
        kernels = metal_kernels(old / "include")
        report.add(f"Metal headers, {len(kernels)}", [*differences(old / "include", new / "include", kernels)])
        report.add("nanobind", tag(old, new))
        report.add("mlx-lm", mlx_lm(lm))
        if arguments.compile:
            report.add("C++ files", [*compile_errors(site)])
    print(f"mlx {pinned} is pinned; {arguments.version} beside it:")
    print("\n".join(report.lines))
    if arguments.write:
        print("\n".join(["written:", *(f"  {name}" for name in write(pinned, arguments.version))]))
        print("read csrc/mlx_internals beside the new headers, then add the version to its releases.h and to docs/")
    return int(report.changed)


if __name__ == "__main__":
    sys.exit(main())
