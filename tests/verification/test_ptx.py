"""The GPU's level that needs no GPU: the PTX of every variant assembles, and keeps what it computes in registers."""

import importlib.util
from pathlib import Path

import pytest
from verification import levels

from mlx_mittens import frontend
from mlx_mittens.frontend import ptxas

ARCHITECTURES = ("sm_80", "sm_90")

# What a threadgroup may have in Metal.
MOST_SHARED = 32 * 1024

pytestmark = pytest.mark.skipif(ptxas.find() is None, reason="no ptxas: pip install nvidia-cuda-nvcc")


@pytest.fixture(scope="module")
def texts():
    return ptxas.all_ptx()


@pytest.fixture(scope="module")
def usages():
    return {arch: levels.usages(arch) for arch in ARCHITECTURES}


def test_every_variant_assembles(usages):
    variants = [frontend.entry_name(variant.name) for file in frontend.files() for variant in frontend.variants(file)]
    assert len(set(variants)) == len(variants), "two variants share an entry's name"
    for arch in ARCHITECTURES:
        assert set(usages[arch]) == set(variants)
        assert all(usage.registers > 0 for usage in usages[arch].values())


def known_spills(arch):
    lines = levels.listed(Path(__file__).with_name("ptx_spills.txt"))
    return {line.partition(" ")[2] for line in lines if line.startswith(arch)}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_other_variant_spills(usages, arch):
    spilling = {name for name, u in usages[arch].items() if u.spill_stores or u.spill_loads}
    assert spilling == known_spills(arch), "tests/verification/ptx_spills.txt lists what may spill"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_no_array_is_in_local_memory(usages, arch):
    spilling = known_spills(arch)
    assert {name: u.stack for name, u in usages[arch].items() if u.stack and name not in spilling} == {}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_shared_memory(usages, arch):
    assert {name: usage.shared for name, usage in usages[arch].items() if usage.shared > MOST_SHARED} == {}


def test_what_does_not_assemble_is_said(texts):
    name, text = next(iter(texts.items()))
    with pytest.raises(RuntimeError, match="ptxas -arch=sm_90: .*nonsense"):
        ptxas.assemble({name: text.replace("ret;", "nonsense %r1; ret;")}, "sm_90")


def test_spills_are_seen(texts):
    """A kernel that is held to few registers spills, and is reported."""
    name = max(texts, key=lambda name: len(texts[name]))
    squeezed = texts[name].replace(".maxntid", ".maxnreg 32\n.maxntid")
    assert ptxas.assemble({name: squeezed}, "sm_90")[name].spill_stores > 0


def test_table_of_registers_is_current(texts):
    """bench/results/registers.md lists every variant; its figures are those of the compiler that it was made with."""
    path = Path(__file__).parents[2] / "bench" / "registers.py"
    spec = importlib.util.spec_from_file_location("registers", path)
    registers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(registers)
    rows = [line for line in registers.TABLE.read_text().splitlines() if line.startswith("| `")]
    assert {row.split("`")[1] for row in rows} == set(texts), "run python bench/registers.py"
