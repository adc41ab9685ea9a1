"""The table of Apple GPUs."""

import csv
from importlib import resources

import pytest

from mlx_mittens.apple.chips import chips, find_chip


def test_all_generations_are_there_in_their_variants():
    found = {(chip.generation, chip.tier) for chip in chips().values()}
    expected = {(generation, tier) for generation in range(13, 18) for tier in ("base", "pro", "max", "ultra")}
    assert expected - found == {(16, "ultra"), (17, "ultra")}  # Apple has not built them


def test_names_are_lower_case_with_hyphens_and_unique():
    rows = list(csv.DictReader((resources.files("mlx_mittens.apple") / "chips.csv").read_text().splitlines()))
    names = [row["name"] for row in rows]
    assert len(set(names)) == len(names) == len(chips())
    assert all(name == name.lower() and " " not in name for name in names)
    assert all(row["sources"] for row in rows)


def test_a_chip_is_found_by_its_name():
    chip = find_chip("m2-max")
    assert (chip.title, chip.generation, chip.tier, chip.cores) == ("Apple M2 Max", 14, "max", 38)
    assert (chip.clock_GHz, chip.nominal_GBps, chip.measured_GBps) == (1.398, 409.6, 369.5)
    assert (chip.coissue, chip.dynamic_caching, chip.native_bfloat) == (False, False, False)
    assert find_chip("M2 Max") is chip
    assert find_chip("m2-max-30").cores == 30


def test_what_nobody_published_is_none():
    chip = find_chip("m5-max")
    assert chip.device_memory_ns is None and chip.second_cache_KB is None and chip.dispatch_cycles is None
    assert chip.tensor_flop_per_core_cycle == 1024
    assert find_chip("m4-max").tensor_flop_per_core_cycle is None
    assert find_chip("m1").device_memory_ns == 311


def test_an_unknown_chip_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'m9'.*nown are m1-7, m1, .*m5-max"):
        find_chip("m9")


@pytest.mark.parametrize("chip", chips().values(), ids=chips())
def test_figures_are_plausible(chip):
    assert 7 <= chip.cores <= 80 and 1.2 < chip.clock_GHz < 1.7
    assert 60 < chip.nominal_GBps < 820
    assert chip.measured_GBps is None or 0.75 < chip.measured_GBps / chip.nominal_GBps < 1.02
    assert 16 <= chip.matrix_half_cycles <= chip.matrix_float_cycles <= 20
    assert chip.coissue == chip.dynamic_caching == (chip.generation >= 15)


def test_larger_variants_of_a_generation_have_no_less_memory():
    order = ["base", "pro", "max", "ultra"]
    for generation in range(13, 18):
        most = {
            tier: max(
                (c.nominal_GBps for c in chips().values() if (c.generation, c.tier) == (generation, tier)), default=0
            )
            for tier in order
        }
        present = [most[tier] for tier in order if most[tier]]
        assert present == sorted(present)


@pytest.mark.parametrize(
    ("half_registers", "threads"),
    [(None, 1024), (1, 1024), (104, 1024), (105, 896), (143, 704), (255, 384), (256, 384)],
)
def test_registers_bound_the_threads_of_a_core_on_m1_and_m2(half_registers, threads):
    assert find_chip("m1").resident_threads(half_registers) == threads
    assert find_chip("m3").resident_threads(half_registers) > 1024  # its registers are a cache


@pytest.mark.parametrize("half_registers", [0, 257])
def test_a_lane_has_at_most_256_half_registers(half_registers):
    with pytest.raises(ValueError, match=f"half_registers is {half_registers}"):
        find_chip("m1").resident_threads(half_registers)
