"""The files that GitHub reads: workflows, forms for issues, updates, the citation."""

import email
import pathlib
import re
import runpy
import shutil
import subprocess
import sys

import pytest
import yaml

ROOT = pathlib.Path(__file__).parents[2]
FILES = ROOT / ".github"

pytestmark = pytest.mark.skipif(not FILES.is_dir(), reason="a source archive has no .github")


@pytest.mark.parametrize(
    ("schema", "pattern"),
    [
        ("github-workflows", ".github/workflows/*.yml"),
        ("github-issue-forms", ".github/ISSUE_TEMPLATE/*.yml"),
        ("dependabot", ".github/dependabot.yml"),
        ("citation-file-format", "CITATION.cff"),
    ],
)
def test_files_follow_their_schema(schema, pattern):
    files = sorted(ROOT.glob(pattern))
    assert files, pattern
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", f"vendor.{schema}", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_workflow_takes_the_same_version_of_an_action():
    used = {match for file in FILES.glob("workflows/*.yml") for match in re.findall(r"uses: (\S+)", file.read_text())}
    names = [action.partition("@")[0] for action in used]
    assert len(set(names)) == len(used) > 3, sorted(used)


def test_each_job_has_a_time_limit():
    schema = ["--builtin-schema", "custom.github-workflows-require-timeout"]
    files = [str(file) for file in FILES.glob("workflows/*.yml")]
    done = subprocess.run([sys.executable, "-m", "check_jsonschema", *schema, *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ccache_keeps_what_is_compiled_with_the_precompiled_header():
    """It refuses those objects unless it is told that differing macros and times do not matter."""
    assert "target_precompile_headers" in (ROOT / "csrc" / "extension" / "CMakeLists.txt").read_text()
    steps = [
        step
        for file in FILES.glob("workflows/*.yml")
        for job in yaml.safe_load(file.read_text())["jobs"].values()
        for step in job["steps"]
        if "ccache" in step.get("env", {}).values()
    ]
    assert steps
    for step in steps:
        assert {"pch_defines", "time_macros"} <= set(step["env"].get("CCACHE_SLOPPINESS", "").split(","))


def test_a_release_names_the_repository_that_it_is_built_in(tmp_path):
    """The clone names none, for it does not know where it is public."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "tools").mkdir()
    tool = shutil.copy(ROOT / "tools" / "project_urls.py", tmp_path / "tools")
    repository = "https://github.com/someone/mlx-mittens"
    subprocess.run([sys.executable, tool, repository], check=True)
    code = "from scikit_build_core.build import prepare_metadata_for_build_wheel as prepare; prepare('.')"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    metadata = email.message_from_string(next(tmp_path.rglob("METADATA")).read_text())
    found = [line.split(", ") for line in metadata.get_all("Project-URL")]
    assert ["Source", repository] in found and ["Issues", f"{repository}/issues"] in found
    pages = [url.partition("/blob/HEAD/")[2] for _, url in found if "/blob/" in url]
    assert len(pages) == 2 and all((ROOT / page).is_file() for page in pages)
    again = subprocess.run([sys.executable, tool, repository], capture_output=True, text=True)
    assert again.returncode == 2 and "has project.urls" in again.stderr


@pytest.mark.parametrize("address", ["someone/mlx-mittens", "https://github.com", "https://github.com/someone", "/"])
def test_what_is_no_address_of_a_repository_is_refused(address):
    tool = runpy.run_path(str(ROOT / "tools" / "project_urls.py"))
    with pytest.raises(ValueError, match="expected https://HOST/OWNER/NAME"):
        tool["urls"](address)


def test_each_job_that_builds_a_release_names_the_repository_first():
    for name, job in yaml.safe_load((FILES / "workflows" / "wheels.yml").read_text())["jobs"].items():
        runs = [step.get("run", "") for step in job["steps"]]
        named = next(number for number, run in enumerate(runs) if "tools/project_urls.py" in run)
        built = next(number for number, run in enumerate(runs) if re.search("pip wheel|-m build", run))
        assert named < built, name
