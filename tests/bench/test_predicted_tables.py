"""Tables of predicted times: no row is faster than arithmetic and memory allow, and none stands there twice."""

import re
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mittens import specs
from mlx_mittens.apple.chips import find_chip

RESULTS = Path(__file__).parents[2] / "bench" / "results"
# Operations of a core in a cycle: 128 lanes multiply and add.
FLOP = 256


def least_us(chip, flops, nbytes):
    """The time that the operations take at the peak of the chip, or the bytes at the memory's, if that is longer."""
    chip = find_chip(chip)
    return max(flops / (chip.cores * chip.clock_GHz * 1e3 * FLOP), nbytes / (chip.nominal_GBps * 1e3))


def flops_of(op, case):
    """Operations of products that a case cannot do without."""
    if not op.name.endswith("attention"):
        return 0
    batch, heads, _, queries, keys, width = case.shape
    pairs = queries * keys
    if op.arguments(case)["mask"] == "causal":
        pairs -= queries * (queries - 1) // 2
    return 4 * batch * heads * pairs * width


def cells_of(line):
    return [cell.strip() for cell in line.strip("|\n ").split("|")]


def numbers(cell):
    """The times of a cell: ours, and MLX's where it stands there too."""
    return [float(number.rstrip("*").replace(",", "")) for number in cell.split(", ")[:2] if number]


def predicted():
    """Of predicted.md the case, the chip, the time that there must be at least, and a time."""
    op, chips = None, []
    for line in (RESULTS / "predicted.md").read_text().splitlines():
        if line.startswith("## "):
            op = specs.get(line[3:])
            cases = {case.name: case for case in op.cases}
        elif line.startswith("| case |"):
            chips = cells_of(line)[1:-1]
        elif line.startswith("| ") and not line.startswith("| geometric"):
            name, *cells = cells_of(line)
            case = cases[name]
            for chip, cell in zip(chips, cells):
                least = least_us(chip, flops_of(op, case), op.bytes_moved(case, mx.float16))
                yield from ((f"{op.name} {name}", chip, least, us) for us in numbers(cell))


def attention():
    """The same of the table of prompts in attention.md."""
    op = specs.get("scaled_dot_product_attention")
    cases = {case.name: case for case in op.cases}
    for line in (RESULTS / "attention.md").read_text().splitlines():
        name, *cells = cells_of(line)
        if name in cases and len(cells) == 5:
            least = least_us(cells[0], flops_of(op, cases[name]), op.bytes_moved(cases[name], mx.float16))
            yield from ((name, cells[0], least, us) for us in (*numbers(cells[1]), *numbers(cells[2])))


def products():
    """The same of products.md."""
    chips = []
    for line in (RESULTS / "products.md").read_text().splitlines():
        if line.startswith("| layer"):
            chips = re.findall(r"([\w-]+): us", line)
        elif found := re.match(r"\| (\S+ (\d+) x (\d+)) \| (\d+) \| (\d+) \|", line):
            columns, outputs, rows, bits = map(int, found.groups()[1:])
            nbytes = columns * outputs * (bits + 0.5) / 8 + 2 * rows * (columns + outputs)
            cells = cells_of(line)[4:]
            for i, chip in enumerate(chips):
                least = least_us(chip, 2 * rows * columns * outputs, nbytes)
                name = f"{found[1]}, {rows} rows, {bits} bits"
                yield from ((name, chip, least, us) for cell in cells[4 * i : 4 * i + 2] for us in numbers(cell))


@pytest.mark.parametrize("rows", [predicted, attention, products])
def test_no_time_is_below_what_the_hardware_takes(rows):
    found = list(rows())
    assert len(found) > 10
    above = [(name, chip, us, round(least, 1)) for name, chip, least, us in found if us < least]
    assert not above


@pytest.mark.parametrize("file", ["predicted.md", "products.md"])
def test_no_row_stands_there_twice(file):
    op, rows = "", []
    for line in (RESULTS / file).read_text().splitlines():
        op = line if line.startswith("## ") else op
        rows += [(op, line)] if line.startswith("| ") and not line.startswith(("| case", "| geometric")) else []
    assert rows and len(rows) == len(set(rows))
