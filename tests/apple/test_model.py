"""Predictions worked out by hand, one for each limit. The constants are round numbers of this file."""

from dataclasses import fields, replace

import pytest

from mlx_mittens import specs
from mlx_mittens.apple import expected
from mlx_mittens.apple.chips import find_chip
from mlx_mittens.apple.model import CONSTANTS, Constants, Instructions, Terms, Work, chain, predict

# 8 cores of 1 GHz and 100 GB/s: a cycle of a core is 1 ns, and a GB/s is 1000 bytes a microsecond.
EARLY = replace(find_chip("m1"), cores=8, clock_GHz=1.0, nominal_GBps=100.0, device_memory_ns=300.0)
LATER = replace(find_chip("m5"), cores=8, clock_GHz=1.0, nominal_GBps=100.0)
ROUND = Constants(
    base_efficiency=0.8,
    fragment_store=1.5,
    launch_us=2.0,
    dependent_us=5.0,
    early_dispatch_cycles=80.0,
    later_dispatch_cycles=40.0,
    later_latency_ns=200.0,
    complex_efficiency=0.5,
    fragment_slots=4.0,
    tensor_efficiency=0.5,
    early_reduction_slots=14.5,
    later_reduction_slots=10.0,
    overlap=1e3,
)


def check(work, chip, microseconds, limit, constants=ROUND):
    found = predict(work, chip, constants)
    assert found.microseconds == pytest.approx(microseconds, rel=1e-3)
    assert found.limit == limit
    return found


def test_an_empty_launch_takes_its_start():
    check(Work(), EARLY, 2 + 80 / 8000, "launch")


def test_device_memory():
    # 1e6 lines of 128 bytes at 80 GB/s.
    check(Work(threadgroups=8, lines=1e6), EARLY, 2 + 128e6 / 80e3, "device memory")


def test_lines_stored_in_fragments_cost_more():
    check(Work(threadgroups=8, lines=1e6, fragment_lines=5e5), EARLY, 2 + 1.25 * 128e6 / 80e3, "device memory")


def test_second_cache():
    # 4e6 lines for all threadgroups, at 32 bytes a cycle of each core.
    check(Work(threadgroups=8, lines=1e5, summed_lines=4e6), EARLY, 2 + 4e6 * 128 / (32 * 8e3), "second cache")


def test_cached_lines_come_from_the_second_cache():
    found = check(Work(threadgroups=8, lines=1e6, cached=True), EARLY, 2 + 128e6 / (32 * 8e3), "second cache")
    assert found.terms.device_memory == 0


def test_issue_slots_of_one_pipe():
    # 32e6 slots over 4 schedulers of 8 cores.
    work = Work(threadgroups=8, instructions=Instructions(floats=20e6, integers=10e6, control=2e6))
    check(work, EARLY, 2 + 32e6 / 4 / 8e3, "issue slots")


def test_floats_and_integers_are_issued_beside_each_other_from_the_m3_on():
    work = Work(threadgroups=8, instructions=Instructions(floats=20e6, integers=10e6, control=2e6))
    check(work, LATER, 2 + 22e6 / 4 / 8e3, "issue slots")


def test_integers_are_issued_beside_products_of_matrices_from_the_m3_on():
    # 2e6 products of 18 slots: more than the integers, then less.
    for integers, later in ((30e6, 36e6 + 4e6), (50e6, 50e6)):
        floats = 4e6 if integers < 36e6 else 0
        instructions = Instructions(floats=floats, matrix=2e6, integers=integers)
        work = Work(threadgroups=8, instructions=instructions)
        check(work, LATER, 2 + later / 4 / 8e3, "issue slots")
        check(work, EARLY, 2 + (36e6 + floats + integers) / 4 / 8e3, "issue slots")


def test_reductions_and_shuffles():
    work = Work(threadgroups=8, instructions=Instructions(reductions=2e6, shuffles=1e6))
    check(work, EARLY, 2 + (2 * 14.5 + 2) * 1e6 / 4 / 8e3, "issue slots")
    check(work, LATER, 2 + (2 * 10 + 2) * 1e6 / 4 / 8e3, "issue slots")


@pytest.mark.parametrize(("dtype", "cycles"), [("float32", 18), ("float16", 17), ("bfloat16", 17)])
def test_matrix_multiplies(dtype, cycles):
    work = Work(threadgroups=8, instructions=Instructions(matrix=4e6, fragments=2e6), matrix_dtype=dtype)
    check(work, EARLY, 2 + (4e6 * cycles + 2e6 * 4) / 4 / 8e3, "issue slots")


def test_complex_unit():
    # One unit a core at half of its peak: two cycles for each, three for a reciprocal, four for a root.
    instructions = Instructions(conversions=1e6, multiplies=1e6, exponentials=1e6, reciprocals=1e6, rsqrts=1e6)
    found = check(Work(threadgroups=8, instructions=instructions), LATER, 2 + 13e6 / 8e3, "complex unit")
    assert found.terms.issue_slots == pytest.approx(5e6 / 4 / 8e3)


def test_complex_instructions_hold_the_scheduler_of_m1_and_m2():
    found = predict(Work(threadgroups=8, instructions=Instructions(conversions=1e6, rsqrts=1e6)), EARLY, ROUND)
    assert found.terms.issue_slots == pytest.approx((4e6 + 8e6) / 4 / 8e3)


def test_tensor_units():
    # 1e7 multiplies of 1024 operations at half of 1024 operations a cycle.
    work = Work(threadgroups=8, instructions=Instructions(matrix=1e7), matrix_dtype="float16", tensor_units=True)
    check(work, LATER, 2 + 2e7 / 8e3, "tensor units")
    check(work, EARLY, 2 + 1e7 * 17 / 4 / 8e3, "issue slots")  # it has none
    check(replace(work, matrix_dtype="int8"), LATER, 2 + 1e7 / 8e3, "tensor units")
    check(replace(work, tensor_units=False), LATER, 2 + 1e7 * 17 / 4 / 8e3, "issue slots")


def test_dispatch():
    check(Work(threadgroups=1e6), EARLY, 2 + 80e6 / 8e3, "dispatch")
    check(Work(threadgroups=1e6), LATER, 2 + 40e6 / 8e3, "dispatch")


def test_latency_of_one_simdgroup():
    # 1000 loads that wait for one another, and 2000 instructions of its own at one a cycle.
    work = Work(rounds=1000, instructions=Instructions(floats=2000))
    check(work, EARLY, 2 + 300 + 2, "latency")
    check(work, LATER, 2 + 200 + 2, "latency")


def test_simdgroups_beyond_the_places_of_a_core_wait():
    # 8 cores of 704 threads hold 8 * 22 simdgroups; 704 of them take four turns.
    work = Work(threadgroups=704, threads=32, half_registers=143, rounds=1000)
    check(work, EARLY, 2 + 4 * 300, "latency")
    check(replace(work, half_registers=255), EARLY, 2 + 704 / (8 * 12) * 300, "latency")
    check(replace(work, threads_a_core=352), EARLY, 2 + 8 * 300, "latency")
    check(replace(work, threads_a_core=352), LATER, 2 + 200, "latency")  # its registers are a cache


def test_the_busiest_core_decides():
    eight = Work(threadgroups=8, instructions=Instructions(floats=8e6))
    nine = Work(threadgroups=9, instructions=Instructions(floats=9e6))
    one = predict(eight, EARLY, ROUND).terms.issue_slots
    assert predict(nine, EARLY, ROUND).terms.issue_slots == pytest.approx(2 * one)
    assert predict(replace(eight, threadgroups=1), EARLY, ROUND).terms.issue_slots == pytest.approx(8 * one)


def test_memory_and_computing_overlap_incompletely():
    # 1600 us each.
    work = Work(threadgroups=8, lines=1e6, instructions=Instructions(floats=51.2e6))
    for exponent, times in ((1.0, 2.0), (2.0, 2**0.5), (1e3, 1.0)):
        found = predict(work, EARLY, replace(ROUND, overlap=exponent))
        assert found.microseconds == pytest.approx(2 + 1600 * times, rel=1e-3)


def test_a_chain_starts_once_and_then_waits():
    memory, tiny = Work(threadgroups=8, lines=1e6), Work()
    body = 128e6 / 80e3
    found = chain([memory, memory, tiny], EARLY, ROUND)
    assert found.microseconds == pytest.approx(2 + 5 + 2 + 2 * body + 0.01)
    assert found.limit == "device memory"
    assert found.terms.launch == 9 and found.terms.device_memory == pytest.approx(2 * body)
    assert chain([memory], EARLY, ROUND) == predict(memory, EARLY, ROUND)
    many = chain([tiny], EARLY, ROUND, times=[1000])
    assert many.microseconds == pytest.approx(2000 + 10) and many.limit == "launch"
    assert chain([memory, tiny], EARLY, ROUND, times=[2, 1]) == found


@pytest.mark.parametrize(("works", "times"), [([], None), ([Work()], [0]), ([Work()], [1, 2]), ([Work()], [-1])])
def test_a_chain_has_launches(works, times):
    with pytest.raises(ValueError, match="a chain has at least one launch"):
        chain(works, EARLY, ROUND, times)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"threadgroups": 0}, "these are 0 of 32"),
        ({"threads": 1025}, "these are 1 of 1025"),
        ({"matrix_dtype": "int8"}, "it is 'int8'"),
    ],
)
def test_impossible_work_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Work(**change)


def test_instructions_add_and_scale():
    one = Instructions(floats=1, loads=2)
    assert one + 3 * one == Instructions(floats=4, loads=8)


def test_every_constant_is_explained():
    for field in fields(Constants):
        assert f"        {field.name}: " in Constants.__doc__, field.name


def test_more_of_anything_is_never_faster():
    work = Work(
        threadgroups=500,
        threads=256,
        half_registers=100,
        lines=1e5,
        summed_lines=3e5,
        instructions=Instructions(**{f.name: 1e5 for f in fields(Instructions)}),
        rounds=50,
    )
    for name in ("m1", "m2-max", "m3-ultra", "m5-pro"):
        chip = find_chip(name)
        least = predict(work, chip).microseconds
        for field in fields(Instructions):
            more = replace(work.instructions, **{field.name: 1e7})
            assert predict(replace(work, instructions=more), chip).microseconds >= least, (name, field.name)
        for change in ({"lines": 1e6}, {"summed_lines": 1e7}, {"rounds": 1e4}, {"threadgroups": 1e6}):
            assert predict(replace(work, **change), chip, CONSTANTS).microseconds > least, (name, change)


def test_terms_are_named_as_limits():
    assert list(Terms().named()) == [
        "device memory",
        "second cache",
        "issue slots",
        "complex unit",
        "tensor units",
        "dispatch",
        "latency",
        "launch",
    ]


def test_a_kind_has_an_expected_error():
    found = expected.expected_error("attention")
    assert found.kind == "attention" and found.points >= 20
    assert 0 < found.median <= found.nine_in_ten
    assert found.ratio is not None


def test_an_op_stands_for_its_kind():
    for op in specs.OPS:
        assert expected.expected_error(op.name).points > 0
    assert expected.expected_error("quantized_matmul") == expected.expected_error("4-bit")


def test_an_unknown_kind_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'sort'.*matmul, gemv, 4-bit, attention"):
        expected.expected_error("sort")
