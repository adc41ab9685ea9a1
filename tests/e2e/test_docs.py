"""Each command and snippet of the documentation, run where its reader would be, as it is written."""

from __future__ import annotations

import json
import pkgutil
import re
import runpy
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from helpers import command_checks, documentation
from helpers.documentation import PAGES, ROOT, Block, Broken, Command

from mlx_mittens.apple import agx_compiler

RESULTS = ROOT / "docs" / "results.md"
BLOCKS = [block for page in PAGES for block in documentation.blocks(page)]


@dataclass(frozen=True)
class Unrun:
    """Commands that are checked and not run: options by the program's parser, files, extras.

    Attributes:
        start: Their first words, after the variables that they set.
        reason: Why they are not run.
    """

    start: str
    reason: str


UNRUN = (
    Unrun("pip ", "downloads packages, or builds for minutes; .ci/run and test_package.py build"),
    Unrun("python3 -m venv", "makes an environment that the next commands would have to fill"),
    Unrun("eval", "changes the shell of the reader; test_command_line.py asks for completions"),
    Unrun("source", "belongs to the shell of the reader"),
    Unrun("pre-commit", "changes the hooks of the clone, and downloads"),
    Unrun("mkdocs", "needs the extra docs; .ci/run builds the site"),
    Unrun("mlx-mittens bench", "takes minutes on a shared machine; .ci/run runs it"),
    Unrun("mlx-mittens calibrate", "takes minutes; tests/bench/test_calibration.py runs it on some shapes"),
    Unrun("mlx-mittens doctor", "takes a minute; tests/bench runs it on some ops"),
    Unrun("mlx-mittens new", "writes into the clone; test_new.py runs it"),
    Unrun("mlx-mittens agx-compiler", "builds for minutes; .ci/run runs it"),
    Unrun("mlx-mittens registers", "needs what agx-compiler builds; tests/apple runs it"),
    Unrun(
        "mlx-mittens simulate softmax 512x4096 --chip", "needs what agx-compiler builds; test_prediction.py runs such"
    ),
    Unrun("python bench/mac_registers.py", "needs a file from a Mac; test_pipelines.py has one made up"),
    Unrun("python bench/measured.py --renew", "writes digests; test_measured.py calls what it calls"),
    Unrun("python bench/machines.py --write", "writes a page; test_machines.py checks what it writes"),
    Unrun("python tools/macos_wheel.py", "compiles for minutes; test_macos_host.py calls what it calls"),
    Unrun("python tools/try_wheel.py", "downloads packages, and takes minutes"),
    Unrun("python tools/arm64_wheel.py", "compiles for an hour; test_native_cases.py calls what it runs"),
    Unrun("python tools/next_mlx.py", "downloads packages; test_next_mlx.py calls what it calls"),
    Unrun("pytest -", "runs all tests of a tier, this one too"),
    Unrun("python -m verification.levels", "takes minutes; test_levels.py calls what it calls"),
    Unrun("python -m verification.quick", "takes minutes; test_quick.py checks what it writes"),
    Unrun("python docs/", "writes a page; test_architecture.py and test_counts.py check what it writes"),
    Unrun("python -m verification.mutate", "takes hours"),
    Unrun("python -m verification.fuzz", "takes hours; test_fuzz.py calls what it calls"),
    Unrun("python tests/verification/sanitize.py", "builds for minutes"),
    Unrun("python bench/registers.py", "takes ten minutes"),
    Unrun("python bench/agx.py", "takes minutes; test_machine_code.py checks what it writes"),
    Unrun("python examples/train_tiny.py", "trains for minutes; the fixture `trained` takes fewer steps"),
    Unrun("mlx-mittens run mlx_lm.server", "serves until it is ended; test_server.py runs it"),
)
PLACEHOLDER = Unrun("", "has a placeholder for the reader's own words")

# Pages with the output of programs, and the test that compares it.
TEXT_PAGES = {ROOT / "docs" / "simulator.md": "test_the_fault_on_the_page_is_what_the_simulator_says"}


def unrun(command: Command) -> Unrun | None:
    """Why a command is not run, if it is not."""
    found = [row for row in UNRUN if command.program.startswith(row.start)]
    return found[0] if found else PLACEHOLDER if command.has_placeholders else None


def unique(found: list[Command]) -> list[Command]:
    """Each command at the first place that has it."""
    return list({command.text: command for command in reversed(found)}.values())[::-1]


IN_BLOCKS = [command for block in BLOCKS if block.language == "bash" for command in documentation.commands(block)]
IN_SENTENCES = [command for page in PAGES for command in documentation.inline_commands(page)]
RUN = unique([command for command in IN_BLOCKS if not unrun(command)])
CHECKED = unique([command for command in IN_BLOCKS if unrun(command)] + IN_SENTENCES)


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    return documentation.make_programs(tmp_path_factory.mktemp("programs") / "bin")


@pytest.fixture
def place(request, tmp_path):
    """Makes the folder of a reader; a text that names tiny/4bit has the reader train that model first."""

    def make(text: str, clone: bool) -> Path:
        folder = tmp_path / ("clone" if clone else "elsewhere")
        documentation.make_clone(folder) if clone else folder.mkdir()
        if "tiny/4bit" in text:
            shutil.copytree(request.getfixturevalue("trained"), folder / "tiny")
        return folder

    return make


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(b.page == page and b.language == "python" for b in BLOCKS)],
    ids=lambda page: page.name,
)  # fmt: skip
def test_python(page, place, environment):
    found = [block for block in BLOCKS if block.page == page and block.language == "python"]
    predicting = [block for block in found if "chip=" in block.text and agx_compiler.problem()]
    found = [block for block in found if block not in predicting]
    folder = place(page.read_text(), clone=False)
    documentation.run_python(found, folder)
    for block in found:
        if block.is_test_file:
            documentation.run_tests(block, folder, environment)
    if predicting:
        pytest.skip(f"{predicting[0].place}: {agx_compiler.problem()}")


@pytest.mark.parametrize("command", RUN, ids=lambda command: f"{command.place} {command.text}")
def test_command_runs(command, place, environment):
    documentation.run_command(command, place(command.text, clone=True), environment)


def test_the_clone_is_a_copy(tmp_path):
    folder = tmp_path / "clone"
    documentation.make_clone(folder)
    paths = list(folder.rglob("*"))
    assert all(path.resolve().is_relative_to(folder.resolve()) for path in paths)
    missing = {path.name for page in PAGES for path in (page, ROOT / "pyproject.toml")} - {path.name for path in paths}
    assert not missing and set(documentation.FOLDERS) <= {path.name for path in folder.iterdir() if path.is_dir()}


@pytest.mark.parametrize("command", CHECKED, ids=lambda command: f"{command.place} {command.text}")
def test_command_that_is_not_run_is_accepted(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command_checks.check_command(command)


def test_metal(tmp_path, environment):
    for block in (block for block in BLOCKS if block.language == "metal"):
        documentation.check_metal(block, tmp_path, environment)


def test_every_block_is_in_a_language_that_is_tested():
    assert untested(BLOCKS) == []


def untested(found: list[Block]) -> list[str]:
    languages = lambda page: ("python", "bash", "metal", "yaml", *["text"] * (page in TEXT_PAGES))
    return [
        f"{block.place}: a block in {block.language or 'no language'}: expected {', '.join(languages(block.page))}"
        for block in found
        if block.language not in languages(block.page)
    ]


WORKFLOWS = [block for block in BLOCKS if block.language == "yaml"]


@pytest.mark.parametrize("block", WORKFLOWS, ids=lambda block: block.place)
def test_commands_of_a_workflow_are_accepted(block):
    steps = [step for job in yaml.safe_load(block.text)["jobs"].values() for step in job["steps"]]
    commands = [Command(block.place, step["run"]) for step in steps if "run" in step]
    assert commands
    for command in commands:
        command_checks.check_command(command)


def test_no_row_is_of_commands_that_no_page_has():
    for row in UNRUN:
        assert any(unrun(command) == row for command in IN_BLOCKS), f"no page has a command {row.start!r}"
    for page, test in TEXT_PAGES.items():
        assert [block.language for block in BLOCKS if block.page == page].count("text") == 1 and test in globals()


def test_the_fault_on_the_page_is_what_the_simulator_says(tmp_path, environment):
    page = ROOT / "docs" / "simulator.md"
    (said,) = (block for block in BLOCKS if block.page == page and block.language == "text")
    example = next(block for block in BLOCKS if block.page == page and block.is_test_file)
    broken = Block(page, example.line, "python", example.text.replace("y[i] =", "y[i + 1] ="))
    assert broken.text != example.text
    lines = [re.escape(line.strip()) for line in said.text.strip().splitlines()]
    with pytest.raises(Broken, match=r"\nE\s+".join(lines)):  # as pytest prints them
        documentation.run_tests(broken, tmp_path, environment)


@pytest.mark.parametrize("name", documentation.python_names())
def test_names_are_of_the_package(name):
    pkgutil.resolve_name(name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name}: no file {name}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
            assert anchor in [anchor_of(heading) for heading in headings], f"{page.name}: no heading for #{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_figures_are_linked_where_they_are_cited(page):
    """And the site has them as pages: docs/hooks.py."""
    fenced = [block.text for block in documentation.blocks(page)]
    for name in re.findall(r"(?<!\[)`bench/results/([\w.-]+)`", page.read_text()):
        there = (ROOT / "bench" / "results" / name).is_file()
        assert not there or any(name in text for text in fenced), f"{page.name}: {name} is not linked"


def test_the_tables_of_results_are_of_what_was_measured():
    report = runpy.run_path(str(ROOT / "bench" / "report.py"))
    result = json.loads((ROOT / "bench" / "results" / "h200.json").read_text())
    assert report["summary"](result) in RESULTS.read_text(), "bench/report.py has other numbers"


def test_warnings_of_the_site_are_errors_in_ci():
    """mkdocs counts warnings under --strict only where it prints them."""
    texts = [ROOT / ".ci" / "run", *(ROOT / ".github" / "workflows").glob("*.yml")]
    builds = re.findall(r"mkdocs build[^;&\n]*", "\n".join(text.read_text() for text in texts))
    assert len(builds) >= 2
    for build in builds:
        assert "--strict" in build and not re.search(r"\s(--quiet|-q)\b", build), build


def anchor_of(heading: str) -> str:
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading.lower()).strip())


# Mistakes in a page, and the message of the tests above.
WRONG = {
    "a function that is not there": ("python", "import mlx_mittens as mm\n\nmm.rms_nrm", "rms_nrm"),
    "a result that is wrong": ("python", "def test_sum():\n    assert 1 + 1 == 3", "test_sum"),
    "a program that fails": ("bash", "python examples/gguf_matmul.py no.gguf", "no.gguf is not a file"),
    "a case that is not there": ("bash", "mlx-mittens simulate softmax 7x7x7", "no case '7x7x7'"),
    "a command that is not there": ("bash", "mlx-mitten doctor", "mlx-mitten"),
    "an option that is not there": ("bash", "mlx-mittens bench --fast", "ends with 2"),
    "an op that is not there": ("bash", "mlx-mittens doctor --ops rmsnorm", "ends with 2"),
    "a model that is not there": ("bash", "mlx-mittens bench --model llama-9", "ends with 2"),
    "options that exclude each other": ("bash", "mlx-mittens bench --model qwen3-0.6b --quick", "ends with 2"),
    "an extra that is not there": ("bash", 'pip install ".[cpu,metal]"', "no extra metal"),
    "a package that is not asked for": ("bash", "pip install torch", "asks for no such package"),
    "another version": ("bash", "pip install nanobind==1.0.0", "asks for no such package or version"),
    "a setting that is not there": ("bash", "pip wheel . -C mittens.cuda=true", "no config setting"),
    "a marker that is not there": ("bash", "pytest -m slow", "the markers quick, nightly"),
    "an option of a script": ("bash", "python tests/verification/sanitize.py memory", "memory"),
    "an option of a module": ("bash", "PYTHONPATH=tests python -m verification.fuzz --hourly", "--hourly"),
    "a script that is not there": ("bash", "python examples/train.py --out FOLDER", "examples/train.py is not"),
    "a kernel that a Mac would refuse": (
        "metal", "kernel void f(device double* x [[buffer(0)]]) { x[0] = 1; }", "double",
    ),
}  # fmt: skip


@pytest.mark.parametrize("language, text, said", WRONG.values(), ids=WRONG)
def test_a_page_that_is_wrong_fails(language, text, said, place, environment, monkeypatch, capfd):
    folder = place(text, clone=language == "bash")
    page = folder / "page.md"
    page.write_text(f"# Page\n\n```{language}\n{text}\n```\n")
    (block,) = documentation.blocks(page)
    monkeypatch.chdir(folder)
    with pytest.raises(Broken) as broken:
        if language == "metal":
            documentation.check_metal(block, folder, environment)
        elif language == "python":
            documentation.run_python([block], folder)
            documentation.run_tests(block, folder, environment)
        for command in documentation.commands(block) if language == "bash" else ():
            if unrun(command):
                command_checks.check_command(command)
            else:
                documentation.run_command(command, folder, environment)
    assert "page.md:4" in str(broken.value) and said in str(broken.value) + capfd.readouterr().err


def test_a_block_that_nothing_tests_fails(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("```\nls\n```\n```rust\nfn main() {}\n```\n```text\nfault\n```\n")
    assert [line.partition(" a block")[0] for line in untested(documentation.blocks(page))] == [
        f"page.md:{line}:" for line in (2, 5, 8)
    ]
    page.write_text("```python\n1\n")
    with pytest.raises(Broken, match="does not end"):
        documentation.blocks(page)


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "apple.md"], ids=lambda page: page.name)
def test_the_table_of_prompts_is_that_of_the_results(page):
    """bench/apple/whole_prompts.py --write makes all of them."""
    rows = page.read_text().split("<!-- prompts -->\n")[1].split("<!-- /prompts -->")[0]
    section = (ROOT / "bench" / "results" / "whole-prompts.md").read_text().split("\n## ")[1]
    assert rows.splitlines() == [line for line in section.splitlines() if line.startswith("|")]
