"""A minute of fuzzing, by a fixed seed, and the nightly run; and that the fuzzer sees faults."""

import dataclasses
import os
import platform
import re
import sys
import time

import mlx.core as mx
import numpy as np
import pytest
from helpers import log
from verification.fuzz import bad_input, compare, modes, norms, run, sampling
from verification.fuzz.draw import Draw
from verification.fuzz.memory import PROGRAMS
from verification.fuzz.run import NIGHTLY, Log, chunks
from verification.fuzz.subjects import SUBJECTS, cases_of, draw_trial, executors_of
from verification.fuzz.worker import Chunk, Worker

import mlx_mittens as mm
from mlx_mittens import specs

SEED = 31
CASES = {"native": 60, "apple": 20, "nvidia": 20}
PAIRS = [(subject, executor) for subject in SUBJECTS for executor in executors_of(subject)]


@pytest.fixture(scope="session")
def worker():
    with Worker() as worker:
        yield worker


def assert_no_findings(worker: Worker, chunk: Chunk):
    outcome = worker.run(chunk)
    assert not outcome.findings, "\n".join(map(str, outcome.findings))
    assert outcome.cases == chunk.count


def test_every_op_is_fuzzed():
    ops = {op.name for op in specs.OPS}
    assert set(SUBJECTS) >= ops - {"block_quantize", "block_dequantize"}, "block_bytes has these two"
    assert set(bad_input.right_calls(mx.float32)) == ops


@pytest.mark.parametrize("subject", bad_input.right_calls(mx.float32))
def test_right_calls_are_right(subject):
    arguments, options = bad_input.right_calls(mx.float32)[subject]()
    mx.eval(*modes.as_tuple(getattr(mm, subject)(*arguments, **options)))


@pytest.mark.parametrize("subject, executor", PAIRS)
def test_a_minute(worker, subject, executor):
    assert_no_findings(worker, Chunk(subject, executor, SEED, 0, cases_of(subject, CASES[executor])))


@pytest.mark.parametrize(
    "subject, executor, seed, case",
    [
        ("layer_norm", "native", 0, 8075),
        ("layer_norm", "apple", 0, 483),
        ("add_rms_norm", "native", 77, 1264),
        ("scaled_dot_product_attention", "native", 9, 337),
        ("scaled_dot_product_attention", "native", 31, 505),
        ("scaled_dot_product_attention", "native", 31, 526),
        ("ssm_update", "native", 0, 5),
    ],
)
def test_gradients_whose_terms_cancel_are_right(worker, subject, executor, seed, case):
    """Only rounding is left of them, and mx's may be exactly 0."""
    assert_no_findings(worker, Chunk(subject, executor, seed, case, 1))


def test_rows_of_few_different_numbers_are_right(worker):
    """Roundings of their squares' sum mostly go the same way."""
    assert_no_findings(worker, Chunk("add_rms_norm", "native", 0, 3642, 1))


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="baseline is an instruction set of x86-64")
@pytest.mark.parametrize("subject, case", [("gemv", 48), ("sample", 14)])
def test_equal_numbers_in_lanes_of_four_are_right(monkeypatch, subject, case):
    """The fewest lanes, so that each adds most of a row: rounding adds up, and whole numbers reach 32 bits."""
    monkeypatch.setenv("MLX_MITTENS_CPU", "baseline")
    with Worker() as worker:
        assert_no_findings(worker, Chunk(subject, "native", 0, case, 1))


@pytest.mark.parametrize("subject, case", [("gather_sum", 62), ("gather_qmm", 18), ("gather_swiglu", 551)])
def test_limits_of_types_and_of_mx_are_known(worker, subject, case):
    """A term beyond float16 under vmap, and a scale below the smallest normal number."""
    assert_no_findings(worker, Chunk(subject, "apple", 0, case, 1))


@pytest.mark.nightly
@pytest.mark.parametrize("subject, executor", PAIRS)
def test_nightly(worker, subject, executor):
    for chunk in chunks([subject], {executor: NIGHTLY[executor]}, SEED):
        assert_no_findings(worker, chunk)


def test_a_case_is_drawn_again():
    def drawn():
        draw = Draw.of("rms_norm", None, SEED, 4)
        case = norms.rms_norm(draw)
        return case.text, [compare.to_float64(a) for a in case.arrays]

    (text, arrays), (again, others) = drawn(), drawn()
    assert text == again
    for a, b in zip(arrays, others):
        np.testing.assert_array_equal(a, b)


def test_a_mean_that_is_off_shows_in_second_derivatives(lenient):
    """Of a row of one value, whose terms are small: a bound of their rounding does not hide a hundred units of x."""

    def drawn():
        return Draw.of("layer_norm", None, 0, 8075)

    case = norms.layer_norm(drawn())
    eps = 0.0010000000474974513

    def off(x, weight):
        centred = x - x.mean(-1, keepdims=True)  # one chain of additions
        return centred * mx.rsqrt((centred * centred).mean(-1, keepdims=True) + eps) * weight

    found = modes.run(dataclasses.replace(case, ours=off, twin=None), "second order", drawn())
    assert found and "result 0" in found


@pytest.mark.parametrize("mode", [*modes.MODES, *(f"shapeless {mode}" for mode in modes.SHAPELESS)])
def test_what_is_wrong_is_found(mode, lenient):
    """Results that are off by a thousandth."""
    total = 0
    for index in range(20):
        draw = Draw.of("softmax", None, SEED, index)
        case = norms.softmax(draw)
        if case.empty or not case.ordinary or case.arrays[0].size < 2 or case.arrays[0].dtype != mx.float32:
            continue
        wrong = dataclasses.replace(case, ours=lambda a, ours=case.ours: ours(a) * 1.001)
        assert modes.run(case, mode, Draw.of("softmax", None, SEED, index)) is None
        assert modes.run(wrong, mode, Draw.of("softmax", None, SEED, index)), case.text
        total += 1
    assert total >= 2


def test_a_failure_of_the_fuzzer_is_no_failure_of_the_op(lenient):
    draw = Draw.of("softmax", None, SEED, 1)
    case = norms.softmax(draw)

    def broken(*arrays):
        raise RuntimeError("this is not the op")

    with pytest.raises(RuntimeError, match="this is not the op"):
        modes.run(dataclasses.replace(case, exact=broken), "forward", draw)
    assert "not the op" in modes.run(dataclasses.replace(case, ours=broken), "forward", draw)
    assert modes.run(dataclasses.replace(case, ours=broken, twin=broken), "forward", draw) is None


VALUES = np.array([1.0, -2.0, 1e-3, np.nan, np.inf])


@pytest.mark.parametrize("value", [1.001, -1.0, np.nan, np.inf], ids=str)
@pytest.mark.parametrize("place", range(len(VALUES)))
def test_numbers_that_are_wrong_are_found(place, value):
    def difference(numbers, twin=None):
        return compare.difference(mx.array(numbers.astype(np.float32)), VALUES, twin, compare.Tolerance())

    wrong = VALUES.copy()
    wrong[place] = value
    alike = not np.isfinite(VALUES[place]) and not np.isfinite(value)
    assert difference(VALUES) is None
    assert alike or "the first at" in difference(wrong)


def test_nothing_excuses_what_hidden_numbers_do():
    """mx on a CPU lets NaN through where a mask hides it."""
    exact, ours = np.ones(2), mx.array([1.0, mx.nan])
    assert compare.difference(ours, exact, ours, compare.Tolerance()) is None
    assert compare.difference(ours, exact, ours, compare.Tolerance(), finite_only=True)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.05}], ids=str)
def test_wrong_tokens_are_found(native, temperature, filters):
    logits, key = mx.random.normal((3, 40), key=mx.random.key(1)), mx.random.key(2)
    options = {"temperature": temperature, **filters}
    tokens, logprobs = mm.sample(logits, key, logprobs=True, **options)
    assert sampling.why_wrong(logits, key, options, tokens, logprobs) is None
    assert "row 0: token" in sampling.why_wrong(logits, key, options, (tokens + 1) % 40, None)
    assert "row 0: logprob" in sampling.why_wrong(logits, key, options, tokens, logprobs * 1.001)
    assert sampling.why_wrong(logits, key, options, tokens + 40, None) == f"row 0: token {tokens[0].item() + 40} of 40"


def test_tokens_that_filters_drop_are_found(native):
    logits, key = mx.array([0.0, 1.0, 5.0, -20.0]), mx.random.key(2)
    for filters in ({"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.9}):
        found = sampling.why_wrong(logits, key, {"temperature": 1e5, **filters}, mx.array(3, mx.uint32), None)
        assert "is not kept" in found


def test_a_crash_names_its_case():
    """A child that dies at the case 2 of 5 is started again, for the cases that follow."""
    child = (
        "import json, os, signal, sys\n"
        "for line in sys.stdin:\n"
        "    task = json.loads(line)\n"
        "    for case in range(task['first'], task['first'] + task['count']):\n"
        "        print(json.dumps({'case': case, 'mode': 'forward', 'text': f'number {case}'}), flush=True)\n"
        "        if case == 2:\n"
        "            print('last words', file=sys.stderr, flush=True)\n"
        "            os.kill(os.getpid(), signal.SIGSEGV)\n"
        "        print(json.dumps({'right': True, 'wrong': None}), flush=True)\n"
        "    print(json.dumps({'kernels': 1, 'left': 0}), flush=True)\n"
    )
    with Worker([sys.executable, "-c", child]) as worker:
        outcome = worker.run(Chunk("softmax", "apple", 7, 0, 5))
    (finding,) = outcome.findings
    assert outcome.cases == 5
    assert re.search(r"SIGSEGV\s+last words", finding.wrong) and finding.text == "number 2"
    assert finding.replay.endswith("python -m verification.fuzz --op softmax --seed 7 --case 2 --simulate apple")


def test_a_case_without_an_end_is_ended():
    child = (
        "import sys, time\n"
        "sys.stdin.readline()\n"
        'print(\'{"case": 0, "mode": "", "text": ""}\', flush=True)\n'
        "time.sleep(60)\n"
    )
    with Worker([sys.executable, "-c", child], longest_seconds=0.5) as worker:
        (finding,) = worker.run(Chunk("softmax", "native", 0, 0, 1)).findings
    assert "SIGKILL" in finding.wrong


def test_a_run_that_was_cut_off_goes_on(tmp_path, worker, monkeypatch):
    monkeypatch.setattr("verification.fuzz.run.commit", lambda: "0123456789ab")
    chunk = Chunk("softmax", "native", SEED, 0, 3)
    outcome = worker.run(chunk)
    Log(tmp_path / "log").add(chunk, outcome)
    assert Log(tmp_path / "log").done == {chunk: outcome}
    monkeypatch.setattr("verification.fuzz.run.commit", lambda: "another")
    assert not Log(tmp_path / "log").done


@pytest.mark.parametrize("subject, kinds", [("memory", set(PROGRAMS)), ("threads", {"native", "with the simulator"})])
def test_a_short_run_has_every_kind_of_case(subject, kinds):
    assert {draw_trial(subject, "native", SEED, i).mode for i in range(cases_of(subject, 1))} == kinds


def test_a_line_of_the_log_that_was_cut_off_is_forgotten(tmp_path):
    path = tmp_path / "log"
    log.add(path, {"a": 1})
    with path.open("a") as file:
        file.write('{"a": ')
    assert log.entries(path) == [{"a": 1}]
    log.add(path, {"a": 2})
    assert log.entries(path) == [{"a": 1}, {"a": 2}]


def test_an_interrupt_ends_the_run(tmp_path, monkeypatch):
    """Although chunks wait, and children run cases without an end."""
    child = (
        "import os, pathlib, sys, time\n"
        f"pathlib.Path({str(tmp_path)!r}, str(os.getpid())).touch()\n"
        "sys.stdin.readline()\n"
        "while True: time.sleep(600)\n"
    )

    def interrupted(futures):
        while not list(tmp_path.glob("[0-9]*")):
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "Worker", lambda: Worker([sys.executable, "-c", child]))
    monkeypatch.setattr(run, "as_completed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.run([Chunk("softmax", "native", 0, i, 5) for i in range(10)], Log(tmp_path / "log"), 2)
    assert len(list(tmp_path.glob("[0-9]*"))) <= 2
    for mark in tmp_path.glob("[0-9]*"):
        with pytest.raises(ProcessLookupError):
            os.kill(int(mark.name), 0)


def test_every_case_of_a_nightly_run_is_in_one_chunk():
    for subject in SUBJECTS:
        expected = sum(cases_of(subject, NIGHTLY[e]) for e in executors_of(subject))
        cases = [(c.executor, i) for c in chunks([subject], NIGHTLY, 0) for i in range(c.first, c.first + c.count)]
        assert len(cases) == len(set(cases)) == expected
