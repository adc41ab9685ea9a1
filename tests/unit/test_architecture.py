"""The tree is as docs/architecture.md has it: where an op is, which folder includes which, no circles."""

import ast
import re
import runpy
from collections.abc import Collection
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import mlx_mittens as mm
from mlx_mittens import frontend, specs

ROOT = Path(__file__).parents[2]
WHERE = runpy.run_path(str(ROOT / "docs" / "where.py"))


def test_every_op_is_in_the_table():
    ops = [op for place in WHERE["PLACES"] for op in place.ops]
    assert sorted(ops) == sorted(op.name for op in specs.OPS)
    assert all(place.kernels for place in WHERE["PLACES"])


@pytest.mark.parametrize("place", WHERE["PLACES"], ids=lambda place: place.ops[0])
def test_what_the_table_names_is_there(place):
    for folder, names in place.columns():
        for name in names:
            assert (ROOT / folder / name).is_file(), f"{folder}/{name}"
    for op in place.ops:
        assert f"def {op}(" in (ROOT / "mlx_mittens" / "ops" / place.python).read_text()


def test_every_kernel_is_in_the_table():
    named = {f"{place.family}/{name}" for place in WHERE["PLACES"] for name in (*place.kernels, *place.nvidia)}
    assert set(frontend.files()) == named | {"runtime/copy.metal"}


def test_the_documentation_has_the_table():
    assert WHERE["in_docs"]() == WHERE["table"](), "run python docs/where.py --write"


def rows(headings: str, section: str = "# Architecture") -> list[list[str]]:
    """The cells of the first table with these headings in a section, without backquotes."""
    _, line, rest = WHERE["PAGE"].read_text().partition(f"{section}\n")[2].partition(f"| {headings} |\n")
    assert line, headings
    lines = rest.partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split(" | ")] for line in lines]


def folders(cell: str) -> set[str]:
    """The folders that a cell lists."""
    return {name.strip().rstrip("/") for name in cell.split(",")} - {"nothing"}


def subfolders(folder: str) -> set[str]:
    return {path.name for path in (ROOT / folder).iterdir() if path.is_dir() and path.name != "__pycache__"}


def includes(folder: str) -> dict[str, set[tuple[str, str]]]:
    """The files, by folder and name, that each folder of C++ includes."""
    graph: dict[str, set[tuple[str, str]]] = {}
    for path in (ROOT / folder).rglob("*"):
        if path.suffix in (".h", ".cpp", ".metal"):
            own = path.relative_to(ROOT / folder).parts[0]
            graph.setdefault(own, set()).update(re.findall(r'#include "([a-z_]+)/([a-z_/.]+)"', path.read_text()))
    return graph


def included(folder: str) -> dict[str, set[str]]:
    """The folders that each folder of C++ includes files of, but for itself."""
    known = subfolders(folder)
    # Every file may register bindings; the files behind that header are no part of the layers.
    return {
        own: {top for top, rest in files if (top, rest) not in REGISTRY and top in known} - {own}
        for own, files in includes(folder).items()
    }


REGISTRY = {
    ("python", "registry.h"),
    ("python", "array_caster.h"),
    ("python", "simulator.h"),
    ("python", "interrupt.h"),
}


def test_the_documentation_has_every_family():
    families = {name for name, _ in rows("family | ops")}
    assert families == subfolders("csrc/ops") == subfolders("tests/unit") | {"custom"}
    assert families - {"custom"} == subfolders("metal") - {"mittens", "params", "runtime"}
    declared = {place.python.removesuffix(".py") for place in WHERE["PLACES"]}  # a family may have two files
    assert families | declared == {path.stem for path in (ROOT / "mlx_mittens" / "ops").glob("[a-z]*.py")}


@pytest.mark.parametrize("folder, section", [("csrc", "## C++: csrc"), ("metal", "## Kernels: metal")])
def test_the_documentation_has_the_includes_of_each_folder(folder, section):
    table = {name.rstrip("/"): folders(others) for name, _, others in rows("folder | holds | includes", section)}
    known = subfolders("csrc") | subfolders("metal")
    graph = {own: {top for top, _ in files if top in known} - {own} for own, files in includes(folder).items()}
    assert table == graph


def test_the_documentation_has_the_headers_of_python_that_others_use():
    others = [files for own, files in includes("csrc").items() if own != "python"]
    named = {name for files in others for top, name in files if top == "python"}
    assert named == {name for _, name in REGISTRY}, "the page says which headers of python/ others use"


def test_the_documentation_has_the_includes_of_each_family():
    graph = {}
    for family in subfolders("csrc/ops"):
        files = includes(f"csrc/ops/{family}").values()
        names = {name.split("/")[0] for each in files for top, name in each if top == "ops"}
        if others := names - {family}:
            graph[family] = others
    assert {family: folders(others) for family, others in rows("family | includes")} == graph


def test_the_documentation_has_every_folder_of_tests():
    named = {name for cell, _ in rows("folder | tests") for name in folders(cell)}
    assert named == {f"tests/{name}" for name in subfolders("tests")}


def test_the_documentation_has_every_executor():
    """Beside the executors of machines it has the recorder, which stands in for Metal's on Linux."""
    table = rows("name | source | how it runs the kernel", "## Executors")
    assert {name for name, _, _ in table} == set(mm.executors()) - {"native"} | {"recorder"}
    assert [path for _, sources, _ in table for path in folders(sources) if not (ROOT / path).exists()] == []


def test_plans_alone_ask_which_gpu_it_is():
    asking = re.compile(r"\bgpu_of\(|\bVendor\b")
    files = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cpp")]
    found = {path.relative_to(ROOT / "csrc").as_posix() for path in files if asking.search(path.read_text())}
    shared = {"runtime/gpu.h", "runtime/gpu.cpp", "runtime/plan_table.h"}
    assert shared <= found
    assert {name for name in found - shared if not re.fullmatch(r"ops/\w+/plan(_\w+)?\.cpp", name)} == set()


@pytest.mark.parametrize("folder", ["csrc", "metal"])
def test_folders_include_in_no_circle(folder):
    graph = included(folder)
    assert list(TopologicalSorter(graph).static_order())  # raises CycleError
    if folder == "csrc":
        assert "ops" not in graph["backends"] | graph["simulator"] | graph["runtime"] | graph["mlx_internals"]
        assert graph["simulator"] == set()


def imported(path: Path, module: str, modules: Collection[str]) -> set[str]:
    """The package's modules that a module imports, where it is loaded or later."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1])
            source = f"{base}.{node.module}" if node.module else base
            submodules = {f"{source}.{alias.name}" for alias in node.names} & set(modules)
            names |= submodules if len(submodules) == len(node.names) else {source, *submodules}
    return names & set(modules) - {module, "mlx_mittens"}


def imports() -> dict[str, set[str]]:
    """The package's modules that each of its modules imports."""
    package = ROOT / "mlx_mittens"
    modules = {}
    for path in package.rglob("*.py"):
        parts = ("mlx_mittens", *path.relative_to(package).with_suffix("").parts)
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return {name: imported(path, name, modules) for name, path in modules.items()}


def test_modules_import_in_no_circle():
    assert list(TopologicalSorter(imports()).static_order())


def test_the_documentation_has_every_folder_and_module_of_the_package():
    """And the imports of each, but for private modules, whose names begin with `_`."""
    graph: dict[str, set[str]] = {}
    for name, others in imports().items():
        own, *_ = name.split(".")[1:] or ["_"]
        graph.setdefault(own, set()).update(other.split(".")[1] for other in others)
    expected = {
        own: {other for other in others if not other.startswith("_")} - {own}
        for own, others in graph.items()
        if not own.startswith("_")
    }
    page = WHERE["PAGE"].read_text().partition("| folder or module | holds | imports |\n|---|---|---|\n")[2]
    rows = re.findall(r"\| `(\w+)(?:/|\.py)` \| .* \| (.*) \|\n", page.partition("\n\n")[0] + "\n")
    assert {name: set(re.findall(r"`(\w+)`", others)) for name, others in rows} == expected


def test_a_token_of_llama_names_each_file_once():
    page = (ROOT / "docs" / "fusions.md").read_text()
    section = page.partition("## A token of Llama\n")[2].partition("\nA block has")[0]
    named = re.findall(r"`((?:csrc|metal|mlx_mittens)/[\w/.]+)`", section)
    assert len(named) > 15
    assert [name for name in named if not (ROOT / name).is_file()] == []
    assert sorted(set(named)) == sorted(named)


# A function of C++: its name, up to the brace that opens its body.
FUNCTION = re.compile(r"(\w+)\s*\((?:[^()]|\([^()]*\))*\)\s*(?:(?:const|override|noexcept)\s*)*(?:->\s*[\w:<>]+\s*)?\{")
STATEMENTS = {"if", "for", "while", "switch", "catch"}


def functions(text: str) -> list[tuple[str, str]]:
    """Name and body of each function of a C++ file."""
    text = re.sub(r'"(?:[^"\\]|\\.)*"', '""', re.sub(r"//[^\n]*", "", text))
    found = []
    for head in FUNCTION.finditer(text):
        if head[1] not in STATEMENTS:
            depth, end = 1, head.end()
            while depth:
                depth += {"{": 1, "}": -1}.get(text[end], 0)
                end += 1
            found.append((head[1], text[head.end() : end]))
    return found


def readers(files: dict[str, str]) -> set[tuple[str, str]]:
    """The functions that ask arrays for their data, themselves or by others; of those called native the others ask."""
    every = [(file, name, body) for file, text in files.items() for name, body in functions(text)]
    asking = re.compile(r"\bdata_of\(|(?:\.|->)data<")
    found: set[tuple[str, str]] = set()
    while True:
        new = {(file, name) for file, name, body in every if asking.search(body)}
        if new == found:
            return found
        found = new
        names = {name for _, name in found if name != "native"}
        asking = re.compile(r"\bdata_of\(|(?:\.|->)data<|" + "|".join(rf"\b{name}\(" for name in sorted(names)))


def test_native_code_alone_asks_for_data():
    """Under MLX's CUDA build that moves an array that a launch is about to write, and frees its old memory."""
    ops = ROOT / "csrc" / "ops"
    files = {path.relative_to(ops).as_posix(): path.read_text() for path in ops.rglob("*.*")}
    of_the_simulator = files.pop("custom/metal_kernel.cpp")
    assert readers({"": of_the_simulator})
    found = readers(files)
    assert ("moe/gather.cpp", "native_gather") in found and len(found) > 30
    assert sorted(one for one in found if not one[1].startswith("native")) == []
