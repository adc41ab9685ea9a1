"""The level of Apple's machine code: every variant compiles, and only known ones spill."""

import pytest
from helpers import scripts
from verification import levels

from mlx_mittens import frontend
from mlx_mittens.apple import agx_compiler, kernels, machine_code
from mlx_mittens.peer import mlx_instances

problem = frontend.compiler_problem() or agx_compiler.problem()
STALE = "run python bench/agx.py"
SAMPLE = 24  # one of this many kernels is compiled again by default


agx = scripts.load("agx")


def test_the_table_is_of_the_kernels_as_they_are():
    kept = agx.TABLE.read_text()
    assert f"Of sources `{agx.sources()}`." in kept, STALE
    names = [line.split("`")[1] for line in kept.splitlines() if line.startswith("| `")]
    assert names == [request.kernel for request in (*agx.ours(), *mlx_instances.requests())], STALE


def test_every_variant_compiles():
    rows = levels.machine_code_rows()
    assert set(rows) == set(levels.variants(kernels.with_machine_code()))
    assert all(0 < int(row["half registers"]) <= 256 for row in rows.values())


def test_no_other_variant_spills():
    new = sorted(levels.spilling() - levels.known_to_spill())
    assert new == [], "they spill registers: give a thread less to hold (mlx-mittens registers FILE --kernel NAME)"


def test_the_list_of_known_spills_only_shrinks():
    mended = sorted(levels.known_to_spill() - levels.spilling())
    assert mended == [], f"they no longer spill: take them out of {levels.SPILLS.name}"


@pytest.mark.skipif(bool(problem), reason=problem)
@pytest.mark.parametrize("every", [SAMPLE, pytest.param(1, marks=pytest.mark.nightly)])
def test_rows_are_what_the_compilers_make(every):
    """With another clang the figures may differ; every kernel still compiles."""
    requests = [*agx.ours(), *mlx_instances.requests()][::every]
    rows = agx.rows(requests)[2:]
    assert len(rows) == len(requests) and not [row for row in rows if machine_code.NOT_COMPILED in row]
    kept = agx.TABLE.read_text()
    if agx.made_with() in kept:
        assert [row for row in rows if f"{row}\n" not in kept] == [], STALE


@pytest.mark.skipif(bool(problem), reason=problem)
def test_kinds_cover_all_instructions():
    for request, code in machine_code.compile_all([*agx.ours(), *mlx_instances.requests()][::SAMPLE]):
        assert isinstance(code, machine_code.MachineCode), request
        for opcode in {opcode for block in code.blocks for opcode in block.opcodes}:
            assert machine_code.kind_of(opcode) in machine_code.KINDS
