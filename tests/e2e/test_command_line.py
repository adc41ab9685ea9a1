"""The command line for people: its output, its suggestions, and that its tables fit a terminal."""

import itertools
import os
import random
import re
import signal
import subprocess
import threading

import pytest
from helpers import scripts

from mlx_mittens import specs, table
from mlx_mittens.cli import main, runs, simulate
from mlx_mittens.nearest import nearest

WIDTH = 80


def said(capsys, *arguments):
    """The message on stderr of a command that cannot be served; its exit status is 2."""
    try:
        status = main.main(list(arguments))
    except SystemExit as ended:
        status = ended.code
    printed = capsys.readouterr()
    assert status == 2 and printed.out == ""
    return printed.err


@pytest.mark.parametrize("arguments", [[], ["--help"]], ids=str)
def test_alone_it_shows_what_it_can_do(capsys, arguments):
    try:
        assert main.main(arguments) == 0
    except SystemExit as ended:
        assert ended.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(any(line.startswith(f"  {name} ") for line in lines) for name in main._COMMANDS)
    assert max(map(len, lines)) <= WIDTH


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bnech"], "unknown command 'bnech'; did you mean bench?"),
        (["dokter"], "did you mean doctor?"),
        (["xyz"], "unknown command 'xyz'; there are doctor, bench"),
        (["bench", "softmax"], "unexpected argument 'softmax'; did you mean --ops softmax?"),
        (["bench", "rmsnorm"], "unexpected argument 'rmsnorm'; did you mean --ops rms_norm?"),
        (["bench", "--quik"], "unknown option --quik; did you mean --quick?"),
        (["bench", "--jsn=x"], "unknown option --jsn; did you mean --json?"),
        (["bench", "--frobnicate"], "unknown option --frobnicate\n"),
        (["bench", "-q"], "unknown option -q"),
        (["new", "l2_norm", "--famly", "norm"], "unknown option --famly; did you mean --family?"),
        (["bench", "--ops", "softmax,rmsnorm"], "--ops: rmsnorm given; did you mean rms_norm? There are rms_norm,"),
        (["bench", "--predict", "--chip", "m2max"], "'m2max'; did you mean m2-max?"),
        (["bench", "--model", "lama-3.2-1b"], "did you mean llama-3.2-1b?"),
        (["simulate", "softmx", "3x7"], "no op is called 'softmx'; did you mean softmax?"),
        (["simulate", "softmax", "Qwen vocablary"], "the nearest are\n  Qwen3 vocabulary"),
        (["simulate", "softmax", "3x7", "--dtype", "flot16"], "--dtype: unknown value 'flot16'; did you mean float16?"),
        (["warm", "qwen3-06b"], "did you mean qwen3-0.6b?"),
        (["doctor", "--versoin"], "unknown option --versoin"),
        (["doctor", "--jsn=a file"], "unknown option --jsn; did you mean --json?"),
        (["doctor", "--json=--a", "--b=a file"], "unknown option --b"),
        (["doctor", "--- Title ---"], "unexpected argument '--- Title ---'"),
    ],
    ids=str,
)  # fmt: skip
def test_the_nearest_is_suggested(capsys, arguments, words):
    assert words in said(capsys, *arguments)


@pytest.mark.parametrize("text", ["--- Title ---", "--title: it", "--title=a b", "- a list", "-x y"])
@pytest.mark.parametrize("option", ["--prompt", "--prom"])
def test_a_value_with_a_space_is_no_option(capsys, option, text):
    assert "no/such/model" in said(capsys, "validate", "no/such/model", option, text)


@pytest.mark.parametrize("seed", ["-1", "one", "1.5", str(2**64)])
def test_a_seed_that_the_simulator_does_not_take(capsys, seed):
    words = said(capsys, "simulate", "softmax", "3x7", "--seed", seed)
    assert words.startswith("mlx-mittens simulate: ") and "--seed" in words and seed in words
    assert main.main(["simulate", "softmax", "test 3x7", "--seed", str(2**64 - 1)]) == 0


def test_options_of_other_programs_are_theirs(capsys):
    assert "no command mlx_lm.generat; did you mean mlx_lm.generate?" in said(
        capsys, "run", "mlx_lm.generat", "--no-such-option-here"
    )


@pytest.mark.parametrize(
    ("word", "found"),
    [("SOFTMAX", "softmax"), ("rms-norm", "rms_norm"), ("attention", "scaled_dot_product_attention"), ("", None),
     ("zzz", None)],
)  # fmt: skip
def test_nearest(word, found):
    assert nearest(word, [op.name for op in specs.OPS]) == found


def test_simulate_lists_ops_and_cases(capsys, monkeypatch):
    monkeypatch.setattr(simulate, "terminal_width", lambda: WIDTH)
    assert main.main(["simulate"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(specs.OPS)]] == [op.name for op in specs.OPS]
    for op in specs.OPS:
        assert main.main(["simulate", op.name]) == 0
        text = capsys.readouterr().out
        assert "1x1" in text or op.cases[0].columns[1] in text
        lines = text.splitlines()
        assert max(map(len, lines)) <= WIDTH and lines[0].split() == ["case", "shape", "options"]
        assert len(lines) == 4 + len({case.name for case in (*op.cases, *op.tests)})


@pytest.mark.parametrize("seed", range(20))
def test_tables_fit_the_terminal(seed):
    draw = random.Random(seed)
    columns = [table.Column("op", left=True), table.Column("case", left=True), table.Column("dtype", left=True)]
    columns += [table.Column(f"c{i}", rank=draw.randint(0, 1) * i) for i in range(4)]
    cell = lambda most: "x" * draw.randint(1, most)
    rows = [[cell(60), cell(120), cell(40), *(cell(8) for _ in range(4))] for _ in range(10)]
    text = table.text(columns, rows, WIDTH)
    assert max(map(len, text.split("\n"))) <= WIDTH
    assert all(row[1] in table.text(columns, rows, None) for row in rows), "a pipe gets whole cells"


def test_what_fits_is_not_cut():
    columns = [table.Column("op", left=True), table.Column("case", left=True), table.Column("ms")]
    assert "x" * 70 in table.text(columns, [["softmax", "x" * 70, "1.0"]], WIDTH)
    assert table.text(columns, [["a", "b" * 90 + "end", "1.0"]], WIDTH).split("\n")[1].split()[0].endswith("end")


def test_the_time_left_is_said_where_it_is_long(monkeypatch, capsys):
    clock = iter([0.0, 1.0, 60.0, 61.0])
    monkeypatch.setattr(runs.time, "monotonic", lambda: next(clock))
    with runs.steps(3) as step:
        for name in ("a", "b", "c"):
            step(name)
    assert capsys.readouterr().err.splitlines() == ["[1/3] a", "[2/3] b, 30 s left", "[3/3] c"]
    assert [runs.duration(seconds) for seconds in (5.4, 300, 7200)] == ["5 s", "5 min", "2.0 h"]


def test_the_time_left_is_said_of_what_prints_its_results_as_they_come(monkeypatch, capsys):
    """Without a bar, as where rich is not installed: a line every few seconds, and none where all is short."""
    clock = iter([0.0, 0.0, 1.0, 1.0, 6.0, 6.0, 7.0, 7.0])
    monkeypatch.setattr(runs.time, "monotonic", lambda: next(clock))
    with runs.quiet_steps(30) as step:
        for name in ("a", "b", "c"):
            step(name)
    assert capsys.readouterr().err.splitlines() == ["[2/30] b, 84 s left"]


def test_the_time_left_of_a_launch_is_said(capsys, monkeypatch):
    looks = itertools.chain([(3, 9, 9)] * 5, [(4, 0, 1000)] * 5, ((4, done, 1000) for done in range(1, 1000)))
    clock, looked = itertools.count(), threading.Semaphore(0)

    def look():
        looked.release()
        return next(looks)

    monkeypatch.setattr(runs.time, "monotonic", lambda: next(clock) / 10)
    with runs.launch_progress(look, seconds=0.1):
        for _ in range(30):
            looked.acquire()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1 and re.fullmatch(r"launch 1: \d+ of 1,000 threadgroups, \d+ min left", lines[-1])


def test_a_long_launch_says_how_far_it_is(capsys, monkeypatch):
    """The numbers are the simulator's own, from the thread that runs it."""
    progress = runs.launch_progress
    monkeypatch.setattr(simulate, "launch_progress", lambda look: progress(look, seconds=0.001))
    assert main.main(["simulate", "softmax", "512x4096", "--dtype", "float32"]) == 0
    assert re.search(r"^launch 1: \d+ of 512 threadgroups, \d+ s left$", capsys.readouterr().err, re.M)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("mlx-mittens be", "bench"),
        ("mlx-mittens bench --qui", "--quick"),
        ("mlx-mittens bench --ops softmax,rms", "softmax,rms_norm"),
        ("mlx-mittens simulate layer", "layer_norm"),
        ("mlx-mittens bench --predict --chip m2-max-", "m2-max-30"),
    ],
)
def test_a_shell_completes(tmp_path, line, expected):
    pytest.importorskip("argcomplete")
    answer = tmp_path / "answer"
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(answer), "_ARGCOMPLETE_IFS": "\n"}
    environment = {**os.environ, **asked, "COMP_LINE": line, "COMP_POINT": str(len(line))}
    done = subprocess.run(scripts.command(), env=environment, capture_output=True, text=True)
    assert [word.strip() for word in answer.read_text().split("\n")] == [expected], done.stderr


def process(before: str, *arguments: str) -> subprocess.Popen[str]:
    """The command in a process of its own, after some statements."""
    command = scripts.command(*arguments, before=before)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("arguments", [["simulate", "softmax"], ["doctor", "--ops", "softcap"]], ids=" ".join)
def test_a_reader_that_leaves_early_is_no_error(arguments):
    """As in `mlx-mittens doctor | head`."""
    running = process("pass", *arguments)
    running.stdout.close()
    said = running.stderr.read()
    assert running.wait() == 128 + signal.SIGPIPE
    assert "Traceback" not in said and "BrokenPipe" not in said
