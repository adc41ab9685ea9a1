"""Says of which kernels measured tables are: bench/results/measured.json has a digest for each op of a file of rows.

A page names the file that the tables below are of by a comment, `<!-- measured: FILE -->`. A test fails where a digest
does not match the kernels in the tree: measure the rows of this op again, or take them out.

python bench/measured.py                                which files are stale, and in which ops
python bench/measured.py --renew FILE [--ops A,B]       after measuring the rows of these ops again
python bench/measured.py --renew FILE --unchanged REV   without measuring: every kernel has the PTX that it had at REV
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from mlx_mittens.frontend.read import sources

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
DIGESTS = RESULTS / "measured.json"
PLACES = runpy.run_path(str(ROOT / "docs" / "where.py"))["_PLACES"]

_INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.M)
_LINE = re.compile(r'^#line \d+ "([^"]*)"\n', re.M)
_NAMESPACE = re.compile(r"namespace mittens \{(.*)\}", re.S)
_NAMED = re.compile(r"\b(?:struct|enum)\s+(\w+)|[{,]\s*(\w+)\s*(?==[^=]|,|\})|^[^{(=]*\b(\w+)\s*[(=]")


def _declarations(text: str) -> list[str]:
    """The declarations in a header's namespace."""
    found = _NAMESPACE.search(sources.without_comments(text))
    parts, depth, start = [], 0, 0
    body = found[1] if found else ""
    for at, character in enumerate(body):
        depth += {"{": 1, "}": -1}.get(character, 0)
        part = body[start : at + 1].strip()
        if depth == 0 and (character == ";" or (character == "}" and not part.startswith(("struct", "enum")))):
            parts.append(part)
            start = at + 1
    return parts


def _metal(file: str) -> str:
    """The tokens of a .metal file with its headers; of metal/params, which a family shares, only used declarations."""
    text = sources.flatten(file)
    marks = list(_LINE.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    own, shared = "", ""
    for mark, end in zip(marks, ends):
        part = text[mark.end() : end]
        own, shared = (own, shared + part) if mark[1].startswith("params/") else (own + part, shared)
    own = sources.without_comments(own)
    left, used = _declarations(shared), own
    while taken := [part for part in left if _names(part) & set(re.findall(r"\w+", used))]:
        left = [part for part in left if part not in taken]
        used += "\n" + "\n".join(taken)
    return sources.tokens(used)


def _names(declaration: str) -> set[str]:
    """The names that a declaration gives."""
    return {name for names in _NAMED.findall(declaration) for name in names if name}


def _native(path: Path, done: set[Path]) -> Iterable[str]:
    """A C++ file and the headers of ours that it includes, each once and without the lines that name folders."""
    if path in done:
        return
    done.add(path)
    text = path.read_text()
    for name in _INCLUDE.findall(text):
        header = next((p for p in (path.parent / name, ROOT / "csrc" / name) if p.is_file()), None)
        if header is not None:
            yield from _native(header.resolve(), done)
    yield _INCLUDE.sub("", text)


def gpu_files(op: str) -> list[str]:
    """The .metal files of an op that NVIDIA's plans launch, below metal/."""
    (place,) = (place for place in PLACES if op in place.ops)
    files = [f"{place.family}/{name}" for name in (*place.kernels, *place.nvidia)]
    return [file for file in files if not sources.is_for_apple(file)]


def digest(op: str, device: str) -> str:
    """Of the texts of an op's kernels: .metal files on a GPU, native code on a CPU."""
    if device == "gpu":
        texts = [_metal(file) for file in gpu_files(op)]
    else:
        (place,) = (place for place in PLACES if op in place.ops)
        folder = ROOT / (place.cpu_folder or f"csrc/cpu/isa/{place.family}")
        done: set[Path] = set()
        # Sorted, since another folder of a header changes the order of includes.
        texts = sorted(sources.tokens(text) for name in place.cpu for text in _native((folder / name).resolve(), done))
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def recorded() -> dict[str, dict]:
    """The files of rows, each with its device and the digests of its ops.

    Beside these `measured.json` lists the other files of the folder: dated records of trials, and pages that
    tests of their own compare.
    """
    return json.loads(DIGESTS.read_text())["tables"]


def stale(table: dict) -> list[str]:
    """The ops of a file whose kernels have changed."""
    return [op for op, known in table["ops"].items() if digest(op, table["device"]) != known]


def _ptx(root: Path, files: list[str]) -> dict[str, str]:
    """A digest of the PTX of each variant of some files of a tree, without the sizes of structs that are parameters."""
    code = (
        "import hashlib, json, re, sys; sys.path.insert(0, 'mlx_mittens'); import frontend\n"
        "size = re.compile(r'(?<=_param_)(\\d+)\\[\\d+\\]')\n"
        "digest = lambda text: hashlib.sha256(size.sub(r'\\1', text).encode()).hexdigest()\n"
        "kernels = [(file, v.name) for file in sys.argv[1:] for v in frontend.variants(file)]\n"
        "texts = frontend.all_ptx(kernels)\n"
        "print(json.dumps({name: digest(text) for (_, name), text in texts.items()}))"
    )
    there = [file for file in files if (root / "metal" / file).is_file()]  # a file may be newer
    done = subprocess.run([sys.executable, "-c", code, *there], cwd=root, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def changed_ptx(files: list[str], before: Path) -> list[str]:
    """The kernels of another tree's files whose PTX is another here; no row is of kernels that it does not have."""
    there = [file for file in files if (before / "metal" / file).is_file()]
    old, new = _ptx(before, there), _ptx(ROOT, there)
    return sorted(name for name in old if old[name] != new.get(name))


def _changed_since(ops: list[str], revision: str) -> list[str]:
    parts = ["metal", "mlx_mittens/frontend", "csrc/simulator/abi.h"]
    archive = subprocess.run(["git", "archive", revision, *parts], cwd=ROOT, capture_output=True, check=True)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["tar", "x", "-C", folder], input=archive.stdout, check=True)
        return changed_ptx(sorted({file for op in ops for file in gpu_files(op)}), Path(folder))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--renew", metavar="FILE", help="a file of bench/results")
    parser.add_argument("--ops", help="those measured again (all of the file)")
    parser.add_argument("--unchanged", metavar="REV", help="renew where the PTX is that of a revision")
    arguments = parser.parse_args()
    tables = recorded()
    if arguments.renew is None:
        for file, table in tables.items():
            if ops := stale(table):
                print(f"{file}: {', '.join(ops)}")
        return 0
    if arguments.renew not in tables:
        parser.error(f"--renew {arguments.renew}: {DIGESTS.name} has {', '.join(tables)}")
    table = tables[arguments.renew]
    ops = arguments.ops.split(",") if arguments.ops else list(table["ops"])
    if arguments.unchanged:
        if table["device"] != "gpu":
            parser.error("--unchanged compares PTX: the figures of a CPU are measured again")
        ops = [op for op in stale(table) if op in ops]
        if changed := _changed_since(ops, arguments.unchanged):
            print(f"other PTX than at {arguments.unchanged}: {', '.join(changed)}", file=sys.stderr)
            return 1
    table["ops"].update({op: digest(op, table["device"]) for op in ops})
    DIGESTS.write_text(json.dumps({**json.loads(DIGESTS.read_text()), "tables": tables}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
