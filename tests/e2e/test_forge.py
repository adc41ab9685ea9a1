"""The files that GitHub reads: workflows, forms for issues, updates, the citation."""

import pathlib
import re
import subprocess
import sys

import pytest

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
