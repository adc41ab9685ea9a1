"""tools/next_mlx.py, on headers and pages that are made up; it downloads nothing here."""

import importlib.metadata
import pathlib
import re
import runpy
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool():
    before = list(sys.path)
    yield runpy.run_path(str(ROOT / "tools" / "next_mlx.py"))
    sys.path[:] = before


def test_the_headers_that_the_code_includes(tool):
    include = tool["installed"]() / "include"
    names = tool["included"](include)
    assert {"mlx/array.h", "mlx/ops.h", "mlx/backend/cpu/encoder.h"} <= set(names)
    assert "mlx/small_vector.h" in names, "what array.h includes"
    assert "mlx/backend/metal/kernels/softmax.h" in tool["metal_kernels"](include)
    assert list(tool["differences"](include, include, names)) == []


def test_what_changed_is_counted(tool, tmp_path):
    for folder, text in (("old", "a\nb\nc\n"), ("new", "a\nB\nc\nd\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "one.h").write_text(text)
    (tmp_path / "old" / "two.h").write_text("")
    found = list(tool["differences"](tmp_path / "old", tmp_path / "new", ["one.h", "two.h"]))
    assert found == ["one.h: 1 lines go, 2 come", "two.h is gone"]


def test_the_installed_mlx_lm_is_known(tool, tmp_path):
    assert tool["mlx_lm"](tmp_path) == []


def test_an_mlx_lm_without_its_models_is_reported(tool, tmp_path):
    (tmp_path / "mlx_lm").mkdir()
    (tmp_path / "mlx_lm" / "__init__.py").write_text("")
    assert tool["mlx_lm"](tmp_path)


def copy_releases(folder):
    (folder / "cmake").mkdir(exist_ok=True)
    (folder / "cmake" / "mlx_releases.txt").write_text((ROOT / "cmake" / "mlx_releases.txt").read_text())


def test_the_version_is_written_where_it_stands(tool, tmp_path, monkeypatch):
    old = importlib.metadata.version("mlx")
    for name in tool["_PINNED"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text() + f"mlx-lm {old}, mlx {old}, mlx=={old}.1\n")
    copy_releases(tmp_path)
    monkeypatch.setitem(tool["write"].__globals__, "ROOT", tmp_path)
    assert set(tool["write"](old, "9.8.7")) == {"cmake/mlx_releases.txt", *tool["_PINNED"]}
    listed = (tmp_path / "cmake" / "mlx_releases.txt").read_text()
    assert listed.endswith(f"9.8.7 {re.findall(rf'^{old} +(.*)', listed, re.M)[0]}\n")
    assert tool["write"]("9.8.7", "9.8.7") == [], "what is there is not written again"
    text = (tmp_path / "pyproject.toml").read_text()
    assert 'requires = ["scikit-build-core' in text and '"mlx==9.8.7"' in text
    assert f"mlx-lm {old}, mlx 9.8.7, mlx=={old}.1" in text
    assert re.search(r'"mlx>=[\d.]+,<9.9"', text) and re.search(r'"mlx\[cuda13\]>=[\d.]+,<9.9"', text), "the range"


def test_the_range_stays_where_it_covers_the_next_version(tool, tmp_path, monkeypatch):
    copy_releases(tmp_path)
    (tmp_path / "pyproject.toml").write_text('"mlx>=0.31.2,<0.33"\n')
    monkeypatch.setitem(tool["write"].__globals__, "ROOT", tmp_path)
    monkeypatch.setitem(tool["write"].__globals__, "_PINNED", ("pyproject.toml",))
    assert tool["write"](importlib.metadata.version("mlx"), "0.32.9") == ["cmake/mlx_releases.txt"]
    assert (tmp_path / "pyproject.toml").read_text() == '"mlx>=0.31.2,<0.33"\n'


def test_the_oldest_mlx_stays_where_the_pinned_one_is_written(tool, tmp_path, monkeypatch):
    """The two may be the same."""
    copy_releases(tmp_path)
    page = tmp_path / "docs" / "versioning.md"
    page.parent.mkdir()
    page.write_text("Built for mlx 0.32.4. It must be mlx 0.32.4 or later.\n")
    monkeypatch.setitem(tool["write"].__globals__, "ROOT", tmp_path)
    monkeypatch.setitem(tool["write"].__globals__, "_PINNED", ("docs/versioning.md",))
    assert tool["write"]("0.32.4", "0.33.0") == ["cmake/mlx_releases.txt", "docs/versioning.md"]
    assert page.read_text() == "Built for mlx 0.33.0. It must be mlx 0.32.4 or later.\n"


def test_another_mlx_than_the_pinned_one_is_said(tool, monkeypatch):
    """Its headers would be compared, and its version looked for where the pinned one stands."""
    pinned = tool["pinned_version"]()
    assert f'"mlx=={pinned}"' in (ROOT / "pyproject.toml").read_text()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "9.8.7")
    with pytest.raises(SystemExit, match=f"mlx 9.8.7 is installed, .* pins mlx {pinned}"):
        tool["pinned_version"]()


def test_without_the_package_the_patch_is_not_compared(tool, tmp_path, monkeypatch):
    ask = "raise ModuleNotFoundError(\"No module named 'mlx_mittens'\")"
    monkeypatch.setitem(tool["mlx_lm"].__globals__, "_ASK_MLX_LM", ask)
    assert tool["mlx_lm"](tmp_path) == [
        'not compared, since mlx_mittens is not installed here: pip install -e ".[cpu]"'
    ]
