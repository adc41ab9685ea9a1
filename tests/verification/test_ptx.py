"""The GPU's level that needs no GPU: the PTX of every variant assembles, and spills no registers."""

from pathlib import Path

import pytest
from helpers import scripts
from verification import levels

from mlx_mittens import frontend
from mlx_mittens.frontend import build_ptx, ptxas

STALE = "run python bench/registers.py"
SAMPLE = 24  # one of this many calls of clang is made again by default, and its kernels are assembled

# A threadgroup's limit in Metal.
MOST_SHARED = 32 * 1024

needs_ptxas = pytest.mark.skipif(ptxas.find() is None, reason="no ptxas: pip install nvidia-cuda-nvcc")


registers = scripts.load("registers")
each_architecture = pytest.mark.parametrize("arch", registers.ARCHITECTURES)


def test_the_table_is_of_the_kernels_as_they_are():
    assert f"Of sources `{registers.sources()}`." in registers.TABLE.read_text(), STALE


@each_architecture
def test_every_variant_assembles(arch):
    entries = [frontend.entry_name(name) for _, name in registers.kernels()]
    assert len(set(entries)) == len(entries), "two variants share an entry's name"
    assert list(levels.usages(arch)) == entries, STALE
    assert all(usage.registers > 0 for usage in levels.usages(arch).values())


def calls():
    """The kernels, by the calls of clang that compile them: beside others a kernel may differ a little."""
    by_file = {}
    for file, name in registers.kernels():
        by_file.setdefault(file, []).append((file, name))
    size = build_ptx._VARIANTS_PER_CALL
    return [some[i : i + size] for some in by_file.values() for i in range(0, len(some), size)]


@needs_ptxas
@pytest.mark.parametrize("every", [SAMPLE, pytest.param(1, marks=pytest.mark.nightly)])
def test_rows_are_what_the_compilers_make(every):
    """With another clang the figures may differ; every kernel still assembles."""
    kernels = [kernel for call in calls()[::every] for kernel in call]
    rows = registers.rows(kernels)[2:]
    assert len(rows) == len(kernels)
    kept = registers.TABLE.read_text()
    if registers.made_with() in kept:
        assert [row for row in rows if f"{row}\n" not in kept] == [], STALE


def known_spills(arch):
    lines = levels.listed(Path(__file__).with_name("ptx_spills.txt"))
    return {line.partition(" ")[2] for line in lines if line.startswith(arch)}


@each_architecture
def test_no_other_variant_spills(arch):
    spilling = {name for name, usage in levels.usages(arch).items() if usage.spills}
    assert spilling == known_spills(arch), "tests/verification/ptx_spills.txt lists what may spill"


@each_architecture
def test_no_array_is_in_local_memory(arch):
    stacks = {name: usage.stack for name, usage in levels.usages(arch).items() if usage.stack}
    # ptxas may keep a stack for a spill that it avoids in the end, where the other architecture has that spill.
    assert stacks.keys() <= known_spills("sm_80") | known_spills("sm_90"), stacks


@each_architecture
def test_shared_memory(arch):
    assert {name: usage.shared for name, usage in levels.usages(arch).items() if usage.shared > MOST_SHARED} == {}


@pytest.fixture(scope="module")
def texts():
    kernels = [("norm/softmax.metal", variant.name) for variant in frontend.variants("norm/softmax.metal")]
    return {frontend.entry_name(name): text for (_, name), text in frontend.all_ptx(kernels).items()}


@needs_ptxas
def test_what_does_not_assemble_is_said(texts):
    name, text = next(iter(texts.items()))
    with pytest.raises(RuntimeError, match="ptxas -arch=sm_90: .*nonsense"):
        ptxas.assemble({name: text.replace("ret;", "nonsense %r1; ret;")}, "sm_90")


@needs_ptxas
def test_spills_are_seen(texts):
    """A kernel that is held to few registers spills, and is reported."""
    name = max(texts, key=lambda name: len(texts[name]))
    squeezed = texts[name].replace(".maxntid", ".maxnreg 24\n.maxntid")
    assert ptxas.assemble({name: squeezed}, "sm_90")[name].spill_stores > 0
