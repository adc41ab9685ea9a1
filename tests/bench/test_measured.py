"""Tables of figures are of the kernels that ship: `bench/measured.py` has a digest of these for each."""

import json
import re
import runpy
import shutil
from pathlib import Path

import pytest

from mlx_mittens.frontend.read import sources

ROOT = Path(__file__).parents[2]
MEASURED = runpy.run_path(str(ROOT / "bench" / "measured.py"))
RECORDED = json.loads(MEASURED["DIGESTS"].read_text())
PAGE = ROOT / "docs" / "results.md"


@pytest.mark.parametrize("file", RECORDED["tables"])
def test_tables_are_of_the_kernels_that_ship(file):
    ops = MEASURED["stale"](RECORDED["tables"][file])
    assert not ops, f"{file}: measure {', '.join(ops)} again, or take them out; then bench/measured.py --renew {file}"


def test_every_file_of_rows_is_known():
    """A new file of figures gets digests, or is said to be a record."""
    files = {path.name for path in MEASURED["RESULTS"].iterdir() if path.is_file()}
    assert {*RECORDED["tables"], *RECORDED["others"], MEASURED["DIGESTS"].name} == files
    for file, table in RECORDED["tables"].items():
        rows = json.loads((MEASURED["RESULTS"] / file).read_text()).get("rows")
        assert rows is None or {row["op"] for row in rows} == set(table["ops"]), file


def test_the_page_says_what_its_tables_are_of():
    """A section with a table of speeds relative to mx names the file that it is of."""
    speed = re.compile(r"^\|.*\b(?:mx: mean|/ mx|as fast as mx)\b", re.M)
    sections = [section for section in re.split(r"^## ", PAGE.read_text(), flags=re.M) if speed.search(section)]
    assert sections
    for section in sections:
        files = re.findall(r"^<!-- measured: (\S+) -->$", section, re.M)
        assert files and set(files) <= set(RECORDED["tables"]), section.splitlines()[0]


@pytest.fixture
def edit(tmp_path, monkeypatch):
    """Edits a file of a copy of the kernels; gives the digest of softcap before and after."""
    folder = tmp_path / "metal"
    shutil.copytree(sources.metal_folder(), folder)
    monkeypatch.setattr(sources, "metal_folder", lambda: folder)

    def edited(file: str, before: str, after: str) -> tuple[str, str]:
        old = MEASURED["digest"]("softcap", "gpu")
        text = (folder / file).read_text()
        assert before in text
        (folder / file).write_text(text.replace(before, after, 1) + "\n")
        return old, MEASURED["digest"]("softcap", "gpu")

    return edited


@pytest.mark.parametrize(
    "file, before, after",
    [
        ("norm/softcap.metal", "// ", "// Says more: "),
        ("norm/softcap.metal", "  return ", "\n\n  return\n      "),
        ("params/norm.h", "struct SoftcapParams {", "struct Another {\n  uint32_t x;\n};\n\nstruct SoftcapParams {"),
    ],
)
def test_what_changes_no_kernel_makes_no_table_stale(edit, file, before, after):
    old, new = edit(file, before, after)
    assert new == old


@pytest.mark.parametrize(
    "file, before, after",
    [
        ("norm/softcap.metal", "1.0f + e", "1.0f + e * 1.0f"),
        ("params/norm.h", "struct SoftcapParams {", "struct SoftcapParams {\n  uint32_t x;"),
        ("mittens/row_io.h", "span.edges = 0;", "span.edges = 0u;"),
    ],
)
def test_what_changes_a_kernel_makes_its_table_stale(edit, file, before, after):
    old, new = edit(file, before, after)
    assert new != old


def test_kernels_that_keep_their_ptx_are_told_from_others(tmp_path):
    for part in ("metal", "mlx_mittens/frontend", "csrc/simulator"):
        shutil.copytree(ROOT / part, tmp_path / part)
    source = tmp_path / "metal" / "norm" / "softcap.metal"
    text = source.read_text()
    source.write_text(text.replace("4.0f * e / ((1.0f + e) * (1.0f + e))", "(4.0f * e) / ((1.0f + e) * (1.0f + e))"))
    assert MEASURED["changed_ptx"](["norm/softcap.metal"], tmp_path) == []
    source.write_text(text.replace("4.0f * e", "5.0f * e"))
    changed = MEASURED["changed_ptx"](["norm/softcap.metal"], tmp_path)
    assert changed == [f"softcap_vjp_{dtype}" for dtype in ("bfloat16", "float16", "float32")]


def test_figures_of_a_cpu_outlast_a_move_of_a_header(tmp_path, monkeypatch):
    """Where a header is and the order of includes change no code; a number does."""
    digest = MEASURED["digest"]
    old = digest("softcap", "cpu")
    shutil.copytree(ROOT / "csrc" / "cpu", tmp_path / "csrc" / "cpu")
    monkeypatch.setitem(digest.__globals__, "ROOT", tmp_path)
    header, source = (tmp_path / "csrc" / "cpu" / name for name in ("norm/softcap.h", "isa/norm/softcap.cpp"))
    header.rename(header.parents[1] / "zzz.h")
    text = source.read_text()
    lines = '#include "cpu/norm/softcap.h"\n\n#include "cpu/isa/row_op.h"\n'
    assert lines in text and "p-9f" in text
    source.write_text(text.replace(lines, '#include "cpu/isa/row_op.h"\n#include "cpu/zzz.h"\n'))
    assert digest("softcap", "cpu") == old
    source.write_text(source.read_text().replace("p-9f", "p-8f"))
    assert digest("softcap", "cpu") != old
