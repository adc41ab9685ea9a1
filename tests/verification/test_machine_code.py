"""The level of Apple's machine code: every variant compiles, none spills but those that are known to."""

import importlib.util
from pathlib import Path

import pytest
from verification import levels

from mlx_mittens.apple import machine_code

pytestmark = pytest.mark.skipif(bool(levels._no_machine_code()), reason=levels._no_machine_code())


def test_every_variant_compiles():
    codes = levels.machine_codes()
    assert set(codes) == set(levels.variants())
    assert {name: str(code) for name, code in codes.items() if isinstance(code, Exception)} == {}
    assert all(0 < code.half_registers <= 256 and code.instructions > 0 for code in codes.values())


def test_no_other_variant_spills():
    new = sorted(levels.spilling() - levels.known_to_spill())
    assert new == [], "they spill registers: give a thread less to hold (mlx-mittens registers FILE --kernel NAME)"


def test_the_list_of_known_spills_only_shrinks():
    mended = sorted(levels.known_to_spill() - levels.spilling())
    assert mended == [], f"they no longer spill: take them out of {levels.SPILLS.name}"


def test_table_is_current():
    """bench/results/agx.md has what the kernels take now; with another clang it has at least their names."""
    path = Path(__file__).parents[2] / "bench" / "agx.py"
    spec = importlib.util.spec_from_file_location("agx", path)
    agx = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(agx)
    levels.machine_codes()  # all of ours at once, and only once for all processes
    kept = agx.TABLE.read_text()
    if agx.made_with() in kept:
        assert kept == agx.table(), "run python bench/agx.py"
    else:
        names = [line.split("`")[1] for line in kept.splitlines() if line.startswith("| `")]
        assert names == [request.kernel for request in (*agx.ours(), *agx.mlx())], "run python bench/agx.py"


def test_kinds_cover_all_instructions():
    for code in levels.machine_codes().values():
        for opcode in {opcode for block in code.blocks for opcode in block.opcodes}:
            assert machine_code.kind_of(opcode) in machine_code.KINDS
